"""Recurrent layers and cells: LSTM, GRU and plain ones, several layers deep and both ways.

    g_t = W_ih x_t + b_ih   and   W_hh h_(t-1) + b_hh     (gates · H) rows: H of every gate
    h_t                     what the gates make of them and of the state

A hidden unit is one row of every gate, one column of W_hh, and a place in the states. Both weights are ordinary linear
layers: one reads the sequence, the other the hidden units of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recoup.labels.arrays import along
from recoup.labels.constraints import Constraints, TensorRef
from recoup.operators.call import LabelCall, Value, lock_operands
from recoup.operators.cells import GATES, Cell, Sequences, listed, require_fitting, unrolled
from recoup.operators.products import product_of
from recoup.operators.record import Reading, RecurrentCall, operator


def _layers_of_sequences(args: Sequence[Any]) -> list[tuple[Any, Any]]:
    call = Sequences.of(args)
    return [] if call is None else [layer for cell in call.cells for layer in cell.layers]


def _layers_of_step(args: Sequence[Any]) -> list[tuple[Any, Any]]:
    return Cell(*args[2:]).layers


def _read_sequences(target: Callable[..., Any], args: Sequence[Any], result: Any) -> Iterator[Reading]:
    """What every cell reads of a sequence (samples, steps, ...): layers but the last are run again one by one."""
    call = Sequences.of(args)
    assert call is not None
    values, is_whole = call.in_order(call.values), len(call.cells) == 1
    for layer in range(0, len(call.cells), call.directions):
        made = []
        for place in range(layer, layer + call.directions):
            cell, states = call.cells[place], [state[place : place + 1] for state in call.states]
            read = values.flip(1) if place > layer else values
            hidden = call.in_order(result[0]) if is_whole else _run_alone(target, read, states, cell)
            before = torch.cat([states[0].transpose(0, 1), hidden[:, :-1]], dim=1)
            yield from _readings(cell, read, before)
            made.append(hidden.flip(1) if place > layer else hidden)
        values = torch.cat(made, dim=2)


def _run_alone(target: Callable[..., Any], values: Tensor, states: list[Tensor], cell: Cell) -> Tensor:
    """The hidden units of one cell along a sequence, samples first."""
    begin = states if len(states) > 1 else states[0]
    hidden: Tensor = target(values, begin, cell.tensors, cell.bias_ih is not None, 1, 0.0, False, False, True)[0]
    return hidden


def _read_step(_: Callable[..., Any], args: Sequence[Any], __: Any) -> Iterator[Reading]:
    """What a cell reads in one step."""
    yield from _readings(Cell(*args[2:]), args[0], listed(args[1])[0])


def _readings(cell: Cell, values: Tensor, before: Tensor) -> Iterator[Reading]:
    """What a cell reads of the sequence, and of its hidden units in the step before."""
    for (weight, bias), read in zip(cell.layers, (values, before), strict=True):
        yield Reading(weight, read.detach(), is_part=True, bias=bias)


def _refresh_layers(module: nn.RNNBase, _: Tensor | None) -> None:
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
    first = module._flat_weights_names[:2]
    module.input_size, module.hidden_size = (getattr(module, name).shape[1] for name in first)


def _refresh_cell(module: nn.RNNCellBase, _: Tensor | None) -> None:
    module.input_size, module.hidden_size = module.weight_ih.shape[1], module.weight_hh.shape[1]


@operator(
    *GATES,
    recurrent=RecurrentCall(_layers_of_sequences, _read_sequences),
    weights=(2,),
    differential=unrolled,
    require=require_fitting,
    modules=dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), _refresh_layers),
)
def sequences(call: LabelCall, constraints: Constraints) -> Value:
    """Reads the last dim of a sequence, layer by layer; states of all layers and directions lie in one tensor."""
    given = None if call.kwargs else Sequences.of(call.args)
    if given is None:
        return lock_operands(call, constraints, f"{call.site} reads packed sequences, or projects its hidden units")
    if not _is_stored(given.cells):
        return lock_operands(call, constraints, f"{call.site} has a weight that depends on the input")
    if len({tensor.name for cell in given.cells for tensor in cell.tensors}) < len(call.args[2]):
        return lock_operands(call, constraints, f"{call.site} has one weight for several of its layers")
    values, hidden = constraints.labels_of(given.values), list[Tensor]()
    for place, cell in enumerate(given.cells):
        layer, direction = divmod(place, given.directions)
        if layer and not direction:
            values = along(torch.cat(hidden[-given.directions :]), 2, call.shape[0])
        hidden.append(_hidden(call, cell, values, constraints))
        for state in given.states:
            labels = constraints.labels_of(state)[place]
            _begin(call, labels, hidden[-1], constraints)
    output = along(torch.cat(hidden[-given.directions :]), 2, call.shape[0])
    return [output, *(torch.stack(hidden).unsqueeze(1).expand(shape) for shape in call.shape[1:])]


@operator(
    *(f"{name}_cell" for name in GATES),
    recurrent=RecurrentCall(_layers_of_step, _read_step),
    weights=(2, 3, 4, 5),
    modules=dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), _refresh_cell),
)
def step(call: LabelCall, constraints: Constraints) -> Value:
    """One step of a cell."""
    cell = Cell(*call.args[2:])
    if call.kwargs or not _is_stored([cell]):
        return lock_operands(call, constraints, f"{call.site} has a weight that depends on the input")
    hidden = _hidden(call, cell, constraints.labels_of(call.args[0]), constraints)
    for state in listed(call.args[1]):
        _begin(call, constraints.labels_of(state), hidden, constraints)
    shapes = call.shape if isinstance(call.shape, list) else [call.shape]
    found = [along(hidden, 1, shape) for shape in shapes]
    return found if isinstance(call.shape, list) else found[0]


def _is_stored(cells: Sequence[Cell]) -> bool:
    return all(isinstance(tensor, TensorRef) for cell in cells for tensor in cell.tensors)


def _hidden(call: LabelCall, cell: Cell, values: Tensor, constraints: Constraints) -> Tensor:
    """The labels of a cell's hidden units (H,): the same rows of every gate, and what its own weight reads."""
    gates = GATES[call.name.removesuffix("_cell")]
    inputs = constraints.channels_along(values, values.dim() - 1, f"{call.site} reads it beside inputs of fixed size")
    made = constraints.outputs(cell.weight_ih, 0)
    hidden = constraints.tie(made.view(gates, -1).T, f"{call.site} has gates for every hidden unit")
    for weight, bias, read in ((cell.weight_ih, cell.bias_ih, inputs), (cell.weight_hh, cell.bias_hh, hidden)):
        constraints.site(weight, 1, read)
        constraints.site(weight, 0, made)
        if bias is not None:
            constraints.site(bias, 0, made)
        positions = values.numel() // values.shape[-1]
        constraints.products.append(product_of(call, weight, bias, positions, 1, 0))
    return hidden


def _begin(call: LabelCall, state: Tensor, hidden: Tensor, constraints: Constraints) -> None:
    """A state belongs to the hidden units."""
    labels = along(hidden, state.dim() - 1, state.shape)
    constraints.couple(state, labels, f"{call.site} begins with a state of fixed size")
