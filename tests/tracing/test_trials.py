"""Trial cuts: no two groups lose alike, so that code which reads one size cannot pass for code that follows another."""

import pytest
import torch
from torch import nn

import recoup
from recoup.tracing.trials import TARGETS, sample_cut, trial_counts


def chain(*widths):
    pairs = zip((5, *widths), (*widths, 3), strict=True)
    model = nn.Sequential(*(module for a, b in pairs for module in (nn.Linear(a, b), nn.ReLU()))).eval()
    return recoup.trace(model, torch.randn(4, 5)).structure


def left(structure, number):
    counts = trial_counts(structure, number)
    return [(group.width, group.width - counts[group.name]) for group in structure.prunable]


@pytest.mark.parametrize("number", range(len(TARGETS)))
def test_what_is_left_is_in_no_proportion_to_what_is_left_of_another(number):
    found = left(chain(64, 32, 64, 16, 8, 64, 32, 48), number)
    assert found == left(chain(64, 32, 64, 16, 8, 64, 32, 48), number)
    for place, (wide, kept) in enumerate(found):
        for other_wide, other in found[:place]:
            (small, few), (large, many) = sorted(((wide, kept), (other_wide, other)))
            if large % small == 0:
                assert few not in (many // (large // small), -(-many // (large // small)))


def test_what_is_left_is_odd_and_about_two_thirds_where_nothing_is_alike():
    ((_, kept),) = left(chain(64), 0)
    assert kept == 43


def test_equal_groups_lose_differently_as_long_as_there_are_counts():
    kept = [count for _, count in left(chain(*[32] * 8), 0)]
    assert len(set(kept)) == 8
    assert all(count % 2 for count in kept)


def test_every_group_loses_something_and_keeps_something():
    structure = chain(2, 3, 2, 3, 2, 40)
    for number in range(len(TARGETS)):
        keep = sample_cut(structure, number)
        for group in structure.prunable:
            assert 0 < int(keep[group.channels].sum()) < group.width
            assert int((~keep[group.channels]).sum()) == trial_counts(structure, number)[group.name]
