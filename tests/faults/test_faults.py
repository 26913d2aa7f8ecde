import signal

import pytest

from tests.faults.commands import Command, end_at, is_complete, new_place


@pytest.mark.parametrize(
    ("moment", "kind", "goes_on"),
    [
        (0.3, signal.SIGTERM, False),
        (0.9, signal.SIGKILL, False),
        (1.5, signal.SIGTERM, False),
        (2.1, signal.SIGKILL, True),
    ],
)
def test_nothing_is_half_written_or_left_whenever_it_ends(moment, kind, goes_on):
    assert end_at(moment, kind, goes_on=goes_on) == ""


def test_a_command_that_may_not_write_activations_says_so_and_leaves_nothing():
    with new_place() as place:
        code, said = Command(place, limit=50_000).finish()
        assert code == 1
        assert f"could not be written to {place.temporary} (File too large)" in " ".join(said.split())
        assert "set TMPDIR" in said and "Traceback" not in said
        assert not place.output.exists() and not place.leftovers


def test_a_full_disk_at_the_end_of_the_output_is_an_error_that_says_so():
    with new_place() as place:
        code, said = Command(place, "--method", "paper", "--json", result="/dev/full").finish()
        assert code == 1
        assert said.rstrip().endswith("error: No space left on device: the output. Make room and run it again.")
        assert is_complete(place.output)
