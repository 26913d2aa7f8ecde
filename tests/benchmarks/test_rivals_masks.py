"""SFP, GAL and CAC on a network half of whose channels are dead: exactly these have to go."""

import dataclasses

import pytest
import torch
from benchmarks.rivals import cac, gal, sfp
from benchmarks.rivals.channels import best_first, counts_by_share, gated, keep_first
from benchmarks.rivals.training import Schedule

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


def test_the_masks_of_gal_come_to_zero_on_dead_channels_alone():
    living, images, labels = subject()
    settings = gal.Settings(sparsity=1.0, masks=Schedule(20, 0.03, batch=32, augment=False))
    mask = gal.learnt_mask(living, images, labels, settings)
    free = living.free
    assert (mask[free] == 0).tolist() == (~alive(living.structure)[free]).tolist()
    assert (mask[~free] == 1).all()


def test_gal_prunes_the_dead_and_computes_what_the_masked_network_does():
    model, images = half_dead(), pictures()
    living, _, labels = subject()
    share = share_of_the_living(model, images)
    settings = gal.Settings(share, sparsity=1.0, masks=Schedule(20, 0.03, batch=32, augment=False), tuning=NONE)
    smaller, _ = gal.prune(model, images, labels, settings)
    mask = gal.learnt_mask(living, images, labels, settings)
    torch.testing.assert_close(smaller(images), gated(living, mask, images), rtol=1e-4, atol=1e-5)


def test_a_step_of_fista_is_a_soft_threshold():
    start = torch.tensor([1.0, 0.05, -0.3, 1.0])
    fista = gal.Fista(start, start.clone())
    gradient, free = torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.tensor([True, True, True, False])
    fista.step(gradient, rate=0.1, sparsity=1.0, free=free)
    torch.testing.assert_close(fista.value, torch.tensor([0.8, 0.0, -0.2, 1.0]))
    torch.testing.assert_close(fista.ahead.detach(), fista.value)  # the first step has no momentum
    fista.step(torch.zeros(4), rate=0.1, sparsity=1.0, free=free)
    factor = (1.618034 - 1) / ((1 + (1 + 4 * 1.618034**2) ** 0.5) / 2)
    torch.testing.assert_close(fista.ahead[0].detach(), torch.tensor(0.7 - 0.1 * factor))


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


def test_what_cac_has_dropped_stays_dropped():
    living, _, _ = subject()
    orders = best_first(living.structure, torch.arange(living.structure.width).float())
    dropped = keep_first(living.structure, orders, {"0.0": 4, "1.0": 4})
    score = -torch.arange(living.structure.width).double()  # now the others would be better
    keep = cac.lowest_dropped(living, score, dropped)
    assert not (keep & ~dropped).any()
