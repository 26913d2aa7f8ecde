"""Writing a result into a new folder, which appears complete or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from recoup.artefact.drafts import new_draft, remove_stale_drafts
from recoup.artefact.files import (
    GRAPH,
    PAGE,
    PLAN,
    REPORT,
    SAMPLES,
    WEIGHTS,
    dump_json,
    flush,
    flush_folder,
)
from recoup.artefact.graph_json import DTYPES, graph_to_json
from recoup.artefact.manifest import Manifest, stored, write_manifest
from recoup.artefact.plan_json import plan_to_json
from recoup.artefact.samples import Samples, take_samples
from recoup.artefact.tree import class_name
from recoup.channels.structure import named_tensors
from recoup.errors import ArtefactError, warn
from recoup.graph.copies import strip_hooks, working_copy
from recoup.inputs.batches import Inputs
from recoup.plan import Plan
from recoup.report.content import Report
from recoup.report.page import render_page


def save(
    folder: str | Path,
    model: nn.Module,
    plan: Plan,
    report: Report,
    *,
    source: str | None = None,
    samples: Inputs | None = None,
    original: str | None = None,
) -> Path:
    """Write a new folder; it appears complete or not at all.

    Args:
        folder: where to; it must not exist.
        model: the smaller model, as it is now.
        plan: how it was made from the original.
        report: what to say about it.
        source: names where the original comes from.
        samples: inputs that the loaded model is checked on.
        original: class of the original, where it is not that of `model`.

    Raises:
        ArtefactError: the folder exists or cannot be written, or the model has no plain form.
    """
    folder = Path(folder)
    require_new(folder)
    with _draft(folder) as draft:
        _write(draft, model, plan, report, source)
        _write_manifest(draft, model, plan, samples, original)
        _share_with_readers(draft)
        for path in draft.iterdir():
            flush(path)
        flush_folder(draft)
        draft.rename(folder)
        flush_folder(folder.parent)
    return folder


def require_new(folder: str | Path) -> None:
    """Refuse an output folder that is there already or could not be made, before any work is done for it."""
    folder = Path(folder)
    if os.path.lexists(folder):
        raise _existing(folder)
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ArtefactError(f"cannot write {folder}: {above} is not a folder you may write to. Choose another one.")
    remove_stale_drafts(above)


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """A folder beside the final one, which goes whatever happens; a failure to write becomes an error of ours."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with new_draft(folder) as draft:
            yield draft
    except OSError as error:
        # Two may write one folder at once: the first to be ready has it, and renaming over it fails.
        is_late = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and os.path.lexists(folder)
        raise (_existing(folder) if is_late else _unwritable(folder, error.strerror or error)) from error
    except SafetensorError as error:  # what it meets while writing comes without a number
        raise _unwritable(folder, error) from error


def _write(draft: Path, model: nn.Module, plan: Plan, report: Report, source: str | None) -> None:
    if plan.graph is not None:
        (draft / GRAPH).write_text(dump_json(graph_to_json(plan.graph)), encoding="utf-8")
    save_file(_plain_tensors(_tensors(model, plan)), draft / WEIGHTS)
    (draft / PLAN).write_text(dump_json(plan_to_json(model, plan, source)), encoding="utf-8")
    (draft / REPORT).write_text(json.dumps(report.to_json(), indent=1), encoding="utf-8")
    (draft / PAGE).write_text(render_page(report), encoding="utf-8")


def _write_manifest(draft: Path, model: nn.Module, plan: Plan, samples: Inputs | None, original: str | None) -> None:
    bare = model if plan.keeps_hooks else strip_hooks(working_copy(model))
    taken = take_samples(bare, samples, plan.graph)
    if isinstance(taken, Samples):
        save_file(dict(taken.tensors), draft / SAMPLES)
    elif samples is not None:
        warn(f"the result is saved without samples to check it by when it is loaded: {taken}.")
    write_manifest(
        draft,
        Manifest(
            cls=original or class_name(type(model)),
            torch=str(torch.__version__),
            files={},
            tensors={name: stored(tensor) for name, tensor in _tensors(model, plan).items()},
            training=_modes(model),
            call=taken.call if isinstance(taken, Samples) else None,
            tolerance=taken.tolerance if isinstance(taken, Samples) else 0.0,
            unchecked=None if isinstance(taken, Samples) else taken,
        ),
    )


def _tensors(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """Every parameter and buffer: those of a graph by the names it reads them under.

    A model's own class ties what it ties and says what belongs to its state, so there each is stored once.
    """
    if plan.graph is not None:
        return named_tensors(model)
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):  # a module may put other things of its own there
            unique.setdefault(id(tensor), (name, tensor))
    return dict(unique.values())


def _plain_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for name, tensor in tensors.items():
        is_known = tensor.dtype in DTYPES.values() and tensor.dtype is not torch.complex128
        if not is_known or tensor.layout is not torch.strided or tensor.is_meta:
            raise ArtefactError(
                f"{name} cannot be saved: it is of {tensor.dtype}, {tensor.layout}, on {tensor.device}, and a "
                "safetensors file holds plain dense tensors. Convert it first."
            )
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _modes(model: nn.Module) -> dict[str, bool]:
    """Whether the model trains, under the empty name, and the modules that differ from it."""
    modes = {name: module.training for name, module in model.named_modules()}
    return {name: mode for name, mode in modes.items() if not name or mode != model.training}


def _share_with_readers(draft: Path) -> None:
    """Temporary folders and weight files are made private; a result gets the permissions of any other new file."""
    mask = os.umask(0)
    os.umask(mask)
    draft.chmod(0o777 & ~mask)
    for path in draft.iterdir():
        path.chmod(0o666 & ~mask)


def _existing(folder: Path) -> ArtefactError:
    return ArtefactError(f"{folder} exists already. Choose another folder or remove it; nothing was overwritten.")


def _unwritable(folder: Path, reason: object) -> ArtefactError:
    return ArtefactError(f"cannot write {folder} ({reason}). Choose a folder you may write to, on a disk with space.")
