"""Clusters of points whose places are known."""

import itertools

import pytest
import torch

from recoup.algebra.clusters import clusters


def around(places, each, spread=0.0, seed=0):
    """`each` points about every place, shuffled, and the place of each."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.arange(len(places)).repeat_interleave(each)[torch.randperm(len(places) * each, generator=generator)]
    return places[which] + spread * torch.randn(len(which), places.shape[1], generator=generator).double(), which


def same_parts(found, wanted):
    """Whether two labellings put the same points together."""
    return torch.equal(found[:, None] == found, wanted[:, None] == wanted)


@pytest.mark.parametrize("seed", range(4))
def test_points_about_far_places_are_told_apart(seed):
    places = 10 * torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)).double()
    points, which = around(places, 6, spread=0.1, seed=seed)
    assert same_parts(clusters(points, 5, seed), which)


def test_as_many_points_as_clusters_have_one_each():
    assert clusters(torch.zeros(3, 2), 3).tolist() == [0, 1, 2]


def test_fewer_places_than_clusters_are_found_exactly():
    points, which = around(torch.eye(3).double(), 4)
    found = clusters(points, 8)
    assert same_parts(found, which)
    assert sorted(set(found.tolist())) == [0, 1, 2]


def test_no_cutting_of_a_few_points_by_hand_is_better():
    """Against all labellings: two clusters of seven points on a line that fall into two heaps."""
    points = torch.tensor([0.0, 0.1, 0.3, 0.35, 2.0, 2.2, 2.3])[:, None].double()

    def spread(labels):
        parts = [points[labels == k] for k in labels.unique()]
        return sum(float((part - part.mean(0)).square().sum()) for part in parts)

    best = min(spread(torch.tensor(labels)) for labels in itertools.product((0, 1), repeat=7))
    assert spread(clusters(points, 2)) == pytest.approx(best)


def test_centres_move_to_the_means_of_their_points():
    """The farthest points are 0 and 10, and 4.9 lies nearer to 0; the mean of the others draws it over."""
    points = torch.tensor([0.0, 4.9, 6.0, 6.0, 6.0, 10.0])[:, None].double()

    def first(seed):
        return int(torch.randint(6, (1,), generator=torch.Generator().manual_seed(seed)))

    seed = next(seed for seed in range(100) if first(seed) == 0)
    assert same_parts(clusters(points, 2, seed), torch.tensor([0, 1, 1, 1, 1, 1]))


def test_the_same_points_and_seed_give_the_same_clusters():
    points = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)).double()
    assert torch.equal(clusters(points, 4, 7), clusters(points, 4, 7))
    assert int(clusters(points, 4, 7).max()) == 3
