"""Checkpoints: one safetensors file, the facts as JSON in its header, no pickle; it is replaced whole or not at all.

    model.NAME           every parameter and buffer
    optimiser.I.KEY      the optimiser's tensors of parameter I
    facts                format, what was run (settings, steps, hashes of start, teacher and data), history

Every epoch draws its random numbers from the seed and its own number, so that no generator has to be stored. A hash
over facts and tensors tells whether a file is what was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.errors import ArtefactError, told
from recoup.training.data import Traces
from recoup.training.record import Epoch
from recoup.training.settings import Training
from recoup.training.tensors import digest, digest_of, held, plain
from recoup.version import __version__

FORMAT = 2
_FACTS, _SHA = "facts", "sha256"
_MODEL, _OPTIMISER = "model.", "optimiser."
_REMOVE = "Remove the file to begin anew."
# Names that a message shows.
_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class Run:
    """What a checkpoint belongs to: settings, model, teacher and data.

    steps: batches of an epoch.
    start: a hash of the model it began with.
    teacher: a hash of the teacher, empty without one.
    trained: names of the parameters that train.
    form: dtypes and shapes of the first batch.
    contents: a hash of all batches where they lie in a list, empty elsewhere.
    """

    settings: Mapping[str, Any]
    steps: int
    start: str
    teacher: str
    trained: Sequence[str]
    form: str
    contents: str


def run_of(model: nn.Module, teacher: nn.Module | None, training: Training, steps: int, traces: Traces) -> Run:
    """What is about to be run, for a model that has not been trained yet."""
    trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    start, guide = digest_of(model), digest_of(teacher)
    return Run(asdict(training), steps, start, guide, trained, traces.form, traces.contents)


def require_storable(model: nn.Module) -> None:
    """Refuse parameters and buffers that a checkpoint could not hold, or not give back.

    Raises:
        ArtefactError: one is sparse, expanded or of a dtype that safetensors does not know.
    """
    for name, tensor in held(model).items():
        why = _hindrance(tensor)
        if why:
            raise ArtefactError(
                f"{name} of the model {why}, so that no checkpoint can hold it. Replace it by a dense copy of a common "
                "dtype, or train without checkpoint=."
            )


def _hindrance(tensor: Tensor) -> str:
    """Why a tensor cannot be stored and put back; empty where it can."""
    if tensor.layout is not torch.strided:
        return f"is {str(tensor.layout).removeprefix('torch.')}"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded, one number in many places"
    try:
        save({"one": torch.empty(0, dtype=tensor.dtype)})
    except (SafetensorError, KeyError, ValueError, RuntimeError):
        return f"is of {tensor.dtype}"
    return ""


def write_checkpoint(path: Path, run: Run, model: nn.Module, optimiser: Optimizer, history: Sequence[Epoch]) -> None:
    """Put a checkpoint in the place of the one before, which stays if anything fails.

    Raises:
        ArtefactError: it cannot be written.
    """
    tensors = {f"{_MODEL}{name}": plain(value) for name, value in held(model).items()}
    tensors |= {f"{_OPTIMISER}{name}": plain(value) for name, value in _states(optimiser).items()}
    facts = _facts(run, history)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, draft, {_FACTS: facts, _SHA: digest(facts, tensors)})
        _flush(draft)
        draft.replace(path)
    except (OSError, ValueError, SafetensorError) as error:
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
    own = held(model)
    stored = {name.removeprefix(_MODEL): value for name, value in tensors.items() if name.startswith(_MODEL)}
    if {name: _form(value) for name, value in stored.items()} != {name: _form(value) for name, value in own.items()}:
        raise ArtefactError(f"{path} is a checkpoint of another model: its tensors have other names or sizes.")
    with torch.no_grad():
        for name, value in own.items():
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
    if metadata.get(_SHA) != digest(facts, tensors):
        raise ArtefactError(f"the checkpoint {path} is damaged: it is not what was written. {_REMOVE}")
    return tensors, facts


def _checked_history(path: Path, text: str, run: Run) -> tuple[Epoch, ...]:
    """The epochs that are behind a checkpoint, if it is one of this run."""
    try:
        facts = json.loads(text)
        version = facts.get("format")
    except (ValueError, AttributeError) as error:
        raise ArtefactError(f"{path} is no checkpoint that this version reads ({told(error)}). {_REMOVE}") from error
    if version != FORMAT:
        raise ArtefactError(f"{path} has format {version}, this version reads {FORMAT}. {_REMOVE}")
    try:
        found, history = Run(**facts["run"]), tuple(Epoch(**epoch) for epoch in facts["history"])
    except (KeyError, TypeError) as error:
        raise ArtefactError(f"{path} is no checkpoint that this version reads ({told(error)}). {_REMOVE}") from error
    _require_settings(path, found, run)
    _require_networks(path, found, run)
    _require_data(path, found, run)
    return history


def _require_settings(path: Path, found: Run, run: Run) -> None:
    settings = {name: value for name, value in run.settings.items() if found.settings.get(name) != value}
    if settings or found.settings.keys() != run.settings.keys():
        named = ", ".join(
            f"{name} was {found.settings.get(name)!r} and is {value!r}" for name, value in settings.items()
        )
        raise ArtefactError(f"{path} was written with other settings: {named}. Give those, or remove it to begin anew.")


def _require_networks(path: Path, found: Run, run: Run) -> None:
    if found.start != run.start:
        raise ArtefactError(f"{path} belongs to a run that began with another model. Give that one, or another path.")
    if found.teacher != run.teacher:
        raise ArtefactError(f"{path} belongs to a run with another teacher. Give that one, or another path.")
    before, now = set(found.trained), set(run.trained)
    if before != now:
        frozen, thawed = (_listed(names) for names in (before - now, now - before))
        named = ", ".join(f"{names} {verb} now" for names, verb in ((frozen, "frozen"), (thawed, "trained")) if names)
        raise ArtefactError(
            f"{path} belongs to a run that trained other parameters: {named}. Set requires_grad as it was, or give "
            "another path."
        )


def _require_data(path: Path, found: Run, run: Run) -> None:
    if found.steps != run.steps:
        raise ArtefactError(f"{path} is of epochs with {found.steps} batches, not {run.steps}. Give the same batches.")
    if found.form != run.form:
        raise ArtefactError(
            f"{path} belongs to a run on other data: the first batch was {found.form} and is {run.form}. Give the same "
            "batches, or another path."
        )
    if found.contents and run.contents and found.contents != run.contents:
        raise ArtefactError(
            f"{path} belongs to a run on other data: the batches hold other numbers, or come in another order. Give "
            "the same batches, or another path."
        )


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - _MOST_NAMES} more" if len(shown) > _MOST_NAMES else ""
    return ", ".join(shown[:_MOST_NAMES]) + more


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


def _form(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _flush(path: Path) -> None:
    """Have the disk hold the file before it takes the place of another."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
