"""Products with the Jacobian of a segment: all ways agree, and become a table."""

import pytest
import torch
from benchmarks.jacobian import WAYS, Timing, line, longest, make_piece, measure, parse, place, table

from tests import zoo

DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def piece():
    with zoo.seeded(3):
        model = zoo.Residual(8).eval()
    return make_piece(model, (3, 8, 8), 20)


def test_all_ways_agree_and_have_their_times(piece):
    found = measure(piece, DEVICE, 2)
    assert [timing.way for timing in found] == list(WAYS)
    assert all(timing.note == "" and timing.difference < 1e-5 for timing in found)
    assert all(timing.first > 0 and timing.later > 0 for timing in found)


def test_the_product_is_the_derivative_along_the_direction(piece):
    step = 1e-4  # the error shrinks with it: values near a kink of ReLU move otherwise than the derivative says
    ahead, behind = (
        piece.residual(tuple(at + sign * step * part for at, part in zip(piece.start, piece.direction, strict=True)))
        for sign in (1, -1)
    )
    found, expected = WAYS["recorded differentials"](piece)(piece.direction), (ahead - behind) / (2 * step)
    assert float((found - expected).norm() / expected.norm()) < 0.05


def test_the_segment_has_half_its_channels_and_the_images_that_are_fitted_to(piece):
    assert piece.images == 20
    assert longest([piece.segment]) is piece.segment
    assert all(part.shape[0] <= 6 for part in piece.start)  # of up to 11 outputs


def test_a_way_that_fails_is_a_line(piece, monkeypatch):
    def fail(_):
        raise RuntimeError("no forward mode\nat all")

    monkeypatch.setitem(WAYS, "torch.func.jvp", fail)
    found = measure(piece, DEVICE, 1)
    assert found[1] == Timing("torch.func.jvp", note="RuntimeError: no forward mode")
    assert "| torch.func.jvp | - | - | - | RuntimeError: no forward mode |" in table(piece, found, "here")


def test_times_are_relative_to_our_own(piece):
    timings = [Timing("ours", 30.0, 2.0, 0.0), Timing("theirs", 9.0, 5.0, 1e-7)]
    text = table(piece, timings, "a CPU").splitlines()
    assert "20 images, a CPU, torch " in text[0]
    assert text[4:] == ["| ours | 30.0 | 2.00 | 1.00 | 0e+00 |", "| theirs | 9.0 | 5.00 | 2.50 | 1e-07 |"]
    assert line(timings[1], 5.0).split(" | ")[3] == "1.00"


def test_arguments():
    options = parse(["--device", "cpu", "--images", "8"])
    assert (options.model, options.images, options.device) == ("recoup:resnet56", 8, "cpu")
    assert place("cpu").startswith("CPU with ")
