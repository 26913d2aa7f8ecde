"""Seconds on the model's own device: of a network's operations one by one, and of whole networks side by side."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch._prims_common import suggest_memory_format

from recoup.channels.cost_model import Timing
from recoup.channels.structure import Structure
from recoup.graph.copies import copied
from recoup.graph.modes import evaluating
from recoup.graph.purity import make_pure
from recoup.graph.runner import grouped, last_uses, run
from recoup.graph.standalone import Standalone, entering
from recoup.inputs.batches import Inputs, device_of, tensors_in
from recoup.labels.constraints import Product
from recoup.operators.names import writes
from recoup.statistics.observe import layer_call

# Seconds that one call of `run` takes on a device.
Timer: TypeAlias = Callable[[Callable[[], object], torch.device], float]

# A reading lasts at least so many seconds, by calling several times where a call is shorter: clocks are no finer, and
# a GPU works on while the next call is prepared.
SHORTEST = 1e-3
MOST_CALLS = 100
# Readings of which the median counts; fewer where they take longer than ENOUGH seconds together.
READINGS = 7
FEWEST_READINGS = 3
ENOUGH = 1.0
# Networks that are compared are timed in turns, so that a machine that gets slower is no advantage to either.
TURNS = 3


def seconds_of(
    run: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one call of `run` when it has run before: the median of several readings of the `clock`."""
    _reading(run, device, clock, 1)
    calls = math.ceil(SHORTEST / max(_reading(run, device, clock, 1), SHORTEST / MOST_CALLS))
    readings: list[float] = []
    while len(readings) < READINGS and (len(readings) < FEWEST_READINGS or sum(readings) < ENOUGH):
        readings.append(_reading(run, device, clock, calls))
    return statistics.median(readings) / calls


def network_seconds(models: Sequence[nn.Module], inputs: Inputs, timer: Timer = seconds_of) -> list[float]:
    """Seconds that each of `models`, all on one device, takes for `inputs`."""
    device = device_of(models[0])
    inputs = inputs.to(device).map(Tensor.clone)  # a model may write into what it is given
    turns = [[_seconds_of_network(model, inputs, device, timer) for model in models] for _ in range(TURNS)]
    return [statistics.median(turn[place] for turn in turns) for place in range(len(models))]


def operation_timings(
    host: Standalone, structure: Structure, inputs: Inputs, timer: Timer = seconds_of
) -> dict[str, Timing]:
    """How long every operation of the network takes for `inputs`, by the name of its node in the graph.

    Layers are timed with half of their inputs and outputs too.
    """
    device, layers = device_of(host), {product.node: product for product in structure.products}
    graph, _ = copied(host.graph)
    make_pure(graph)
    timings = {}

    def timed(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = _TimedCall(node, args, kwargs)
        timing = call.timing(layers.get(node.name), device, timer)
        result = call.run()
        if tensors_in(result):
            timings[node.name] = timing
        return result

    inputs = inputs.to(device).map(Tensor.clone)
    with evaluating(host):
        run(
            graph.nodes,
            entering(host, inputs.args, inputs.kwargs),
            lambda name: attrgetter(name)(host),
            perform=timed,
            release=grouped(last_uses(graph.nodes)),
        )
    return timings


def halved(call: Mapping[str, Any], product: Product) -> dict[str, Tensor] | None:
    """A layer's input, weight and bias with half of the inputs and outputs each; None where that cannot be done.

    `call` has the arguments by name, as `layer_call` gives them.
    """
    inputs, weight, bias = (call.get(name) for name in ("input", "weight", "bias"))
    if product.input_dim is None or not isinstance(inputs, Tensor) or not isinstance(weight, Tensor):
        return None
    dim = inputs.dim() - weight.dim() + 1  # the last one, or the one before the positions
    sizes = {place: max(1, weight.shape[place] // 2) for place in (0, 1)}
    if dim < 0 or inputs.shape[dim] != weight.shape[product.input_dim] or weight.shape[:2].numel() == 1:
        return None
    parts = {
        "input": _part(inputs, dim, sizes[product.input_dim]),
        "weight": _part(_part(weight, 0, sizes[0]), 1, sizes[1]),
    }
    return parts if bias is None else {**parts, "bias": _part(bias, 0, sizes[product.output_dim])}


class _TimedCall:
    """An operation with the values it reads."""

    def __init__(self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._node, self._args, self._kwargs = node, args, kwargs
        self._names = tuple(value.name for value in node.all_input_nodes)

    def run(self, swapped: Mapping[int, Tensor] | None = None) -> Any:
        """What it returns, with some tensors, by `id`, swapped for others."""
        other = swapped or {}
        args = [other.get(id(value), value) for value in self._args]
        return self._node.target(*args, **{name: other.get(id(v), v) for name, v in self._kwargs.items()})  # type: ignore[operator]  # the target of a call_function is one

    def timing(self, product: Product | None, device: torch.device, timer: Timer) -> Timing:
        """How long it takes; `product` says where the inputs and outputs of a layer are."""
        whole = timer(self._run_again, device)
        if product is None:
            return Timing(0.0, whole, self._names)
        call = layer_call(self._node.target, self._args, self._kwargs)
        half = halved(call, product)
        if half is None:
            return Timing(0.0, whole, self._names)
        swapped = {id(call[name]): part for name, part in half.items()}
        seconds = timer(lambda: self.run(swapped), device)
        share = half["weight"].shape[:2].numel() / call["weight"].shape[:2].numel()
        scaled = min(max((whole - seconds) / (1 - share), 0.0), whole)
        return Timing(whole - scaled, scaled, self._names)

    def _run_again(self) -> Any:
        """Run so that it can be repeated: what would be written into is copied each time."""
        if not writes(self._node):
            return self.run()
        return self.run({id(value): value.clone() for value in tensors_in([*self._args, *self._kwargs.values()])})


def _part(tensor: Tensor, dim: int, size: int) -> Tensor:
    return tensor.narrow(dim, 0, size).contiguous(memory_format=suggest_memory_format(tensor))


def _seconds_of_network(model: nn.Module, inputs: Inputs, device: torch.device, timer: Timer) -> float:
    with evaluating(model):
        return timer(lambda: inputs.call(model), device)


def _reading(run: Callable[[], object], device: torch.device, clock: Callable[[], float], calls: int) -> float:
    _wait_for(device)
    start = clock()
    for _ in range(calls):
        run()
    _wait_for(device)
    return clock() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
