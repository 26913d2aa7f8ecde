"""Two calls at once in one process: each gives the plan that it gives alone, and nothing of the process is changed."""

import gc
import logging
import threading
import warnings

import pytest
import torch
from torch import nn

import recoup
from recoup.graph.modes import _precisions

ROUNDS = 2


class Rolled(nn.Module):
    """Its class cannot hold other sizes, so the result is a standalone graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3), nn.Conv2d(width, 4, 3)

    def forward(self, x):
        return self.second(self.first(x).roll(3, 1).relu()).mean((2, 3))


def plain(width: int) -> nn.Module:
    layers = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 6, 3), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


def state():
    precision = [getattr(owner, name) for owner, name, _ in _precisions()]
    modes = torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed()
    return gc.isenabled(), logging.root.manager.disable, list(warnings.filters), precision, modes


def plan_of(model: nn.Module, batches: list[torch.Tensor], method: str):
    result = recoup.prune(model, batches, budget=recoup.Budget(macs=0.6), method=method)
    plan = result.plan
    return {**plan.keep, **plan.weights}, [p.detach().clone() for p in result.model.parameters()]


def same(left, right) -> bool:
    (one, parameters), (other, others) = left, right
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for a, b in zip([*one.values(), *parameters], [*other.values(), *others], strict=True)
    )


@pytest.mark.parametrize("shared", [False, True])
def test_two_at_once_give_what_each_gives_alone(shared):
    torch.manual_seed(0)
    batches = [torch.randn(16, 3, 8, 8) for _ in range(4)]
    models = [plain(8).train(), plain(12).train()] if shared else [plain(8), Rolled(8).eval()]
    tasks = [(models[0], "best"), (models[0 if shared else 1], "fast")]
    alone = [plan_of(model, batches, method) for model, method in tasks]
    before, flags = state(), [[m.training for m in model.modules()] for model in models]
    for _ in range(ROUNDS):
        found: list = [None, None]

        def work(place: int, found: list = found) -> None:
            found[place] = plan_of(tasks[place][0], batches, tasks[place][1])

        threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(same(*pair) for pair in zip(alone, found, strict=True))
        assert state() == before
        assert [[m.training for m in model.modules()] for model in models] == flags
