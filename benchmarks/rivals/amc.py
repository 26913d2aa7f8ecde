"""AMC: widths by reinforcement learning (He et al. 2018, arXiv 1802.03494).

An agent (DDPG) walks through the groups and says of each which share to keep. Where it asks for so much that the rest
could not meet the budget any more, its action is cut down; so every walk ends within the budget. The reward of
all steps of a walk is the accuracy of the network that results, less a moving average of earlier ones:

    critic: (Q(s, a) - (r - b + gamma Q'(s', mu'(s'))))^2,   actor: -Q(s, mu(s)).

Actions are drawn from a normal distribution about the actor's, cut off at the ends. Channels are those with the largest
L1 norms of the weights that read them. At last the network of the best walk is fine-tuned. A state is the place of the
group, its width and cost, what is gone, what the groups to come take part in, and the last action.

From the authors' code: at least 20 % of a group, hidden layers of 300, rates 1e-4 (actor) and 1e-3 (critic), gamma = 1,
batches of 64, a memory of 100 walks, tau = 0.01, noise 0.5 falling by 0.95 a walk, 100 walks of uniform actions. The
paper has 300 walks more. Ours: states have no kernel, stride and side, and costs and widths are shares, not scaled
between the least and the largest; no least-squares reconstruction of the layers before the accuracy is taken; instead
batch norms use the statistics of the batch. Rates and epochs of the fine-tuning are ours.
"""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import timed
from benchmarks.rivals.channels import (
    Counts,
    Pruned,
    Subject,
    best_first,
    column_sums,
    cut,
    filled,
    gated,
    keep_first,
    least_counts,
    subject_of,
)
from benchmarks.rivals.training import Schedule, batch_statistics, finetuned, held_out, right, seeded
from recoup.channels.cost_model import CostModel, macs_model
from recoup.channels.structure import Group
from recoup.config import require_whole
from recoup.errors import BudgetError, UsageError

# Of the moving average that rewards are compared with: what the newest counts for.
NEWEST = 0.05
# Numbers that describe a state.
STATE = 6
# The published schedules, or ours where the docstring says so.
TUNING = Schedule(epochs=100, rate=0.01)


@dataclass(frozen=True, slots=True)
class Settings:
    """The share of the MACs to keep, the agent, its walks, and the training after the cut."""

    share: float = 0.5
    least: float = 0.2
    walks: int = 400
    random_walks: int = 100
    hidden: int = 300
    actor_rate: float = 1e-4
    critic_rate: float = 1e-3
    batch: int = 64
    memory: int = 100
    tau: float = 0.01
    discount: float = 1.0
    noise: float = 0.5
    decay: float = 0.95
    judges: float = 0.125
    tuning: Schedule = TUNING

    def __post_init__(self) -> None:
        require_whole("random_walks", self.random_walks, least=0)
        if self.walks <= self.random_walks:
            raise UsageError(
                f"walks={self.walks} end before the agent learns: random_walks={self.random_walks} come first. "
                "Give more walks, or fewer at random."
            )


@dataclass(frozen=True, slots=True, eq=False)
class Transition:
    """A step of a walk: state, action, reward, the next state, and whether the walk goes on."""

    state: Tensor
    action: Tensor
    reward: float
    following: Tensor
    goes_on: bool


@dataclass(slots=True)
class Walk:
    """Widths that are decided group by group, never beyond what the budget allows."""

    subject: Subject
    cost: CostModel
    least: dict[str, int]
    counts: dict[str, int]
    last: float = 1.0

    def state(self, number: int) -> Tensor:
        """What the agent sees before group `number`: place, width, cost, what is gone and to come, the last action."""
        groups, whole = self.subject.groups, {group.name: group.width for group in self.subject.groups}
        total, group = self.cost.total(whole), groups[number]
        own = float(self.cost.along(group.name, whole)[-1]) / total
        decided = {**whole, **{g.name: self.counts[g.name] for g in groups[:number]}}
        left = self.cost.total(decided)
        ahead = left - self.cost.total({**decided, **{g.name: 0 for g in groups[number + 1 :]}})
        width = group.width / max(g.width for g in groups)
        return torch.tensor([number / len(groups), width, own, 1 - left / total, ahead / total, self.last])

    def decide(self, group: Group, action: float) -> None:
        """Keep that share of a group, or as much as leaves room for the least of all groups to come."""
        wanted = max(self.least[group.name], min(group.width, round(action * group.width)))
        others = self.cost.total(self.counts)
        along = self.cost.along(group.name, self.counts)
        fits = (others - along[self.counts[group.name]] + along) <= self.subject.allowed
        most = int(fits.nonzero().max()) if bool(fits.any()) else 0
        self.counts[group.name] = max(self.least[group.name], min(wanted, most))
        self.last = self.counts[group.name] / group.width


class Agent:
    """An actor, a critic, slow copies of both, and a memory of transitions."""

    def __init__(self, groups: int, settings: Settings) -> None:
        self._settings, self._draw = settings, random.Random(settings.tuning.seed)
        self.actor = nn.Sequential(*_layers(STATE, settings.hidden), nn.Sigmoid())
        self.critic = nn.Sequential(*_layers(STATE + 1, settings.hidden))
        self._slow = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self._optimisers = (
            torch.optim.Adam(self.actor.parameters(), settings.actor_rate),
            torch.optim.Adam(self.critic.parameters(), settings.critic_rate),
        )
        self.memory: deque[Transition] = deque(maxlen=settings.memory * groups)

    def action(self, state: Tensor, noise: float) -> float:
        """The share to keep of the next group, between the least one and 1."""
        with torch.no_grad():
            mean = float(self.actor(state))
        low = self._settings.least
        return truncated_normal(low + (1 - low) * mean, noise, low, 1.0, self._draw)

    def random_action(self) -> float:
        """A share to keep that depends on nothing, each between the least one and 1 as likely as any other."""
        return self._draw.uniform(self._settings.least, 1.0)

    def learn(self, baseline: float) -> None:
        """One step of critic and actor on a batch from the memory."""
        batch = self._draw.sample(list(self.memory), min(self._settings.batch, len(self.memory)))
        states, following = (torch.stack([getattr(t, name) for t in batch]) for name in ("state", "following"))
        actions = torch.stack([t.action for t in batch])
        rewards = torch.tensor([[t.reward - baseline] for t in batch])
        goes_on = torch.tensor([[float(t.goes_on)] for t in batch])
        slow_actor, slow_critic = self._slow
        with torch.no_grad():
            ahead = slow_critic(torch.cat([following, self._scaled(slow_actor(following))], dim=1))
            aim = rewards + self._settings.discount * goes_on * ahead
        _descend(self._optimisers[1], F.mse_loss(self.critic(torch.cat([states, actions], dim=1)), aim))
        ours = self.critic(torch.cat([states, self._scaled(self.actor(states))], dim=1))
        _descend(self._optimisers[0], -ours.mean())
        with torch.no_grad():
            for slow, quick in zip(self._slow, (self.actor, self.critic), strict=True):
                for old, new in zip(slow.parameters(), quick.parameters(), strict=True):
                    old.lerp_(new, self._settings.tau)

    def _scaled(self, part: Tensor) -> Tensor:
        return self._settings.least + (1 - self._settings.least) * part


def prune(model: nn.Module, images: Tensor, labels: Tensor, settings: Settings) -> Pruned:
    """The smaller network, and the seconds of search, cut and tuning."""
    seconds: dict[str, float] = {}
    subject = timed(seconds, "trace", lambda: subject_of(model, images, settings.share))
    names = (reader.weight for reader in subject.readers)
    sums = column_sums(subject, {name: subject.model.get_parameter(name).detach().abs() for name in names})
    orders = best_first(subject.structure, sums)
    _, judges = held_out(images, labels, settings.judges, settings.tuning.seed)

    def reward(counts: Counts) -> float:
        gate = keep_first(subject.structure, orders, counts).to(images.device, torch.float32)
        with torch.no_grad(), batch_statistics(subject.model):
            return right(gated(subject, gate, judges[0]), judges[1])

    counts = timed(seconds, "search", lambda: searched(subject, reward, settings))
    smaller = timed(seconds, "cut", lambda: cut(subject, keep_first(subject.structure, orders, counts)))
    return timed(seconds, "tuning", lambda: finetuned(smaller, images, labels, settings.tuning)), seconds


def searched(subject: Subject, reward: Callable[[Counts], float], settings: Settings) -> dict[str, int]:
    """The widths of the best walk, filled up to the budget."""
    cost = macs_model(subject.structure, best_first(subject.structure, torch.zeros(subject.structure.width)))
    best, best_reward, baseline = start(subject, cost, settings).counts, -math.inf, 0.0
    with seeded(settings.tuning.seed), torch.enable_grad():
        agent = Agent(len(subject.groups), settings)
        for number in range(settings.walks):
            noise = settings.noise * settings.decay ** max(0, number - settings.random_walks)
            act = partial(agent.action, noise=noise) if number >= settings.random_walks else None
            walk, steps = walked(start(subject, cost, settings), act or (lambda _: agent.random_action()))
            found = reward(walk.counts)
            baseline = found if number == 0 else (1 - NEWEST) * baseline + NEWEST * found
            if found > best_reward:
                best, best_reward = dict(walk.counts), found
            for place, (state, action) in enumerate(steps):
                last = place + 1 == len(steps)
                following = state if last else steps[place + 1][0]
                agent.memory.append(Transition(state, action, found, following, not last))
                if number >= settings.random_walks:
                    agent.learn(baseline)
    return filled(subject, cost, best, sorted(best, key=lambda name: best[name]))


def walked(walk: Walk, act: Callable[[Tensor], float]) -> tuple[Walk, list[tuple[Tensor, Tensor]]]:
    """A walk through all groups, and the states and actions along it; actions are those that were allowed."""
    steps = []
    for number, group in enumerate(walk.subject.groups):
        state = walk.state(number)
        walk.decide(group, act(state))
        steps.append((state, torch.tensor([walk.last])))
    return walk, steps


def start(subject: Subject, cost: CostModel, settings: Settings) -> Walk:
    """A walk that has decided nothing: all groups at the least share, or at less where that is too much.

    Raises:
        BudgetError: not even the fewest channels of all groups fit.
    """
    floor = least_counts(subject.structure)
    least = {g.name: max(floor[g.name], math.floor(settings.least * g.width)) for g in subject.groups}
    while cost.total(least) > subject.allowed and least != floor:
        least = {name: max(floor[name], count - 1) for name, count in least.items()}
    if cost.total(least) > subject.allowed:
        raise BudgetError(f"one channel of every group costs more than share={settings.share} allows. Keep more.")
    return Walk(subject, cost, least, dict(least))


def truncated_normal(mean: float, deviation: float, low: float, high: float, draw: random.Random) -> float:
    """A number from the normal distribution, given that it lies between `low` and `high`."""
    if deviation < 1e-6:
        return min(high, max(low, mean))
    ends = torch.special.ndtr(torch.tensor([low - mean, high - mean], dtype=torch.float64) / deviation).tolist()
    place = ends[0] + draw.random() * (ends[1] - ends[0])
    drawn = mean + deviation * float(torch.special.ndtri(torch.tensor(place, dtype=torch.float64)))
    return min(high, max(low, drawn))


def _layers(inputs: int, hidden: int) -> list[nn.Module]:
    return [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)]


def _descend(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    optimiser.step()
