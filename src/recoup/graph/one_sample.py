"""The graph of one sample, taken from a capture of several.

Code takes ways of its own for a single sample: it drops a dim of one, makes no mask, trusts what it has cached. So the
model is captured for two samples, and a symbolic capture tells which numbers of the graph follow their number. With
these put to what they are for one sample, labels and costs are those of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from recoup.errors import CaptureError
from recoup.graph.capture import Captured, TooManyConditionsError, capture, input_nodes
from recoup.graph.copies import copied
from recoup.graph.runner import run
from recoup.graph.sizes import Sizes, put_for_many, put_for_one, sizes_of
from recoup.graph.symbolic import ONE_BATCH_ONLY
from recoup.inputs.samples import SampledCall

# How many samples to capture for, and how many the symbolic capture has. The second pair is for a model that has cached
# something for the sizes of the first.
COUNTS = ((2, 3), (3, 5))


@dataclass(frozen=True, slots=True, eq=False)
class BatchCapture:
    """A model `captured` for `count` samples, the same graph for `one`, and how it follows their number.

    Where it could not be followed, `count` is 1 and `sizes` is None.
    """

    samples: SampledCall
    count: int
    captured: Captured
    one: Captured
    sizes: Sizes | None

    def at_count(self, graph: fx.Graph) -> None:
        """Make a graph for one sample, cut or not, one for `count` samples, in place."""
        if self.sizes is not None:
            put_for_many(graph, self.sizes, self.count)

    def followed(self, model: nn.Module, *, any_size: bool) -> Sizes:
        """How the graph follows the number of samples, or all sizes of its inputs.

        Raises:
            CaptureError: the graph serves one batch size only, or following all sizes takes too much.
        """
        if self.sizes is not None and not any_size:
            return self.sizes
        many = COUNTS[0][1] if self.count == 1 else dict(COUNTS)[self.count]
        try:
            return sizes_of(model, self.samples, self.captured, many, any_size=any_size)
        except TooManyConditionsError as error:
            raise CaptureError(f"its code asks for too many relations between sizes, {ONE_BATCH_ONLY}") from error


def capture_for_one(model: nn.Module, samples: SampledCall) -> BatchCapture:
    """The graph of `model` for one sample, as it is for several where these can be followed.

    Raises:
        CaptureError: `torch.export` cannot capture the model.
    """
    followed = (_followed_from(model, samples, *counts) for counts in COUNTS)
    return next((batch for batch in followed if batch is not None), None) or captured_for_one(model, samples)


def _followed_from(model: nn.Module, samples: SampledCall, count: int, many: int) -> BatchCapture | None:
    """The graph captured for `count` samples and followed by that of `many`, or None."""
    try:
        captured = capture(model, samples.times(count))
        sizes = sizes_of(model, samples, captured, many, any_size=False)
        return BatchCapture(samples, count, captured, _at_one(captured, sizes, samples), sizes)
    except (CaptureError, TooManyConditionsError):  # perhaps from other numbers of samples
        return None


def captured_for_one(model: nn.Module, samples: SampledCall) -> BatchCapture:
    """The graph of `model` as it is captured for a single sample.

    Raises:
        CaptureError: `torch.export` cannot capture the model.
    """
    captured = capture(model, samples.one)
    return BatchCapture(samples, 1, captured, captured, None)


def _at_one(captured: Captured, sizes: Sizes, samples: SampledCall) -> Captured:
    """The captured graph with numbers and recorded values of one sample."""
    graph, _ = copied(captured.graph)
    put_for_one(graph, sizes.numbers)
    leaves = captured.signature.inputs.flatten_up_to((tuple(samples.one.args), dict(samples.one.kwargs)))
    given = {node.name: leaf for node, leaf in zip(input_nodes(captured), leaves, strict=True)}
    try:
        values = _recorded(graph, captured.values, given)
    except Exception as error:  # torch's own, of operations on tensors without values
        raise CaptureError(f"the graph of several samples is none of one sample ({error})") from error
    for node in graph.nodes:
        if node.name in values:  # stored tensors too: what is not of one fake mode does not compute together
            node.meta["val"] = values[node.name]
    return replace(captured, graph=graph)


def _recorded(graph: fx.Graph, stored: Mapping[str, Tensor], given: Mapping[str, Any]) -> dict[str, Any]:
    """What the graph computes, as tensors without values."""
    plain = {name: value.detach() for name, value in {**stored, **given}.items() if isinstance(value, Tensor)}
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, torch.no_grad():
        known = {name: mode.from_tensor(value, static_shapes=True) for name, value in plain.items()}
        return run(graph.nodes, {**given, **known}, _nowhere)


def _nowhere(name: str) -> Tensor:
    raise CaptureError(f"{name} is a region of its own")
