"""Calls of recurrent layers: their cells, and what these do step by step.

LSTM   i, f, g, o = W_ih x + b_ih + W_hh h + b_hh    c' = σ(f) c + σ(i) tanh(g)    h' = σ(o) tanh(c')
GRU    r, z, n    = W_ih x + b_ih, W_hh h + b_hh     n' = tanh(n_x + σ(r) n_h)     h' = n' + σ(z) (h - n')
plain                                                h' = tanh or relu(W_ih x + b_ih + W_hh h + b_hh)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recoup.operators.differential import Differential, RecordedCall, in_forward_mode
from recoup.operators.names import operation_name

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True, slots=True)
class Cell:
    """The tensors of one layer in one direction: nodes, labels' names or values; None for a bias it has not."""

    weight_ih: Any
    weight_hh: Any
    bias_ih: Any = None
    bias_hh: Any = None

    @property
    def layers(self) -> list[tuple[Any, Any]]:
        """Its weights, each with its bias."""
        return [(self.weight_ih, self.bias_ih), (self.weight_hh, self.bias_hh)]

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Those that there are, in the order in which torch takes them."""
        return tuple(each for each in (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh) if each is not None)


@dataclass(frozen=True, slots=True)
class Sequences:
    """A call on sequences: what it reads, the state or states it begins with, and its cells, direction by direction."""

    values: Any
    states: tuple[Any, ...]
    cells: tuple[Cell, ...]
    directions: int
    batch_first: bool

    @classmethod
    def of(cls, args: Sequence[Any]) -> Sequences | None:
        """The arguments in order; None for packed sequences, and for cells that project their hidden units."""
        if not isinstance(args[3], bool):
            return None
        values, states, tensors, has_biases, layers, _, _, both_ways, batch_first = args
        directions, each = 1 + both_ways, 4 if has_biases else 2
        if len(tensors) != layers * directions * each:
            return None
        cells = tuple(Cell(*tensors[place : place + each]) for place in range(0, len(tensors), each))
        return cls(values, listed(states), cells, directions, batch_first)

    def in_order(self, values: Tensor) -> Tensor:
        """Values as the call has them, samples first; and the other way round."""
        return values if self.batch_first else values.transpose(0, 1)

    @property
    def layers(self) -> list[tuple[Cell, ...]]:
        """The cells of each layer, forwards and then, if there is one, backwards."""
        return [self.cells[place : place + self.directions] for place in range(0, len(self.cells), self.directions)]


def listed(states: Any) -> tuple[Any, ...]:
    """One state, or several."""
    return tuple(states) if isinstance(states, (list, tuple)) else (states,)


def require_fitting(args: Sequence[Any]) -> None:
    """Refuse states and values of different sizes: the fused form of torch on a CPU reads beyond the smaller one.

    Raises:
        RuntimeError: they differ.
    """
    call = Sequences.of(args)
    if call is None:
        return
    hidden, batch = call.cells[0].weight_hh.shape[1], call.in_order(call.values).shape[0]
    expected = (len(call.cells), batch, hidden)
    found = [tuple(state.shape) for state in call.states]
    if any(shape != expected for shape in found):
        raise RuntimeError(
            f"states of shapes {found} do not fit sequences of {batch} samples: {expected} were expected"
        )


def unrolled(call: RecordedCall) -> Differential | None:
    """Forward mode through one step after the other: fused forms of these calls have none."""
    if call.names or Sequences.of(call.operands) is None:
        return None
    return in_forward_mode(replace(call, target=partial(step_by_step, operation_name(call.target))))


def step_by_step(name: str, *args: Any) -> list[Tensor]:
    """What a call on sequences returns."""
    call = Sequences.of(args)
    assert call is not None
    values, ends = call.in_order(call.values), list[list[Tensor]]()
    for layer, cells in enumerate(call.layers):
        made = []
        for direction, cell in enumerate(cells):
            states, hidden = [state[layer * call.directions + direction] for state in call.states], list[Tensor]()
            for step in (values.flip(1) if direction else values).unbind(1):
                states = _stepped(name, cell, step, states)
                hidden.append(states[0])
            ends.append(states)
            made.append(torch.stack(hidden[::-1] if direction else hidden, dim=1))
        values = torch.cat(made, dim=2)
    return [call.in_order(values), *(torch.stack(states) for states in zip(*ends, strict=True))]


def _stepped(name: str, cell: Cell, value: Tensor, states: list[Tensor]) -> list[Tensor]:
    """The states after a step."""
    given, kept = F.linear(value, cell.weight_ih, cell.bias_ih), F.linear(states[0], cell.weight_hh, cell.bias_hh)
    if name == "lstm":
        enter, stay, new, leave = (given + kept).chunk(4, dim=1)
        inner = stay.sigmoid() * states[1] + enter.sigmoid() * new.tanh()
        return [leave.sigmoid() * inner.tanh(), inner]
    if name == "gru":
        (reset, stay, new), (more_reset, more_stay, old) = given.chunk(3, dim=1), kept.chunk(3, dim=1)
        fresh = (new + (reset + more_reset).sigmoid() * old).tanh()
        return [fresh + (stay + more_stay).sigmoid() * (states[0] - fresh)]
    total = given + kept
    return [total.relu() if name == "rnn_relu" else total.tanh()]
