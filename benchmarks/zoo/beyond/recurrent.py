"""Small networks of our own with a state, or with experts."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from benchmarks.zoo.reading import numbers, tensors
from benchmarks.zoo.spec import Spec

WIDTH, HIDDEN, CLASSES, WORDS, LENGTH = 16, 24, 5, 50, 10
EXPERTS, CHOSEN = 4, 2


class Tagger(nn.Module):
    """An embedding, a recurrent layer, a perceptron for every token."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], layers: int = 1, *, both_ways: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.recurrent = kind(WIDTH, HIDDEN, num_layers=layers, batch_first=True, bidirectional=both_ways)
        self.hidden = nn.Linear(HIDDEN * (2 if both_ways else 1), HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(words))
        result: Tensor = self.head(self.hidden(states).relu())
        return result


class Listener(nn.Module):
    """Convolutions over time, a recurrent layer, a class from its last state."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(4, HIDDEN, 5, stride=2), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Conv1d(HIDDEN, WIDTH, 3), nn.ReLU()
        )
        self.recurrent = kind(WIDTH, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, signal: Tensor) -> Tensor:
        states, _ = self.recurrent(self.convolutions(signal).transpose(1, 2))
        result: Tensor = self.head(states[:, -1])
        return result


class Stepper(nn.Module):
    """A cell, called once for every step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.cell, self.head = nn.Linear(4, WIDTH), nn.GRUCell(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, steps: Tensor) -> Tensor:
        state = steps.new_zeros(len(steps), HIDDEN)
        for step in self.stem(steps).relu().unbind(1):
            state = self.cell(step, state)
        result: Tensor = self.head(state)
        return result


class Experts(nn.Module):
    """Every token is read by the two perceptrons that a router chooses for it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(8, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(EXPERTS)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        scores = self.router(x).softmax(-1)
        chosen = scores >= scores.topk(CHOSEN, dim=-1).values[..., -1:]
        weights = torch.where(chosen, scores, 0.0)
        mixed = sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        result: Tensor = self.head(x + mixed)
        return result


def _tagger(kind: type[nn.LSTM | nn.GRU], layers: int = 1, *, both_ways: bool = False) -> Spec:
    return Spec(functools.partial(Tagger, kind, layers, both_ways=both_ways), numbers(WORDS, LENGTH), 0, ("head",))


RECURRENT = {
    "LSTM tagger": _tagger(nn.LSTM),
    "LSTM tagger, two layers, both ways": _tagger(nn.LSTM, 2, both_ways=True),
    "GRU tagger": _tagger(nn.GRU),
    "LSTM listener": Spec(functools.partial(Listener, nn.LSTM), tensors((4, 40)), 0, ("head",)),
    "GRU listener": Spec(functools.partial(Listener, nn.GRU), tensors((4, 40)), 0, ("head",)),
    "GRU cell": Spec(Stepper, tensors((6, 4)), 0, ("head",)),
    "Mixture of experts": Spec(Experts, tensors((6, 8)), 0, ("head",)),
}
