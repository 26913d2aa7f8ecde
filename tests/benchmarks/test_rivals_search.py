"""DCP, MetaPruning and AMC: informative channels, widths as asked, and a budget that no candidate exceeds."""

import copy
import dataclasses
import random

import pytest
import torch
from benchmarks.rivals import amc, dcp, metapruning, sfp
from benchmarks.rivals.channels import best_first, subject_of
from torch import nn

from recoup.channels.cost_model import macs_model
from recoup.errors import BudgetError, UsageError
from tests import zoo
from tests.benchmarks.rival_networks import (
    ALIVE,
    BRIEF,
    NONE,
    alive,
    half_dead,
    labelled,
    pictures,
    share_of_the_living,
    subject,
)


def choice_of(living, images, labels, settings):
    losses = dcp.trained_losses(living, images, labels, settings)
    return dcp.Choice(living, copy.deepcopy(living.model), losses, images, labels, settings)


@pytest.mark.parametrize("discrimination", [0.0, 1.0])
def test_dcp_chooses_the_informative_channels(discrimination):
    living, images, labels = subject()
    settings = dcp.Settings(losses=1, discrimination=discrimination, images=64, training=BRIEF)
    choice = choice_of(living, images, labels, settings)
    assert torch.equal(dcp.chosen(choice), alive(living.structure))


def gradient_of(living, images, labels, weight, discrimination):
    """The gradient of reconstruction and cross-entropy by the head's weight, by hand."""
    head = living.model[4]
    features = living.model[:4](images).detach()
    leaf = weight.clone().requires_grad_()
    scores = features @ leaf.T + head.bias.detach()
    aims = features @ head.weight.detach().T + head.bias.detach()
    loss = discrimination * nn.functional.cross_entropy(scores, labels) + (scores - aims).square().mean()
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("discrimination", [0.0, 100.0])
def test_dcp_begins_with_the_channel_of_the_largest_gradient_and_moves_what_it_chose(discrimination):
    living, images, _ = subject()
    labels = torch.arange(len(images)) % 4  # on labels of its own the two losses point to the same channel
    settings = dcp.Settings(losses=0, discrimination=discrimination, images=len(images), rate=0.01, training=NONE)
    choice = choice_of(living, images, labels, settings)
    group, old = living.groups[-1], living.model[4].weight.detach().clone()
    empty = gradient_of(living, images, labels, torch.zeros_like(old), discrimination)
    first = int(empty.norm(dim=0).argmax())
    one = torch.zeros_like(old)
    one[:, first] = old[:, first]
    gradient = gradient_of(living, images, labels, one, discrimination)
    second = int(gradient.norm(dim=0).scatter(0, torch.tensor([first]), -1.0).argmax())
    keep = dcp.chosen_of(choice, group, 2, None, torch.Generator().manual_seed(0))
    assert sorted(keep.nonzero().flatten().tolist()) == sorted([first, second])
    expected = torch.zeros_like(old)
    expected[:, first] = old[:, first] - 0.01 * gradient[:, first]
    expected[:, second] = old[:, second]  # what is new has its old weights
    torch.testing.assert_close(living.model[4].weight.detach(), expected, rtol=1e-4, atol=1e-6)


def test_the_additional_losses_learn_and_are_part_of_a_choice():
    living, images, labels = subject()
    with torch.no_grad():
        fresh, learnt = (
            float(dcp_loss(*subject(), dataclasses.replace(BRIEF, epochs=epochs, rate=0.1))) for epochs in (1, 10)
        )
    assert learnt < 0.8 * fresh
    settings = dcp.Settings(losses=1, images=len(images), training=BRIEF)
    (name,) = (losses := dcp.trained_losses(living, images, labels, settings))
    choice = dcp.Choice(living, copy.deepcopy(living.model), losses, images, labels, settings)
    readers = living.readers_of(living.groups[0])
    weights = {reader.weight: living.model.get_parameter(reader.weight).detach() for reader in readers}
    found = dcp._gradients(choice, readers, weights, name, torch.arange(len(images)))
    assert all(value.any() for value in found.values())  # the reconstruction is perfect: all comes from the loss


def dcp_loss(living, images, labels, schedule):
    """What an additional loss comes to on the images after a training."""
    losses = dcp.trained_losses(living, images, labels, dcp.Settings(losses=1, training=schedule))
    with dcp.recorded(living.model, list(losses)) as seen:
        living.model(images)
    return sum(head(seen[name], labels) for name, head in losses.items())


@pytest.mark.parametrize("name", ["sfp", "dcp"])
def test_the_whole_recipe_cuts_the_dead_and_nothing_else(name, monkeypatch):
    model, images = half_dead(), pictures()
    recipe, masks = {"sfp": sfp, "dcp": dcp}[name], []
    cut = recipe.cut
    monkeypatch.setattr(recipe, "cut", lambda living, keep: masks.append(keep) or cut(living, keep))
    settings = recipe.Settings(share=share_of_the_living(model, images), training=BRIEF, tuning=NONE)
    smaller, _ = recipe.prune(model, images, labelled(model, images), settings)
    assert torch.equal(masks[0], alive(subject()[0].structure))
    if name == "sfp":  # its batch norms know the network that is left
        made = smaller[0][0](images).detach().transpose(0, 1).flatten(1)
        torch.testing.assert_close(smaller[0][1].running_mean, made.mean(1), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(smaller[0][1].running_var, made.var(1), rtol=1e-2, atol=1e-4)


def test_dcp_leaves_nothing_of_what_was_not_chosen_and_removes_its_hooks():
    living, images, labels = subject()
    settings = dcp.Settings(losses=1, images=64, training=BRIEF)
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
    with zoo.seeded(0):
        maker = metapruning.WeightMaker(living, hidden=16)  # of fewer units all may sleep
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


def test_no_widths_are_asked_twice_and_no_generation_is_smaller():
    asked, seen = residual(0.5), []
    settings = metapruning.Settings(generations=4, population=10, parents=2)
    metapruning.evolved(asked, lambda counts: seen.append(tuple(counts.values())) or seen[-1][0], settings)
    assert len(seen) == len(set(seen)) == 40


def test_half_of_a_generation_are_mutants_and_half_crossings_of_two_parents(monkeypatch):
    asked, pairs = residual(0.5), []
    parents = [metapruning.random_gene(asked, random.Random(seed)) for seed in range(3)]
    mutants, crossings = [], []
    mutant, crossing = metapruning.mutant, metapruning.crossing

    def cross(one, other, draw):
        pairs.append((one, other))
        crossings.append(crossing(one, other, draw))
        return crossings[-1]

    monkeypatch.setattr(metapruning, "mutant", lambda *given: mutants.append(mutant(*given)) or mutants[-1])
    monkeypatch.setattr(metapruning, "crossing", cross)
    settings = metapruning.Settings(population=8, mutation=0.9)
    made = metapruning.bred(asked, parents, (), settings, random.Random(0))
    widths = [tuple(metapruning.counts_by_weight(asked, gene).values()) for gene in (*mutants, *crossings)]
    assert set(made) == set(widths) and len(made) == 8
    assert len(set(widths[: len(mutants)])) == 4
    assert all(one is not other for one, other in pairs)


def test_mutants_and_crossings_are_made_of_their_parents():
    draw, one, other = random.Random(0), dict.fromkeys("abcdef", 2.0), dict.fromkeys("abcdef", 3.0)
    assert metapruning.mutant(one, draw, 0.0) == one
    assert set(metapruning.mutant(one, draw, 1.0).values()) <= set(metapruning.WIDTHS)
    assert set(metapruning.crossing(one, other, draw).values()) == {2.0, 3.0}


@pytest.mark.parametrize("from_scratch", [True, False])
def test_metapruning_judges_widths_by_accuracy_and_cuts_the_smallest_norms(from_scratch, monkeypatch):
    model, images = half_dead(), pictures()
    fitnesses, masks = [], []
    widest = {"0.0": 8, "1.0": 8}

    class Maker:
        """The network's own weights for the widest, a head of nothing for all others."""

        def __call__(self, counts):
            return {} if counts == widest else {"4.weight": torch.zeros_like(model[4].weight)}

    def evolved(living, fitness, settings):
        fitnesses.extend([fitness(widest), fitness({"0.0": 4, "1.0": 4})])
        return {"0.0": 4, "1.0": 4}

    monkeypatch.setattr(metapruning, "trained_maker", lambda *given: Maker())
    monkeypatch.setattr(metapruning, "evolved", evolved)
    cut = metapruning.cut
    monkeypatch.setattr(metapruning, "cut", lambda living, keep: masks.append(keep) or cut(living, keep))
    settings = metapruning.Settings(judges=0.5, from_scratch=from_scratch, tuning=NONE)
    smaller, _ = metapruning.prune(model, images, labelled(model, images), settings)
    assert fitnesses[0] > fitnesses[1] + 0.05
    assert torch.equal(masks[-1], alive(subject()[0].structure))
    assert torch.equal(smaller[0][0].weight, model[0][0].weight[ALIVE]) != from_scratch


@pytest.mark.parametrize("name", ["generations", "population", "parents"])
def test_an_evolution_of_nothing_is_refused(name):
    with pytest.raises(UsageError, match=rf"{name} must be a whole number of at least [12], got 0"):
        metapruning.Settings(**{name: 0})
    with pytest.raises(UsageError, match=r"generators\.epochs must be"):
        metapruning.Settings(generators=NONE)


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


def test_a_budget_that_one_channel_of_each_group_exceeds_is_refused():
    asked = residual(0.001)
    cost = macs_model(asked.structure, best_first(asked.structure, torch.zeros(asked.structure.width)))
    with pytest.raises(BudgetError, match=r"one channel of every group costs more than share=0\.001"):
        amc.start(asked, cost, amc.Settings(share=0.001))


def test_a_state_tells_what_is_gone_and_what_the_groups_to_come_take_part_in():
    living, _, _ = subject()
    cost = macs_model(living.structure, best_first(living.structure, torch.zeros(living.structure.width)))
    walk = amc.start(dataclasses.replace(living, allowed=1e9), cost, amc.Settings())
    first, second, head = 36 * 9 * 3 * 8, 36 * 9 * 8 * 8, 8 * 4  # MACs of the three layers
    total = first + second + head
    expected = torch.tensor([0, 1, (first + second) / total, 0, (second + head) / total, 1])
    torch.testing.assert_close(walk.state(0), expected)
    walk.decide(living.groups[0], 0.5)
    expected = torch.tensor([0.5, 1, (second + head) / total, (first + second) / 2 / total, 0, 0.5])
    torch.testing.assert_close(walk.state(1), expected)


def test_the_agent_looks_ahead_to_the_state_that_follows():
    settings = amc.Settings(hidden=16, critic_rate=1e-2, batch=8, tau=0.0, discount=0.5)
    state, action = torch.full((amc.STATE,), 0.5), torch.tensor([0.7])
    for goes_on, aim in ((True, 1.0 - 0.25 + 0.5 * 5.0), (False, 1.0 - 0.25)):
        with zoo.seeded(0):
            agent = amc.Agent(1, settings)
        torch.nn.init.zeros_(agent._slow[1][-1].weight)
        torch.nn.init.constant_(agent._slow[1][-1].bias, 5.0)
        agent.memory.append(amc.Transition(state, action, 1.0, state, goes_on))
        for _ in range(200):
            agent.learn(baseline=0.25)
        assert agent.critic(torch.cat([state, action])).item() == pytest.approx(aim, abs=0.05)


def test_the_first_walks_are_uniform_and_the_agent_learns_from_the_others(monkeypatch):
    asked, learnt, acted = residual(0.5), [], []
    monkeypatch.setattr(amc.Agent, "learn", lambda agent, baseline: learnt.append(baseline))
    monkeypatch.setattr(amc.Agent, "action", lambda agent, state, noise: acted.append(noise) or 0.5)
    amc.searched(asked, lambda counts: 0.5, amc.Settings(walks=5, random_walks=3, hidden=8))
    groups = len(asked.groups)
    assert len(learnt) == 2 * groups and acted == [0.5] * groups + [0.5 * 0.95] * groups
    agent = amc.Agent(1, amc.Settings(hidden=8))
    drawn = torch.tensor([agent.random_action() for _ in range(2000)])
    assert drawn.min() >= 0.2 and drawn.max() <= 1 and float(drawn.mean()) == pytest.approx(0.6, abs=0.02)
    assert float(drawn.std()) == pytest.approx(0.8 / 12**0.5, abs=0.01)


def test_amc_rewards_accuracy_and_cuts_the_dead_first(monkeypatch):
    model, images = half_dead(), pictures()
    rewards, masks = [], []

    def searched(living, reward, settings):
        rewards.extend(reward(dict.fromkeys(("0.0", "1.0"), count)) for count in (8, 4, 1))
        return {"0.0": 4, "1.0": 4}

    cut = amc.cut
    monkeypatch.setattr(amc, "searched", searched)
    monkeypatch.setattr(amc, "cut", lambda living, keep: masks.append(keep) or cut(living, keep))
    amc.prune(model, images, labelled(model, images), amc.Settings(judges=0.5, tuning=NONE))
    assert rewards[0] == rewards[1] > rewards[2] + 0.1
    assert torch.equal(masks[0], alive(subject()[0].structure))


def test_walks_that_end_before_the_agent_learns_are_refused():
    with pytest.raises(UsageError, match=r"walks=100 end before the agent learns"):
        amc.Settings(walks=100)


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
