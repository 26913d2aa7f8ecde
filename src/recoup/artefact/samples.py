"""A few real inputs and what the saved model made of them: the loaded model has to make the same of them.

Another machine may round in another way, so outputs are compared with a tolerance. It is measured when the result is
saved: how far the network's outputs move when its inputs are shaken by their last digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from recoup.artefact.dry_run import MOST_MEMORY, peak_memory
from recoup.artefact.manifest import LOOSEST
from recoup.artefact.schema import MisfitError, integer, listing, text
from recoup.channels.structure import named_tensors
from recoup.errors import ArtefactError
from recoup.graph.copies import working_copy
from recoup.graph.modes import exact_float32
from recoup.inputs.batches import Inputs, tensors_in
from recoup.plan import GraphPlan

# Samples to store, as many of them as fit into so many bytes with their outputs; one sample may take more.
SAMPLES_STORED = 4
STORED_BYTES, ONE_SAMPLE_BYTES = 4 << 20, 32 << 20
# A difference relative to the output that rounding alone makes in a deep network, by precision.
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: LOOSEST}
# What another machine's rounding may do, as a multiple of what shaking the last digit does.
AMPLIFIED = 30.0
# Integers are decided by comparisons, which rounding may turn; so large a share of them may.
FLIPPED = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The tensors of a samples file, how the inputs among them are passed, and how close outputs have to be."""

    tensors: Mapping[str, Tensor]
    call: Any
    tolerance: float

    @property
    def inputs(self) -> Inputs:
        """The call.

        Raises:
            MisfitError: it is none.
        """
        given = {name: value for name, value in self.tensors.items() if name.startswith("input.")}
        args = _passed(self.call, given, "call")
        if not isinstance(args, list) or len(args) != 2 or type(args[0]) is not tuple or type(args[1]) is not dict:
            raise MisfitError("call", "a list of arguments and keywords", self.call)
        return Inputs(args[0], args[1])

    @property
    def outputs(self) -> list[Tensor]:
        """The outputs in order."""
        names = [f"output.{place}" for place in range(len(self.tensors))]
        return [self.tensors[name] for name in names if name in self.tensors]


def first_samples(inputs: Inputs) -> Inputs:
    """Copies of the first few samples, to be kept with a result."""
    return inputs.first(SAMPLES_STORED).to(torch.device("cpu"))


def take_samples(model: nn.Module, given: Inputs | None, plan: GraphPlan | None = None) -> Samples | str:
    """What to store of these inputs for this model, which may run the graph of `plan`, or why nothing can be.

    A model that was changed after pruning may take other inputs; it is saved all the same.
    """
    if given is None:
        return "the result was made without calibration samples"
    count, why_not = min(given.size, SAMPLES_STORED), "there is no sample"
    while count:
        found = _taken(model, given.first(count))
        if isinstance(found, str):
            return found
        size = sum(tensor.numel() * tensor.element_size() for tensor in found.tensors.values())
        why_not = "" if size <= (STORED_BYTES if count > 1 else ONE_SAMPLE_BYTES) else "one sample takes too much room"
        if not why_not and plan is not None:
            why_not = why_too_large(plan, named_tensors(model), found)
        if not why_not:
            return found
        count //= 2
    return why_not


def why_too_large(plan: GraphPlan, tensors: Mapping[str, Tensor], samples: Samples) -> str:
    """Why a graph should not be run on these samples: on sizes alone it fails, or takes too much; empty if it may."""
    try:
        place = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        inputs = samples.inputs.to(place)
        leaves, spec = tree_flatten((inputs.args, dict(inputs.kwargs)))
        if spec != plan.inputs:
            return "the samples are passed in another form than the graph takes"
        places = [node.name for node in plan.graph.nodes if node.op == "placeholder"]
        held = {**tensors, **{name: value.to(place) for name, value in plan.constants.items()}}
        peak = peak_memory(plan.graph, held, dict(zip(places, leaves, strict=True)))
    except Exception as error:  # operations on wrong sizes raise anything
        return f"the graph does not run on them ({_brief(error)})"
    return f"they would take {peak >> 20} MB of memory" if peak > MOST_MEMORY else ""


def check_samples(model: nn.Module, samples: Samples, folder: Any) -> None:
    """That the model makes of the stored inputs what the saved one made of them.

    Raises:
        ArtefactError: it makes something else of them, or fails.
    """
    try:
        found = _run(model, samples.inputs)
        problem = _difference(samples.outputs, found, samples.tolerance)
    except MisfitError as error:
        raise ArtefactError(f"the stored call in {folder} makes no sense: {error}. Copy the folder again.") from error
    except Exception as error:  # the caller's class may raise anything, and so may operators on wrong sizes
        problem = f"it fails on them ({_brief(error)})"
    if problem:
        raise ArtefactError(
            f"the model loaded from {folder} does not do what the saved one did on the samples stored with it: "
            f"{problem}. Use the class and the versions it was saved with (manifest.json names them), or copy the "
            "folder again; check=False loads it as it is."
        )


def _taken(model: nn.Module, given: Inputs) -> Samples | str:
    tensors: dict[str, Tensor] = {}
    try:
        inputs, outputs = _fitting(model, given)
        call = _plain([tuple(inputs.args), dict(inputs.kwargs)], tensors)
        again, moved = _run(model, inputs), _run(model, inputs.map(_shaken))
    except Exception as error:  # a model that was changed may raise anything
        return f"the model does not run on the calibration samples ({_brief(error)})"
    if not outputs:
        return "the model returns no tensors"
    if _difference(outputs, again, 1e-6):
        return "the model gives other outputs for the same inputs"
    tensors |= {f"output.{place}": value for place, value in enumerate(outputs)}
    stored = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    moves = [_distance(a, b) for a, b in zip(outputs, moved, strict=True) if a.is_floating_point()]
    usual = max(ROUNDING.get(value.dtype, 0.0) for value in outputs)
    return Samples(stored, call, min(max(usual, AMPLIFIED * max(moves, default=0.0)), LOOSEST))


def _fitting(model: nn.Module, inputs: Inputs) -> tuple[Inputs, list[Tensor]]:
    """The inputs as they are, or in the model's own precision where that was changed, and what becomes of them."""
    try:
        return inputs, _run(model, inputs)
    except RuntimeError:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        cast = inputs.map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
        return cast, _run(model, cast)


def _run(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """What the model returns, in order and as real numbers; it runs as a copy, for a forward pass may keep a state."""
    twin = working_copy(model)
    place = next((tensor.device for tensor in (*twin.parameters(), *twin.buffers())), torch.device("cpu"))
    with torch.no_grad(), exact_float32():
        found = tensors_in(inputs.to(place).call(twin))
    return [torch.view_as_real(value.resolve_conj()) if value.is_complex() else value for value in found]


def _shaken(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor) - 0.5
    return tensor * (1 + 4 * torch.finfo(tensor.dtype).eps * noise)


def _difference(expected: list[Tensor], found: list[Tensor], tolerance: float) -> str:
    """What is wrong with the outputs that were found; empty if nothing is."""
    if len(expected) != len(found):
        return f"it returns {len(found)} tensors, and returned {len(expected)}"
    for place, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {place} is of {b.dtype}, {tuple(b.shape)}, and was of {a.dtype}, {tuple(a.shape)}"
        distance = _distance(a.cpu(), b.cpu())
        if not distance <= (tolerance if a.is_floating_point() else FLIPPED):
            return f"output {place} differs by {distance:.1e} (allowed: {tolerance:.0e})"
    return ""


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two elements relative to theirs and a typical size; of integers, the share that differ.

    The typical size is the median of what is not zero: a few huge values, as masks leave them, do not hide the others.
    """
    if not a.numel():
        return 0.0
    if not a.is_floating_point():
        return float((a != b).double().mean())
    a, b = a.detach().double(), b.detach().double()
    is_odd = ~(a.isfinite() & b.isfinite())
    if bool((is_odd & (a != b) & ~(a.isnan() & b.isnan())).any()):
        return float("inf")
    a, b = a[~is_odd], b[~is_odd]
    sizes = a.abs()[a != 0]
    typical = sizes.median() if len(sizes) else torch.tensor(torch.finfo(torch.float32).tiny)
    return float(((a - b).abs() / (a.abs() + typical)).max()) if len(a) else 0.0


def _plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Arguments as plain data; tensors are put aside under names."""
    if isinstance(value, Tensor):
        name = f"input.{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if type(value) in (list, tuple):
        return {"tuple" if type(value) is tuple else "list": [_plain(part, tensors) for part in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_plain_key(key), _plain(part, tensors)] for key, part in value.items()]}
    if value is None or type(value) in (bool, int, str) or (type(value) is float and abs(value) < float("inf")):
        return value
    raise TypeError(f"an input of type {type(value).__name__} has no plain form")


def _plain_key(key: Any) -> str:
    if type(key) is not str:
        raise TypeError(f"the key {key!r} is no text")
    return key


def _passed(value: Any, tensors: Mapping[str, Tensor], where: str) -> Any:
    """The arguments that plain data stands for."""
    if value is None or type(value) in (bool, float):
        return value
    if type(value) is int:
        return integer()(value, where)
    if type(value) is str:
        return text()(value, where)
    kind = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else ""
    if kind == "tensor" and type(value[kind]) is str and value[kind] in tensors:
        return tensors[value[kind]]
    parts = value[kind] if kind in ("tuple", "list", "dict") else None
    if type(parts) is not list:
        raise MisfitError(where, "a number, a text, null, or a stored tensor, a list, tuple or dict of them", value)
    if kind == "dict":
        return {key: _passed(part, tensors, f"{where}.{key}") for key, part in _text_pairs(parts, where)}
    inner = [_passed(part, tensors, f"{where}[{place}]") for place, part in enumerate(parts)]
    return tuple(inner) if kind == "tuple" else inner


def _text_pairs(parts: list[Any], where: str) -> list[Any]:
    for place, pair in enumerate(listing(listing(lambda part, _: part, 2, 2))(parts, where)):
        text()(pair[0], f"{where}[{place}][0]")
    return parts


def _brief(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"
