import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from recoup.allocation.goal import Trial
from recoup.allocation.latency import Latency
from recoup.channels.cost import Cost
from recoup.inputs.resources import PeakMemory
from recoup.plan import Recovery
from recoup.report.charts import search_chart, width_chart
from recoup.report.content import ConstantChannels, DependentChannels, GroupRow, Report, Score
from recoup.report.formatting import duration
from recoup.report.page import render_page
from recoup.report.reading import report_from_json
from recoup.surgery.comparison import Proof

MINUS = "\N{MINUS SIGN}"
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects texts and tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def group(name: str = "conv1", before: int = 32, after: int = 20, locked: int = 0, *reasons: str) -> GroupRow:
    return GroupRow(name, before, after, locked, reasons, (name,), ("conv2",))


def trial(drop: float, allowed: float = 1.0) -> Trial:
    return Trial(("conv1",), 0.5, drop, allowed)


def report(**changes: object) -> Report:
    whole = Report(
        network="Net",
        before=Cost(3_034_368, 308_074),
        after=Cost(642_048, 51_326),
        groups=(group(), group("head", 10, 10, 10, "the model returns it")),
        recovery={"conv2": Recovery(0.0171, 3.1e-7, 270.0, 288, 5000)},
        proof=Proof(4.4e-16, 1e-10),
        samples=1078,
        score=Score(98.89, 98.33, 1.0, (trial(0.56), trial(1.4))),
        seconds={"trace": 1.5, "search": 4.5},
        method={"selector": "forward", "positions": None},
    )
    return dataclasses.replace(whole, **changes)


def drawn_widths(*groups: GroupRow) -> str:
    """The chart of the widths as it is in the page."""
    (chart,) = re.findall(
        r'<svg[^>]*aria-label="Channels per group">.*?</svg>', render_page(report(groups=groups)), re.S
    )
    return chart


def test_says_everything_that_matters():
    text = Page(render_page(report())).text
    for expected in (f"{MINUS}78.8%", "3.03 M → 642 k", "3,034,368 → 642,048", f"{MINUS}83.3%", "308 k → 51.3 k"):
        assert expected in text
    for expected in (
        f"{MINUS}0.56",
        "98.89 → 98.33",
        "tolerance 1.00",
        "smaller = masked original to 4e-16",
        "1,078 samples",
    ):
        assert expected in text
    for expected in ("32 → 20", "1.71%", "3.1e-07", "2.7e+02", "10 of 10", "the model returns it", "6.0 seconds"):
        assert expected in text
    assert "selector" in text and "forward" in text and "None" in text


def test_constant_channels_are_shown_and_what_few_samples_say_is_doubted():
    told = report(constant={"conv1": ConstantChannels(9, 8, 100)})
    text = Page(render_page(told)).text
    assert "9 channels were constant on the calibration images, 8 of them are gone" in text
    assert "9 constant, 8 of them gone" in text
    assert "Constant" in text and "Constant" not in Page(render_page(report())).text
    assert not told.warnings
    (few,) = report(constant={"conv1": ConstantChannels(9, 8, 20)}).warnings
    assert "only 20 different ones were seen that count (conv1: 8 of 32)" in few and "at least 100" in few
    (much,) = report(constant={"conv1": ConstantChannels(17, 12, 100)}).warnings
    assert "(conv1: 12 of 32)" in much and "only" not in much
    assert not report(constant={"conv1": ConstantChannels(32, 0, 3)}).warnings


def test_a_residual_that_is_not_known_is_called_that():
    text = Page(render_page(report(recovery={"conv2": Recovery(None, 0.1, 1.0, 99, 9)}))).text
    assert "not known" in text
    assert "not known" not in Page(render_page(report())).text


def test_flops_stand_beside_macs():
    told = report(before=Cost(2_000_000, 10, 500_000), after=Cost(900_000, 5, 100_000))
    text = Page(render_page(told)).text
    assert f"{MINUS}60.0%" in text and "2.50 M → 1.00 M" in text and "2,500,000 → 1,000,000" in text
    assert "FLOPs 2,500,000 -> 1,000,000 (-60.0%)" in str(told)
    data = told.to_json()
    assert (data["before"]["flops"], data["after"]["flops"], data["flops_removed"]) == (2_500_000, 1_000_000, 0.6)


def test_top5_stands_beside_the_accuracy():
    told = report(score=Score(76.0, 75.5, 1.0, (trial(0.5),), "accuracy", 0.9, 93.0, 92.75))
    assert "top-5 93.00 → 92.75" in Page(render_page(told)).text
    assert "\ntop-5 accuracy 93.00 -> 92.75\n" in str(told)
    assert "top-5" not in Page(render_page(report())).text and "top-5" not in str(report())


def test_peak_memory_is_told_where_there_is_one():
    told = report(memory=PeakMemory(3 << 30, is_exact=True))
    assert f"Peak GPU memory: {told.memory}." in Page(render_page(told)).text
    assert f"\npeak GPU memory: {told.memory}\n" in str(told)
    assert "emory" not in Page(render_page(report())).text and "emory" not in str(report())


def test_what_was_saved_of_a_report_gives_it_back():
    score = Score(76.0, 75.5, 1.0, (trial(0.5),), "accuracy", 0.9, 93.0, 92.75)
    dependent = {"conv1": DependentChannels(3, 2)}
    costs = {"before": Cost(20, 10, 5), "after": Cost(9, 5, 1)}
    told = report(**costs, score=score, memory=PeakMemory(3 << 30, is_exact=False), dependent=dependent)
    again = report_from_json(json.loads(json.dumps(told.to_json())))
    assert again == told and again.after.flops == 10


def test_tells_the_time_where_it_was_asked_for():
    text = Page(render_page(report(latency=Latency(0.0204, 0.0117, 0.6)))).text
    for expected in ("Time of a batch", f"{MINUS}42.6%", "20.4 ms → 11.7 ms", "at most 60.0% asked for"):
        assert expected in text
    assert "Time of a batch" not in Page(render_page(report())).text


def test_says_when_it_takes_more_time_than_asked_for():
    (told,) = report(latency=Latency(0.02, 0.0132, 0.6)).warnings
    assert "takes 66.0% of the time of the original, more than the 60.0% asked for" in told
    assert told in Page(render_page(report(latency=Latency(0.02, 0.0132, 0.6)))).text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.01234, "12.3 ms"),
        (0.5, "500 ms"),
        (0.9996, "1.00 s"),
        (12.34, "12.3 s"),
        (1234.0, "1,234 s"),
        (4.5e-5, "45.0 µs"),
        (3e-9, "0.00300 µs"),
    ],
)
def test_durations_as_people_read_them(seconds, text):
    assert duration(seconds) == text


def test_needs_nothing_from_outside():
    page = Page(render_page(report()))
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not [value for name, value in page.attributes if name in ("src", "href")]
    assert not re.search(r"https?://|@import|url\((?!#)", render_page(report()))


def test_light_and_dark_and_printed():
    html = render_page(report())
    assert "prefers-color-scheme: dark" in html and "@media print" in html and 'name="viewport"' in html


@pytest.mark.parametrize(
    "changes",
    [
        {"score": None},
        {"score": Score(1.0, 2.0, None, ())},
        {"recovery": {}},
        {"groups": ()},
        {"groups": tuple(group(f"layer{i}.conv", 8 + i, 1 + i % 8) for i in range(200))},
        {"seconds": {}},
        {"method": {}},
        {"proof": Proof(0.0, 0.0)},
        {"before": Cost(7, 3), "after": Cost(7, 3)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_well_formed_whatever_is_missing(changes):
    page = Page(render_page(report(**changes)))
    assert page.tags.count("html") == page.tags.count("h1") == 1


def test_sections_appear_only_with_something_to_say():
    assert "Search" in Page(render_page(report())).text
    bare = Page(render_page(report(score=None, recovery={}, groups=(group(),)))).text
    assert not any(title in bare for title in ("Search", "Recovery", "Locked", "Score"))


def test_a_budget_without_tolerance():
    text = Page(render_page(report(score=Score(90.0, 90.5, None, ())))).text
    assert "+0.50" in text and "gained 0.50 points" in text and "no tolerance" in text


def test_exact_proof():
    assert "exact" in Page(render_page(report(proof=Proof(0.0, 0.0)))).text


def test_held_out_images_show_the_output_error_and_what_was_kept():
    page = Page(render_page(report(held_out={"one pass": 0.02, "joint": 0.005, "none": 0.0399})))
    assert "Held-out images" in page.text and "Output error" in page.text and "harm" not in page.text.lower()
    assert page.texts.count("joint (kept)") == 1 and page.text.count("(kept)") == 1
    assert "0.0200" in page.texts and "0.0050" in page.texts
    assert {"width:50.1%", "width:12.5%", "width:100.0%"} <= {
        value for name, value in page.attributes if name == "style"
    }
    assert "width:0.0%" in render_page(report(held_out={"one pass": 0.0}))


def test_the_method_has_its_section():
    page = Page(render_page(report()))
    assert "Method" in page.texts and "Settings" not in page.texts


EVIL = "<script>alert('x')</script>&\"><b onload=x>{{ 7 * 7 }}\x1b[0m"
EVIL_WITHOUT_CONTROL = EVIL.replace("\x1b", "")


def hostile() -> Report:
    """Every text that comes from outside wants to be HTML, a template or a terminal's command."""
    return report(
        network=EVIL,
        groups=(dataclasses.replace(group(EVIL, 4, 2, 1, EVIL, EVIL), consumers=(EVIL,)),),
        recovery={EVIL: Recovery(0.1, 0.1, 1.0, 99, 9)},
        score=Score(9.0, 8.0, 1.0, (Trial((EVIL,), 0.5, 0.5, 1.0),), EVIL),
        seconds={EVIL: 1.0},
        method={EVIL: EVIL},
        held_out={EVIL: 0.5},
        form=EVIL,
    )


def test_names_are_escaped_everywhere():
    html = render_page(hostile())
    page = Page(html)
    assert not {"script", "b"} & set(page.tags) and "<script" not in html
    assert "onload" not in {name for name, _ in page.attributes}
    # title, heading, warning, score, form, column, reader, trial, held-out images, recovery, group twice, two reasons,
    # stage, option and its value
    assert page.text.count(EVIL_WITHOUT_CONTROL) == 17
    assert "49" not in page.text and not re.search(r"[\x00-\x09\x0b-\x1f]", html)


def test_hostile_names_add_no_element():
    plain = dataclasses.replace(hostile(), network="Net", form="form")
    assert Page(render_page(hostile())).tags == Page(render_page(plain)).tags


def test_widths_are_drawn_to_scale():
    heights = re.findall(r'class="(gone|kept|locked)"[^>]*height="([\d.]+)"', drawn_widths(group("a", 40, 10, 5)))
    size = {kind: float(height) for kind, height in heights}
    assert size["kept"] == pytest.approx(size["gone"] / 4, abs=0.1)
    assert size["locked"] == pytest.approx(size["gone"] / 8, abs=0.1)


def test_locked_channels_lie_on_the_kept_ones():
    (column,) = width_chart([group("a", 40, 10, 20)]).columns
    assert [bar.kind for bar in column.bars] == ["gone", "kept", "locked"]
    assert column.bars[1].top == column.bars[2].top > column.bars[0].top
    assert {bar.top + bar.height for bar in column.bars} == {222}


def test_many_groups_are_named_by_the_pointer_only():
    few, many = (drawn_widths(*(group(f"g{i}") for i in range(count))) for count in (3, 200))
    assert ">g2<" in few and ">32 → 20<" in few and ">g2<" not in many and ">32 → 20<" not in many
    assert "<title>g199: 32 -&gt; 20 channels, 0 locked</title>" in many


def test_trials_are_accepted_rejected_or_beyond_the_picture():
    trials = (trial(-0.2), trial(0.3), trial(1.5), trial(60.0))
    chart = render_page(report(score=Score(9.0, 8.0, 1.0, trials)))
    assert chart.count('circle class="accepted"') == 2
    assert chart.count('circle class="rejected"') == 1
    assert chart.count('polygon class="rejected"') == 1
    assert "4 candidates were measured, 2 of them accepted" in chart
    assert search_chart(trials).is_clipped and not search_chart(trials[:3]).is_clipped
    lower, higher = (float(y) for y in re.findall(r'class="accepted" cx="[\d.]+" cy="([\d.]+)"', chart))
    assert lower > higher


def test_about_twenty_trials_are_numbered():
    few, many = ([mark.number for mark in search_chart([trial(0.5)] * count).marks] for count in (20, 100))
    assert few == [str(number) for number in range(1, 21)]
    assert [number for number in many if number] == [str(number) for number in range(1, 101, 5)]


def test_the_allowance_is_a_staircase():
    chart = search_chart([trial(0.5, 1.0), trial(0.5, 2.0)])
    corners = [tuple(float(number) for number in corner.split(",")) for corner in chart.allowance.split()]
    assert [x for x, _ in corners] == [56, 502, 502, 948]
    assert corners[0][1] == corners[1][1] > corners[2][1] == corners[3][1]


def test_a_triangle_is_explained_where_there_is_one():
    plain = report(score=Score(9.0, 8.0, 1.0, (trial(0.5),)))
    clipped = report(score=Score(9.0, 8.0, 1.0, (trial(0.5), trial(60.0))))
    assert "beyond the picture" not in Page(render_page(plain)).text
    assert "beyond the picture" in Page(render_page(clipped)).text
