"""Checkpoints: one safetensors file, the facts as JSON in its header, no pickle; it is replaced whole or not at all.

    model.NAME           every parameter and buffer
    optimiser.I.KEY      the optimiser's tensors of parameter I
    facts                format, what was run (settings, steps, a hash of the start), history

Every epoch draws its random numbers from the seed and its own number, so that no generator has to be stored. A hash
over facts and tensors tells whether a file is what was written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.errors import ArtefactError
from recoup.training.record import Epoch
from recoup.training.settings import Training
from recoup.version import __version__

FORMAT = 1
_FACTS, _SHA = "facts", "sha256"
_MODEL, _OPTIMISER = "model.", "optimiser."
_REMOVE = "Remove the file to begin anew."


@dataclass(frozen=True, slots=True)
class Run:
    """What a checkpoint belongs to: the settings, the steps of an epoch, and a hash of the model it began with."""

    settings: Mapping[str, Any]
    steps: int
    start: str


def run_of(model: nn.Module, training: Training, steps: int) -> Run:
    """What is about to be run, for a model that has not been trained yet."""
    tensors = {name: _plain(value) for name, value in _held(model).items()}
    return Run(asdict(training), steps, _digest("", tensors))


def write_checkpoint(path: Path, run: Run, model: nn.Module, optimiser: Optimizer, history: Sequence[Epoch]) -> None:
    """Put a checkpoint in the place of the one before, which stays if anything fails.

    Raises:
        ArtefactError: it cannot be written.
    """
    tensors = {f"{_MODEL}{name}": _plain(value) for name, value in _held(model).items()}
    tensors |= {f"{_OPTIMISER}{name}": _plain(value) for name, value in _states(optimiser).items()}
    facts = _facts(run, history)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, draft, {_FACTS: facts, _SHA: _digest(facts, tensors)})
        _flush(draft)
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        raise ArtefactError(
            f"the checkpoint {path} cannot be written ({error}). Choose a folder you may write to, on a disk with "
            "space; the checkpoint of the epoch before is as it was."
        ) from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def restore_checkpoint(path: Path, run: Run, model: nn.Module, optimiser: Optimizer) -> tuple[Epoch, ...]:
    """The history of a checkpoint, whose tensors are put into the model and the optimiser.

    Raises:
        ArtefactError: it is damaged, or belongs to another run.
    """
    tensors, facts = _read(path)
    history = _checked_history(path, facts, run)
    held = _held(model)
    stored = {name.removeprefix(_MODEL): value for name, value in tensors.items() if name.startswith(_MODEL)}
    if {name: _form(value) for name, value in stored.items()} != {name: _form(value) for name, value in held.items()}:
        raise ArtefactError(f"{path} is a checkpoint of another model: its tensors have other names or sizes.")
    with torch.no_grad():
        for name, value in held.items():
            value.copy_(stored[name])
    _restore_states(optimiser, {n.removeprefix(_OPTIMISER): v for n, v in tensors.items() if n.startswith(_OPTIMISER)})
    return history


def _read(path: Path) -> tuple[dict[str, Tensor], str]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # it is no dict
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise ArtefactError(f"the checkpoint {path} is damaged ({str(error)[:200]}). {_REMOVE}") from error
    facts = metadata.get(_FACTS)
    if facts is None:
        raise ArtefactError(f"{path} is no checkpoint of recoup.finetune. Give another path.")
    if metadata.get(_SHA) != _digest(facts, tensors):
        raise ArtefactError(f"the checkpoint {path} is damaged: it is not what was written. {_REMOVE}")
    return tensors, facts


def _checked_history(path: Path, text: str, run: Run) -> tuple[Epoch, ...]:
    """The epochs that are behind a checkpoint, if it is one of this run."""
    try:
        facts = json.loads(text)
        found, history = Run(**facts["run"]), tuple(Epoch(**epoch) for epoch in facts["history"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"{path} is no checkpoint that this version reads ({error}). {_REMOVE}") from error
    if facts.get("format") != FORMAT:
        raise ArtefactError(f"{path} has format {facts.get('format')}, this version reads {FORMAT}. {_REMOVE}")
    settings = {name: value for name, value in run.settings.items() if found.settings.get(name) != value}
    if settings or found.settings.keys() != run.settings.keys():
        named = ", ".join(
            f"{name} was {found.settings.get(name)!r} and is {value!r}" for name, value in settings.items()
        )
        raise ArtefactError(f"{path} was written with other settings: {named}. Give those, or remove it to begin anew.")
    if found.steps != run.steps:
        raise ArtefactError(f"{path} is of epochs with {found.steps} batches, not {run.steps}. Give the same batches.")
    if found.start != run.start:
        raise ArtefactError(f"{path} belongs to a run that began with another model. Give that one, or another path.")
    return history


def _facts(run: Run, history: Sequence[Epoch]) -> str:
    facts = {"format": FORMAT, "recoup": __version__, "torch": str(torch.__version__), "run": asdict(run)}
    return json.dumps({**facts, "history": [asdict(epoch) for epoch in history]}, allow_nan=False, sort_keys=True)


def _states(optimiser: Optimizer) -> dict[str, Tensor]:
    states = optimiser.state_dict()["state"]
    return {
        f"{place}.{key}": value
        for place, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def _restore_states(optimiser: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        place, _, key = name.partition(".")
        states.setdefault(int(place), {})[key] = value
    optimiser.load_state_dict({"state": states, "param_groups": optimiser.state_dict()["param_groups"]})


def _held(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _form(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _digest(facts: str, tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(facts.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return found.hexdigest()


def _flush(path: Path) -> None:
    """Have the disk hold the file before it takes the place of another."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
