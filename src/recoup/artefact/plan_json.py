"""The plan as plain data, and back. Sizes are checked against the original's shapes before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recoup.artefact.files import FORMAT
from recoup.artefact.schema import (
    MisfitError,
    ascending,
    distinct,
    dotted,
    integer,
    listing,
    mapping,
    number_or_flag,
    optional,
    real,
    record,
    text,
)
from recoup.channels.structure import named_tensors
from recoup.errors import ArtefactError
from recoup.graph.norms_by_hand import own_norm
from recoup.graph.settings import is_setting
from recoup.plan import Plan, Recovery, Slice
from recoup.version import __version__

# More channels than any network has in all its groups: a mask is allocated for each of them.
_WIDTH = 10_000_000
_DIMS = 16
_NAMES = 100_000

_SHAPE = listing(integer(0), _DIMS)
PLAN_SCHEMA = record(
    format=integer(FORMAT, FORMAT),
    recoup=text(100),
    model=text(),
    source=optional(text()),
    keep=mapping(text(), record(width=integer(0, _WIDTH), kept=ascending)),
    slices=listing(record(tensor=text(), dim=integer(0, _DIMS - 1), runs=integer(1, _WIDTH), kept=ascending)),
    added=mapping(text(), _SHAPE),
    shapes=mapping(text(), _SHAPE),
    recovery=mapping(
        text(),
        record(
            residual=optional(real()),
            ridge=optional(real()),
            condition=optional(real()),
            inputs=integer(0),
            rows=integer(0),
        ),
    ),
    untied=distinct(listing(text(), _NAMES)),
    norms=distinct(listing(text(), _NAMES)),
    idle=distinct(listing(text(), _NAMES)),
    settings=mapping(dotted, number_or_flag, _NAMES),
)


def plan_to_json(model: nn.Module, plan: Plan, source: str | None) -> dict[str, Any]:
    """Plain data that fits `PLAN_SCHEMA`."""
    return {
        "format": FORMAT,
        "recoup": __version__,
        "model": type(model).__name__,
        "source": source,
        "keep": {n: {"width": len(m), "kept": m.nonzero().squeeze(1).tolist()} for n, m in plan.keep.items()},
        "slices": [_slice_to_json(piece, plan) for piece in plan.slices],
        "added": {name: list(value.shape) for name, value in plan.weights.items() if name not in plan.shapes},
        "shapes": {name: list(shape) for name, shape in plan.shapes.items()},
        "recovery": {name: _recovery_to_json(recovery) for name, recovery in plan.recovery.items()},
        "untied": list(plan.untied),
        "norms": list(plan.norms),
        "idle": list(plan.idle),
        "settings": dict(plan.settings),
    }


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """The plan without weights, from data that fits the schema; biases that pruning added are left to `for_model`.

    Raises:
        MisfitError: its parts contradict each other.
    """
    shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
    added = {name: tuple(shape) for name, shape in data["added"].items()}
    for name in added.keys() & shapes.keys():
        raise MisfitError(f"added.{name}", "none of the original's tensors", name)
    slices = _slices(data["slices"], {**shapes, **added})
    if sum(entry["width"] for entry in data["keep"].values()) > _WIDTH:
        raise MisfitError("keep", f"about at most {_WIDTH} channels in all", "more")
    keep = {name: _mask(entry["width"], entry["kept"], f"keep.{name}") for name, entry in data["keep"].items()}
    recovery = {name: _recovery(entry) for name, entry in data["recovery"].items()}
    untied, norms, idle = (tuple(data[name]) for name in ("untied", "norms", "idle"))
    settings = dict(data["settings"])
    return Plan(keep, slices, {}, shapes, recovery, untied=untied, norms=norms, idle=idle, settings=settings)


def for_model(plan: Plan, added: Mapping[str, list[int]], model: nn.Module) -> Plan:
    """The plan with zeros for the biases that `model` does not have; their values are among the saved tensors.

    Raises:
        ArtefactError: the model has other tensors than the original, or no layer for one of the biases.
    """
    _require_shapes(plan.shapes, model)
    _require_names(plan, model)
    return dataclasses.replace(plan, weights={name: _new_bias(model, name, shape) for name, shape in added.items()})


def _require_names(plan: Plan, model: nn.Module) -> None:
    parameters, modules = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_modules())
    missing = [name for name in plan.untied if name not in parameters]
    missing += [name for name in plan.norms if name not in modules or own_norm(modules[name]) is None]
    missing += [name for name in plan.idle if name not in modules]
    missing += [name for name in plan.settings if not is_setting(model, name)]
    if missing:
        raise ArtefactError(f"the model has no {missing[0][:200]}. Build it exactly as it was before pruning.")


def _require_shapes(shapes: Mapping[str, tuple[int, ...]], model: nn.Module) -> None:
    """Names of a plan have to be those of tensors: they are attributes that will be looked up and replaced."""
    held = named_tensors(model)
    for name, shape in shapes.items():
        found = tuple(held[name].shape) if name in held else None
        if found != shape:
            raise ArtefactError(
                f"the plan was made for a model whose {name[:200]} has shape {shape}; here it is {found or 'missing'}. "
                "Build the model exactly as it was before pruning."
            )


def _new_bias(model: nn.Module, name: str, shape: list[int]) -> Tensor:
    owner, _, attribute = name.rpartition(".")
    layer = dict(model.named_modules()).get(owner)
    if layer is None or layer._parameters.get(attribute, model) is not None:
        raise ArtefactError(f"the model has no layer that lacks {name}. Build it exactly as it was before pruning.")
    sizes = {size for parameter in layer.parameters(recurse=False) for size in parameter.shape}
    sizes |= {getattr(layer, "out_channels", None), getattr(layer, "out_features", None)}
    if len(shape) != 1 or shape[0] not in sizes:
        raise ArtefactError(
            f"{name} would have the shape {shape}, which is not the number of its layer's outputs. Build the model "
            "exactly as it was before pruning."
        )
    return torch.zeros(shape)


def _slices(entries: list[dict[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Slice, ...]:
    seen: set[tuple[str, int]] = set()
    for place, entry in enumerate(entries):
        where, name, dim, kept = f"slices[{place}]", entry["tensor"], entry["dim"], entry["kept"]
        if name not in shapes or dim >= len(shapes[name]):
            raise MisfitError(where, "about a dim of a tensor in shapes or added", f"{name}, dim {dim}")
        most = shapes[name][dim] * entry["runs"] - 1
        if not kept or kept[-1] > most:
            raise MisfitError(f"{where}.kept", f"places from 0 to {most}", kept[-1:])
        if (name, dim) in seen:
            raise MisfitError(where, "the only one for its tensor and dim", f"{name}, dim {dim}")
        seen.add((name, dim))
    return tuple(_slice(entry, shapes[entry["tensor"]], f"slices[{n}]") for n, entry in enumerate(entries))


def _slice_to_json(piece: Slice, plan: Plan) -> dict[str, Any]:
    """Of several runs, the places are counted through: those of the second follow on the first."""
    runs, kept = 1, piece.kept
    if kept.dim() == 2:
        runs = len(kept)
        kept = (kept + plan.shapes[piece.tensor][piece.dim] * torch.arange(runs)[:, None]).flatten()
    return {"tensor": piece.tensor, "dim": piece.dim, "runs": runs, "kept": kept.tolist()}


def _slice(entry: Mapping[str, Any], shape: tuple[int, ...], where: str) -> Slice:
    kept, dim, runs = torch.tensor(entry["kept"], dtype=torch.long), entry["dim"], entry["runs"]
    if runs > 1:
        if dim == 0 or shape[0] % runs or len(kept) % runs:
            raise MisfitError(f"{where}.runs", f"equal parts of the {shape[0]} rows and of what is kept", runs)
        kept = kept.view(runs, -1) - shape[dim] * torch.arange(runs)[:, None]
        if bool((kept < 0).any() | (kept >= shape[dim]).any()):
            raise MisfitError(f"{where}.kept", "the same number of places in every run", entry["kept"][:8])
    return Slice(entry["tensor"], dim, kept)


def _mask(width: int, kept: list[int], where: str) -> Tensor:
    if kept and kept[-1] >= width:
        raise MisfitError(f"{where}.kept", f"places from 0 to {width - 1}", kept[-1])
    mask = torch.zeros(width, dtype=torch.bool)
    mask[torch.tensor(kept, dtype=torch.long)] = True
    return mask


def _recovery_to_json(recovery: Recovery) -> dict[str, Any]:
    """JSON has no infinity, which a condition may be: null stands for what is not finite."""
    fields = dataclasses.asdict(recovery)
    return {name: value if value is not None and abs(value) < math.inf else None for name, value in fields.items()}


def _recovery(entry: Mapping[str, Any]) -> Recovery:
    known: dict[str, Any] = dict(entry)
    known |= {name: math.inf for name in ("ridge", "condition") if entry[name] is None}
    return Recovery(**known)
