"""Saving and loading a result: a JSON plan, safetensors weights, a report. No pickle, nothing half written.

plan.json           what was kept of every parameter and buffer, and what the original looked like
graph.json          what a standalone result runs; a result of the model's own class has none
model.safetensors   the smaller model's parameters and buffers
report.json, report.html
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from recoup.channels.groups import named_tensors
from recoup.errors import ArtefactError
from recoup.graph.serialise import graph_from_json, graph_to_json
from recoup.graph.standalone import standalone
from recoup.plan import Plan, Recovery, Slice
from recoup.report.content import Report
from recoup.report.page import render_page
from recoup.surgery.apply import apply
from recoup.version import __version__

FORMAT = 2
PLAN, GRAPH, WEIGHTS = "plan.json", "graph.json", "model.safetensors"
REPORT, PAGE = "report.json", "report.html"


def save(folder: str | Path, model: nn.Module, plan: Plan, report: Report, *, source: str | None = None) -> Path:
    """Write a new folder; it appears complete or not at all.

    Raises:
        ArtefactError: the folder exists or cannot be written.
    """
    folder = Path(folder)
    require_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        _write(draft, model, plan, report, source)
        _share_with_readers(draft)
        draft.rename(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def load(folder: str | Path, model: nn.Module | Callable[[], nn.Module] | None = None) -> nn.Module:
    """The smaller model, made from the original class: `model` is the original or a function that builds it.

    A standalone result needs no model.

    Raises:
        ArtefactError: a file is missing or damaged, or the model is not the one that was pruned.
    """
    folder = Path(folder)
    plan, added = read_plan(folder)
    if is_standalone(folder):
        return _load_standalone(folder)
    if model is None:
        raise ArtefactError(f"{folder} holds a result of the model's own class. Pass the original model to `load`.")
    original = model if isinstance(model, nn.Module) else model()
    smaller = apply(original, _with_new_biases(original, plan, added))
    _load_tensors(smaller, _read_tensors(folder / WEIGHTS), folder)
    return smaller


def is_standalone(folder: str | Path) -> bool:
    """Whether a saved result is a graph of its own, which needs no model to be loaded."""
    return (Path(folder) / GRAPH).exists()


def require_new(folder: str | Path) -> None:
    """Refuse an output folder that is there already or could not be made, before any work is done for it."""
    folder = Path(folder)
    if folder.exists():
        raise ArtefactError(f"{folder} exists already. Choose another folder or remove it; nothing was overwritten.")
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ArtefactError(f"cannot write {folder}: {above} is not a folder you may write to. Choose another one.")


def read_source(folder: str | Path) -> str | None:
    """Where the original model came from, if the one who saved it said so."""
    source = _read_json(Path(folder) / PLAN).get("source")
    return str(source) if source is not None else None


def read_plan(folder: Path) -> tuple[Plan, tuple[str, ...]]:
    """The plan without weights, and the names of biases that pruning added."""
    data = _read_json(folder / PLAN)
    try:
        if data["format"] != FORMAT:
            raise ArtefactError(
                f"{folder / PLAN} has format {data['format']}, this version reads {FORMAT}. Install the version of "
                f"recoup that wrote it ({data.get('recoup')})."
            )
        keep = {name: _mask(entry["width"], entry["kept"]) for name, entry in data["keep"].items()}
        slices = tuple(Slice(entry["tensor"], entry["dim"], _indices(entry["kept"])) for entry in data["slices"])
        shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
        recovery = {name: Recovery(**entry) for name, entry in data["recovery"].items()}
        return Plan(keep, slices, {}, shapes, recovery), tuple(data["added"])
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        raise ArtefactError(f"{folder / PLAN} is not a plan ({error!r}). Save the result again.") from error


def _write(draft: Path, model: nn.Module, plan: Plan, report: Report, source: str | None) -> None:
    if plan.graph is not None:
        (draft / GRAPH).write_text(json.dumps(graph_to_json(plan.graph)))
    save_file(_all_tensors(model) if plan.graph is not None else _unique_tensors(model), draft / WEIGHTS)
    (draft / PLAN).write_text(json.dumps(_plan_to_json(model, plan, source)))
    (draft / REPORT).write_text(json.dumps(report.to_json(), indent=1))
    (draft / PAGE).write_text(render_page(report), encoding="utf-8")


def _share_with_readers(draft: Path) -> None:
    """Temporary folders and weight files are made private; a result gets the permissions of any other new file."""
    mask = os.umask(0)
    os.umask(mask)
    draft.chmod(0o777 & ~mask)
    for path in draft.iterdir():
        path.chmod(0o666 & ~mask)


def _plan_to_json(model: nn.Module, plan: Plan, source: str | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "recoup": __version__,
        "model": type(model).__name__,
        "source": source,
        "keep": {n: {"width": len(m), "kept": m.nonzero().squeeze(1).tolist()} for n, m in plan.keep.items()},
        "parameters": {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)},
        "training": model.training,
        "slices": [{"tensor": s.tensor, "dim": s.dim, "kept": s.kept.tolist()} for s in plan.slices],
        "added": [name for name in plan.weights if name not in plan.shapes],
        "shapes": {name: list(shape) for name, shape in plan.shapes.items()},
        "recovery": {name: dataclasses.asdict(recovery) for name, recovery in plan.recovery.items()},
    }


def _unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer once: tied ones are stored under their first name."""
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):  # a module may put other things of its own there
            unique.setdefault(id(tensor), (name, tensor))
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in unique.values()}


def _all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every name, as a graph refers to them."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named_tensors(model).items()}


def _load_standalone(folder: Path) -> nn.Module:
    """The graph with its tensors: what was a parameter is one again, the rest are buffers."""
    data, tensors = _read_json(folder / GRAPH), _read_tensors(folder / WEIGHTS)
    stored = _read_json(folder / PLAN)
    try:
        plan, trained = graph_from_json(data), stored["parameters"]
        held = {
            name: nn.Parameter(value, requires_grad=trained[name]) if name in trained else value
            for name, value in tensors.items()
        }
        return standalone(plan, held).train(stored["training"])
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ArtefactError(f"{folder / GRAPH} is damaged ({error!r}). Copy the folder again.") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise ArtefactError(f"{path} is missing. Copy the whole folder that was saved.") from error
    except (SafetensorError, OSError) as error:
        raise ArtefactError(f"{path} is damaged ({error}). Copy the folder again or save the result again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ArtefactError(f"{path} is missing: {path.parent} is not a folder that recoup saved.") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArtefactError(f"{path} is damaged ({error}). Copy the folder again or save the result again.") from error
    if not isinstance(data, dict):
        raise ArtefactError(f"{path} is not a plan. Save the result again.")
    return data


def _with_new_biases(original: nn.Module, plan: Plan, added: tuple[str, ...]) -> Plan:
    """The plan with zeros for biases the original does not have; their values are in the weights file."""
    try:
        sizes = {name: _outputs(original.get_submodule(name.rpartition(".")[0])) for name in added}
    except (AttributeError, TypeError) as error:
        raise ArtefactError(
            f"the model has no layer for {', '.join(added[:3])} ({error}). Build it exactly as it was before pruning."
        ) from error
    return Plan(plan.keep, plan.slices, {n: torch.zeros(s) for n, s in sizes.items()}, plan.shapes, plan.recovery)


def _outputs(layer: nn.Module) -> int:
    """How many outputs a layer has; a transposed convolution's weight has its inputs first."""
    size: int = layer.out_channels if isinstance(layer, _ConvNd) else layer.out_features  # type: ignore[assignment]  # layers
    return size


def _load_tensors(smaller: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in _unique_tensors(smaller).items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        raise ArtefactError(
            f"{folder / WEIGHTS} does not fit the model: {', '.join(wrong[:5])} differ. Use the model class and the "
            "folder that belong together."
        )
    smaller.load_state_dict(tensors, strict=False)


def _mask(width: int, kept: list[int]) -> Tensor:
    mask = torch.zeros(width, dtype=torch.bool)
    mask[_indices(kept)] = True
    return mask


def _indices(kept: list[int]) -> Tensor:
    return torch.tensor(kept, dtype=torch.long)


def _unwritable(folder: Path, error: OSError) -> ArtefactError:
    return ArtefactError(f"cannot write {folder} ({error.strerror or error}). Choose a folder you may write to.")
