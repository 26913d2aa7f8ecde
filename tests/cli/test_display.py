from recoup.cli.display import print_widths
from recoup.report.content import ConstantChannels
from tests.report.test_page import group, report


def test_widths_are_printed_with_what_was_constant_and_what_is_locked(capsys):
    shown = report(
        groups=(group(), group("head", 10, 10, 10, "the model returns it")),
        constant={"conv1": ConstantChannels(9, 8, 100)},
    )
    print_widths(shown)
    first, second = [line for line in capsys.readouterr().out.splitlines() if "conv1" in line or "head" in line]
    assert "9 constant, 8 of them gone" in first and "locked" not in first
    assert "10 locked: the model returns it" in second and "constant" not in second
