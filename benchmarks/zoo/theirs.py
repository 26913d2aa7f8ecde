"""Torch-Pruning's side: plain use as its README shows, half of every layer's channels, the answer's layers spared."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch_pruning
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import recoup
from benchmarks.zoo.counting import SAMPLES, Observed, observe, tensors_of
from benchmarks.zoo.masking import Norm, inputs_of, masked
from benchmarks.zoo.reading import call
from benchmarks.zoo.rows import TheirRow, brief
from benchmarks.zoo.spec import Spec

RATIO = 0.5


def examine(spec: Spec) -> TheirRow:
    """What Torch-Pruning makes of a network, without any data."""
    start = time.perf_counter()
    row = _examine(spec)
    return replace(row, seconds={**row.seconds, "total": round(time.perf_counter() - start, 2)})


def _examine(spec: Spec) -> TheirRow:
    model = spec.build()
    before, size = observe(model, spec.example(SAMPLES), SAMPLES), _size(model)
    row = TheirRow("untouched", macs=before.macs)
    start = time.perf_counter()
    try:
        kept = _prune(model, spec)
    except Exception as error:  # theirs, or what the model's code raises under it
        return replace(row, result="crash", why=brief(error))
    row = replace(row, seconds={"prune": round(time.perf_counter() - start, 2)})
    return row if _size(model) == size else _judge(spec, model, before, kept, row)


def _prune(model: nn.Module, spec: Spec) -> dict[str, Tensor]:
    """Prune `model` itself; the inputs that each of its layers still has, by number before."""
    names = {module: name for name, module in model.named_modules()}
    kept: dict[str, Tensor] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner = torch_pruning.pruner.MagnitudePruner(
            model,
            spec.example(1),
            importance=torch_pruning.importance.MagnitudeImportance(p=2),
            global_pruning=False,
            pruning_ratio=RATIO,
            ignored_layers=_answer_layers(model, spec),
        )
        for group in pruner.step(interactive=True):  # what step() does, with a look at every group
            for dependency, indices in group:
                module = dependency.target.module
                if module in names and _loses_inputs(pruner.DG, dependency):
                    _take(kept, names[module], module, [int(getattr(i, "idx", i)) for i in indices])
            group.prune()
    return kept


def _loses_inputs(graph: Any, dependency: Any) -> bool:
    """Whether a layer stops reading channels; a batch norm or a depthwise convolution only carries them."""
    if not graph.is_in_channel_pruning_fn(dependency.handler):
        return False
    mixes = isinstance(dependency.target.module, (*Norm, nn.MultiheadAttention))
    return mixes or not graph.is_out_channel_pruning_fn(dependency.handler)


def _take(kept: dict[str, Tensor], name: str, module: nn.Module, indices: list[int]) -> None:
    """Take inputs from a layer, by their numbers at this moment; numbers it does not have are passed over, as there."""
    now = kept.get(name, torch.arange(inputs_of(module)))
    kept[name] = now[~torch.isin(torch.arange(len(now)), torch.tensor(indices, dtype=torch.long))]


def _answer_layers(model: nn.Module, spec: Spec) -> list[nn.Module]:
    """Layers whose outputs are returned: those named, and those of as many outputs as there are classes.

    Where neither is known, those that Recoup finds: users of the other library know theirs.
    """
    if not spec.heads and not spec.classes:
        return _returned(model, spec)
    kinds = (nn.Linear, nn.Conv2d)
    widths = [(module, module.weight.shape[0]) for module in model.modules() if isinstance(module, kinds)]
    return [*(model.get_submodule(name) for name in spec.heads), *(m for m, width in widths if width == spec.classes)]


def _returned(model: nn.Module, spec: Spec) -> list[nn.Module]:
    try:
        groups = recoup.trace(model, spec.example(2)).structure.groups
    except recoup.RecoupError:
        return []
    names = {name for group in groups if group.returned for name in group.producers}
    return [module for name, module in model.named_modules() if name in names]


def _judge(spec: Spec, model: nn.Module, before: Observed, kept: dict[str, Tensor], row: TheirRow) -> TheirRow:
    """The row of a model that did get smaller."""
    try:
        after = observe(model, spec.example(SAMPLES), SAMPLES)
    except Exception as error:  # sizes that no longer fit
        return replace(row, result="forward crashes", why=brief(error))
    row = replace(row, kept=after.macs / max(1, before.macs))
    if after.shapes != before.shapes:
        return replace(row, result="shapes changed", why=f"{after.shapes[0]} for {before.shapes[0]}")
    return replace(row, result="pruned", difference=_difference(spec, model, kept))


def _difference(spec: Spec, model: nn.Module, kept: dict[str, Tensor]) -> float | None:
    """From the original with the same channels zeroed, relative to its largest output; None if that cannot be run."""
    batch = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, spec.example(SAMPLES))
    try:
        model = model.double()
        twin = masked(spec.build().double(), model, kept)
        with torch.no_grad():
            expected, actual = tensors_of(call(twin, batch)), tensors_of(call(model, batch))
    except Exception:  # code that insists on float32, or a layer the masks do not fit
        return None
    return max(_relative(a, b) for a, b in zip(actual, expected, strict=True))


def _relative(actual: Tensor, expected: Tensor) -> float:
    tiny = torch.finfo(torch.float32).tiny
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=tiny))


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
