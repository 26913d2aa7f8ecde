"""DCP, MetaPruning and AMC: informative channels, widths as asked, and a budget that no candidate exceeds."""

import copy
import dataclasses
import random

import pytest
import torch
from benchmarks.rivals import amc, dcp, metapruning
from benchmarks.rivals.channels import best_first, subject_of
from torch import nn

from recoup.channels.cost_model import macs_model
from tests import zoo
from tests.benchmarks.rival_networks import ALIVE, BRIEF, NONE, alive, half_dead, pictures, subject


def choice_of(living, images, labels, settings):
    losses = dcp.trained_losses(living, images, labels, settings)
    return dcp.Choice(living, copy.deepcopy(living.model), losses, images, labels, settings)


@pytest.mark.parametrize("discrimination", [0.0, 1.0])
def test_dcp_chooses_the_informative_channels(discrimination):
    living, images, labels = subject()
    settings = dcp.Settings(losses=1, discrimination=discrimination, images=64, training=BRIEF)
    choice = choice_of(living, images, labels, settings)
    assert torch.equal(dcp.chosen(choice), alive(living.structure))


def test_dcp_begins_with_the_channel_of_the_largest_gradient():
    living, images, labels = subject()
    settings = dcp.Settings(losses=0, images=len(images), training=NONE)
    choice = choice_of(living, images, labels, settings)
    group = living.groups[-1]
    head = living.model[4]
    features = living.model[:4](images).detach()
    weight = torch.zeros_like(head.weight).requires_grad_()
    scores = features @ weight.T + head.bias.detach()
    aims = features @ head.weight.detach().T + head.bias.detach()
    loss = nn.functional.cross_entropy(scores, labels) + (scores - aims).square().mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    keep = dcp.chosen_of(choice, group, 1, None, torch.Generator().manual_seed(0))
    assert keep.nonzero().flatten().tolist() == [int(gradient.norm(dim=0).argmax())]


def test_dcp_leaves_nothing_of_what_was_not_chosen_and_removes_its_hooks():
    living, images, labels = subject()
    settings = dcp.Settings(losses=1, images=64, training=NONE)
    keep = dcp.chosen(choice_of(living, images, labels, settings))
    readers = (living.model[1][0].weight, living.model[4].weight)
    for group, weight in zip(living.groups, readers, strict=True):
        assert not weight[:, ~keep[group.channels]].any() and weight[:, keep[group.channels]].any()
    assert not any(module._forward_hooks for module in living.model.modules())


def residual(share: float):
    with zoo.seeded(0):
        return subject_of(zoo.Residual(12).eval(), pictures(2), share)


def test_generated_weights_have_the_widths_asked_for():
    living, _, _ = subject()
    maker = metapruning.WeightMaker(living, hidden=4)
    made = maker({"0.0": 3, "1.0": 5})
    assert {name: value.shape for name, value in made.items()} == {
        name: living.model.get_parameter(name).shape for name in ("0.0.weight", "1.0.weight", "4.weight")
    }
    assert made["0.0.weight"].flatten(1).any(1).tolist() == [True] * 3 + [False] * 5
    assert made["1.0.weight"].flatten(1).any(1).tolist() == [True] * 5 + [False] * 3
    assert made["1.0.weight"].sum((0, 2, 3)).ne(0).tolist() == [True] * 3 + [False] * 5
    assert made["4.weight"].ne(0).any(0).tolist() == [True] * 5 + [False] * 3
    other = maker({"0.0": 3, "1.0": 6})
    assert not torch.equal(made["1.0.weight"][:5, :3], other["1.0.weight"][:5, :3])  # they depend on the widths


def test_generators_learn_for_many_widths():
    living, images, labels = subject()
    schedule = dataclasses.replace(BRIEF, epochs=25, rate=0.1)
    maker = metapruning.trained_maker(living, images, labels, metapruning.Settings(hidden=8, generators=schedule))
    with torch.no_grad(), metapruning.batch_statistics(living.model):
        for count in (4, 8):
            scores = metapruning.called(living.model, maker({"0.0": count, "1.0": count}), images)
            most = labels.bincount().max() / len(labels)
            assert metapruning.right(scores, labels) > float(most) + 0.1


def test_evolution_stays_within_the_budget_and_finds_the_fittest():
    asked = residual(0.5)
    cost = macs_model(asked.structure, best_first(asked.structure, torch.zeros(asked.structure.width)))
    favourite, seen = asked.groups[1].name, []

    def fitness(counts):
        seen.append(counts)
        return counts[favourite]

    found = metapruning.evolved(asked, fitness, metapruning.Settings(generations=6, population=12, parents=4))
    assert all(cost.total(counts) <= asked.allowed for counts in seen)
    assert all(cost.total(counts) >= 0.9 * asked.allowed for counts in seen)  # a channel of the stream costs 8 %
    assert found[favourite] == max(counts[favourite] for counts in seen) > seen[0][favourite]


def test_fresh_weights_are_drawn_for_a_training_from_scratch():
    model = half_dead()
    metapruning.reset(model, seed=1)
    assert not torch.equal(model[0][0].weight, half_dead()[0][0].weight)
    assert model[0][0].weight[~ALIVE].any()


@pytest.mark.parametrize("share", [0.15, 0.4, 0.8])
def test_the_constraint_of_amc_holds_for_every_sequence_of_actions(share):
    asked, draw = residual(share), random.Random(0)
    cost = macs_model(asked.structure, best_first(asked.structure, torch.zeros(asked.structure.width)))
    sequences = [[1.0] * len(asked.groups), [0.0] * len(asked.groups)]
    sequences += [[draw.random() for _ in asked.groups] for _ in range(50)]
    for actions in sequences:
        walk = amc.start(asked, cost, amc.Settings())
        for group, action in zip(asked.groups, actions, strict=True):
            walk.decide(group, action)
        assert cost.total(walk.counts) <= asked.allowed
        assert all(1 <= walk.counts[group.name] <= group.width for group in asked.groups)


def test_an_action_that_fits_is_taken_as_it_is():
    asked = residual(1.0)
    cost = macs_model(asked.structure, best_first(asked.structure, torch.zeros(asked.structure.width)))
    walk = amc.start(asked, cost, amc.Settings())
    walk.decide(asked.groups[0], 0.5)
    assert walk.counts[asked.groups[0].name] == asked.groups[0].width // 2 and walk.last == 0.5


def test_the_agent_learns_which_action_is_rewarded():
    settings = amc.Settings(hidden=32, actor_rate=3e-3, critic_rate=1e-2, batch=32)
    state, draw = torch.full((amc.STATE,), 0.5), random.Random(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        agent = amc.Agent(1, settings)
        for _ in range(100):
            action = draw.uniform(0.2, 1.0)
            agent.memory.append(amc.Transition(state, torch.tensor([action]), -abs(action - 0.4), state, False))
        for _ in range(300):
            agent.learn(baseline=0.0)
    assert agent.action(state, noise=0.0) == pytest.approx(0.4, abs=0.08)


def test_noise_is_normal_between_its_ends():
    draw = random.Random(2)
    drawn = torch.tensor([amc.truncated_normal(0.9, 0.5, 0.2, 1.0, draw) for _ in range(3000)])
    assert drawn.min() >= 0.2 and drawn.max() <= 1.0
    kept = torch.normal(0.9, 0.5, (40_000,), generator=torch.Generator().manual_seed(0))
    kept = kept[(kept >= 0.2) & (kept <= 1.0)]
    assert float(drawn.mean()) == pytest.approx(float(kept.mean()), abs=0.02)
    assert amc.truncated_normal(0.7, 0.0, 0.2, 1.0, draw) == 0.7


def test_the_search_returns_the_best_walk_filled_up():
    asked = residual(0.5)
    cost = macs_model(asked.structure, best_first(asked.structure, torch.zeros(asked.structure.width)))
    rewards = {}

    def reward(counts):
        value = counts[asked.groups[0].name] / asked.groups[0].width
        rewards[tuple(counts.values())] = value
        return value

    found = amc.searched(asked, reward, amc.Settings(walks=12, random_walks=6, hidden=8))
    best = max(rewards, key=rewards.get)
    assert all(count >= least for count, least in zip(found.values(), best, strict=True))
    assert 0.96 * asked.allowed <= cost.total(found) <= asked.allowed
