"""SFP, GAL and CAC on a network half of whose channels are dead: exactly these have to go."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from benchmarks.rivals import cac, dcp, gal, sfp
from benchmarks.rivals.channels import best_first, counts_by_share, gated, keep_first
from benchmarks.rivals.training import Batch, Schedule

from recoup.errors import UsageError
from tests.benchmarks.rival_networks import ALIVE, BRIEF, NONE, alive, half_dead, pictures, share_of_the_living, subject


def test_sfp_loses_the_dead_filters_and_no_others():
    living, images, labels = subject()
    assert torch.equal(sfp.softly_trained(living, images, labels, BRIEF), alive(living.structure))


def test_a_filter_that_sfp_has_zeroed_may_grow_back():
    living, images, labels = subject()
    weight = living.model[0][0].weight
    with torch.no_grad():
        weight[0] *= 1e-3  # small, but the network listens to it
        weight[1] = 0.01
        living.model[0][1].bias[0] = 0.5  # the ReLU behind a filter of zero lets gradients pass
    keep = sfp.zero_smallest(living, counts_by_share(living, torch.zeros(living.structure.width)))
    assert not keep[0] and not weight[0].any() and keep[1]
    assert sfp.softly_trained(living, images, labels, dataclasses.replace(BRIEF, epochs=4))[0]
    assert weight[0].any()


def test_sfp_zeroes_the_smallest_norms():
    living, _, _ = subject()
    with torch.no_grad():
        living.model[0][0].weight.copy_(torch.arange(8.0).view(8, 1, 1, 1).expand(8, 3, 3, 3))
    keep = sfp.zero_smallest(living, {"0.0": 3, "1.0": 8})
    assert keep[:8].tolist() == [False] * 5 + [True] * 3
    assert living.model[0][0].weight.flatten(1).any(1).tolist() == [False] * 5 + [True] * 3


# Factors and weights trade scale, so the L1 weight has to be small against the data term for the living to survive.
LEARNING = gal.Settings(
    sparsity=0.05, data=2.0, mask_every=2, masks=Schedule(60, 0.05, batch=32, decay=0.01, augment=False), tuning=NONE
)


def test_the_masks_of_gal_come_to_zero_on_dead_channels():
    living, images, labels = subject()
    mask = gal.learnt_mask(living, images, labels, LEARNING)
    for group in living.groups:
        own = mask[group.channels]
        assert (own[~ALIVE] == 0).all()
        assert (own[ALIVE] > 0).sum() >= 3  # how many of the living depends on the L1 weight
    assert (mask[~living.free] == 1).all() and mask.min() >= 0


def test_gal_ends_once_what_is_not_zero_fits_the_budget():
    living, images, labels = subject()
    roomy = dataclasses.replace(living, allowed=2 * living.allowed + 1e9)
    short = dataclasses.replace(LEARNING, masks=dataclasses.replace(LEARNING.masks, epochs=20))
    shrunk, left = (gal.learnt_mask(asked, images, labels, short) for asked in (subject()[0], roomy))
    assert left[living.free].min() > shrunk[living.free].max()


def test_the_mask_of_gal_steps_on_every_so_many_batches_on_the_gradient_of_that_batch(monkeypatch):
    played, taken = [], []
    play, step = gal.Contest.play, gal.Fista.step
    monkeypatch.setattr(gal.Contest, "play", lambda *given: played.append(play(*given).clone()) or played[-1])
    monkeypatch.setattr(gal.Fista, "step", lambda fista, *given: taken.append(given[0]) or step(fista, *given))
    living, images, labels = subject()
    often = dataclasses.replace(LEARNING, mask_every=2, masks=dataclasses.replace(LEARNING.masks, epochs=2))
    gal.learnt_mask(living, images, labels, often)
    assert len(played) == 6 and len(taken) == 3  # three batches in each of two epochs
    assert all(torch.equal(a, b) for a, b in zip(taken, played[1::2], strict=True))


def test_the_gradient_of_a_mask_is_that_of_one_batch():
    living, images, labels = subject()
    contest = gal.contest_of(living, images[:1], LEARNING)
    mask = torch.full((living.structure.width,), 0.9).requires_grad_()
    once, again = (contest.play(mask, Batch(images, labels, 0.0, False)).clone() for _ in range(2))
    torch.testing.assert_close(again, once)
    assert once[living.free].any()


def test_gal_computes_what_the_masked_network_does():
    model, images = half_dead(), pictures()
    living, _, labels = subject()
    settings = dataclasses.replace(LEARNING, share=share_of_the_living(model, images))
    smaller, _ = gal.prune(model, images, labels, settings)
    mask = gal.learnt_mask(living, images, labels, settings)
    torch.testing.assert_close(smaller(images), gated(living, mask, images), rtol=1e-4, atol=1e-5)
    assert (smaller[0][0].out_channels, smaller[1][0].out_channels) == (4, 4)


def test_a_factor_counts_against_the_largest_of_its_group():
    living, _, _ = subject()
    mask = torch.ones(living.structure.width)
    first, second = living.groups
    mask[first.channels], mask[second.channels] = torch.linspace(0.01, 0.02, 8), torch.linspace(0, 10, 8)
    score = gal.worth(living, mask)
    torch.testing.assert_close(score[first.channels], torch.linspace(0.5, 1, 8, dtype=torch.float64))
    torch.testing.assert_close(score[second.channels], torch.linspace(0, 1, 8, dtype=torch.float64))
    mask[first.channels] = 0
    assert score[first.start] > (nothing := gal.worth(living, mask)[first.channels])[ALIVE].min() > 0
    assert (nothing[~ALIVE] == 0).all()  # among zeros the norms decide


def test_the_losses_of_gal_are_those_of_its_formulas():
    true, scores = torch.tensor([[1.0], [2.0]]), torch.tensor([[-3.0], [4.0]])
    judge = torch.nn.Identity()  # a score is its own logit
    right, wrong = -true.sigmoid().log().mean(), -(1 - scores.sigmoid()).log().mean()
    deceiving = -scores.sigmoid().log().mean()
    torch.testing.assert_close(gal.caught(judge, true, scores), right + wrong + deceiving)
    torch.testing.assert_close(gal.deceived(judge, true, scores, 3.0), 1.5 * (16 + 4) / 2 + deceiving)


def test_a_step_of_fista_is_a_threshold_and_never_falls_below_zero():
    start = torch.tensor([1.0, 0.05, 0.3, 1.0])
    fista = gal.Fista(start, start.clone())
    gradient, free = torch.tensor([1.0, 0.0, 8.0, 5.0]), torch.tensor([True, True, True, False])
    fista.step(gradient, rate=0.1, sparsity=1.0, free=free)
    torch.testing.assert_close(fista.value, torch.tensor([0.8, 0.0, 0.0, 1.0]))
    torch.testing.assert_close(fista.ahead.detach(), fista.value)  # the first step has no momentum
    fista.step(torch.zeros(4), rate=0.1, sparsity=1.0, free=free)
    factor = (1.618034 - 1) / ((1 + (1 + 4 * 1.618034**2) ** 0.5) / 2)
    torch.testing.assert_close(fista.ahead[0].detach(), torch.tensor(0.7 - 0.1 * factor))
    fista.step(torch.tensor([5.0, 0.0, 0.0, 0.0]), rate=0.1, sparsity=1.0, free=free)
    assert fista.value[0] > 0 and fista.ahead[0] == 0  # its momentum would carry it below


@pytest.mark.parametrize("criterion", cac.CRITERIA)
def test_cac_ranks_dead_channels_last(criterion):
    living, images, labels = subject()
    changes = cac.Changes(living.structure.width, criterion, images.device)
    optimiser = torch.optim.SGD(living.model.parameters(), 0.0)
    keep = living.structure.keep_all()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(300 if criterion == "sampled" else 20):
            cac.step(living, optimiser, cac.Batch(images, labels, 0.0, False), changes, keep, off=0.2)
    score = changes.estimate()
    for group in living.groups:
        assert score[group.channels][ALIVE].max() > score[group.channels][~ALIVE].max()
    if criterion == "gradient":
        assert (score[living.free & ~alive(living.structure)] == 0).all()


def test_the_change_is_the_difference_of_conditional_means():
    changes = cac.Changes(2, "sampled", torch.device("cpu"))
    for gate, loss in (([1.0, 1.0], 1.0), ([0.0, 1.0], 4.0), ([1.0, 0.0], 2.0), ([0.0, 0.0], 6.0)):
        changes.add(torch.tensor(gate), torch.tensor(loss), torch.zeros(2))
    assert changes.estimate().tolist() == [(4 + 6) / 2 - (1 + 2) / 2, (2 + 6) / 2 - (1 + 4) / 2]


def test_a_gradient_of_cac_is_the_change_of_the_loss_along_the_gate():
    living, images, labels = subject()
    changes = cac.Changes(living.structure.width, "gradient", images.device)
    keep, still = living.structure.keep_all(), torch.optim.SGD(living.model.parameters(), 0.0)
    cac.step(living, still, Batch(images, labels, 0.0, False), changes, keep, off=0.0)

    def loss(channel, factor):
        gate = keep.float()
        gate[channel] = factor
        with torch.no_grad():
            return F.cross_entropy(gated(living, gate, images), labels).double()

    for channel in alive(living.structure).nonzero().flatten()[:6].tolist():
        slope = (loss(channel, 0.98) - loss(channel, 1.02)) / 0.04
        torch.testing.assert_close(changes.estimate()[channel], slope, rtol=0.02, atol=2e-4)


def test_cac_drops_the_channels_of_the_lowest_change_epoch_by_epoch(monkeypatch):
    living, images, labels = subject()
    share, kept = share_of_the_living(half_dead(), images), []
    lowest = cac.lowest_dropped
    monkeypatch.setattr(cac.Changes, "estimate", lambda changes: alive(living.structure).double())
    monkeypatch.setattr(cac, "lowest_dropped", lambda *given: kept.append(lowest(*given)) or kept[-1])
    settings = cac.Settings(share=share, pruning=dataclasses.replace(BRIEF, epochs=3), tuning=NONE)
    assert torch.equal(cac.gradually_pruned(living, images, labels, settings), alive(living.structure))
    assert int(kept[0].sum()) > int(kept[1].sum()) > int(kept[2].sum())  # in a line, not at once


def test_what_cac_has_dropped_stays_dropped_while_the_budget_falls():
    living, _, _ = subject()
    keep, draw = living.structure.keep_all(), torch.Generator().manual_seed(0)
    full = 2 * living.allowed / share_of_the_living(half_dead(), pictures())
    masks = [keep]
    for allowed in torch.linspace(full / 2, living.allowed / 2, 12).tolist():
        score = torch.rand(living.structure.width, generator=draw).double()  # another opinion every time
        masks.append(cac.lowest_dropped(dataclasses.replace(living, allowed=allowed), score, masks[-1]))
    assert all(not (after & ~before).any() for before, after in itertools.pairwise(masks))
    assert int(masks[-1].sum()) < int(keep.sum()) - 8


def test_what_cac_has_dropped_does_not_fill_up_the_room_that_others_leave():
    living, _, _ = subject()
    orders = best_first(living.structure, torch.arange(living.structure.width).float())
    dropped = keep_first(living.structure, orders, {"0.0": 2, "1.0": 2})
    score = -torch.arange(living.structure.width).double()  # now the others would be better
    assert torch.equal(cac.lowest_dropped(living, score, dropped), dropped)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: cac.Settings(pruning=NONE), "pruning.epochs"),
        (lambda: gal.Settings(masks=NONE), "masks.epochs"),
        (lambda: gal.Settings(mask_every=0), "mask_every"),
        (lambda: sfp.Settings(training=NONE), "training.epochs"),
        (lambda: dcp.Settings(training=NONE), "training.epochs"),
    ],
)
def test_a_setting_that_would_switch_a_recipe_off_is_refused(make, name):
    with pytest.raises(UsageError, match=f"{name} must be a whole number of at least 1, got 0"):
        make()
