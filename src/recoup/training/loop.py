"""The loop: epochs of gradient steps on a copy of the model."""

from __future__ import annotations

import hashlib
import random
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from recoup.config import require_flag, require_progress
from recoup.errors import ArtefactError, CalibrationError, TrainingError, UsageError, require_kind, told
from recoup.graph.copies import duplicate, working_copy
from recoup.graph.learning import learning
from recoup.inputs.augment import varied
from recoup.inputs.batches import (
    Inputs,
    Stream,
    call_checked,
    device_of,
    length_of,
    numbered_inputs,
    require_repeatable,
)
from recoup.inputs.surroundings import undisturbed
from recoup.progress import Progress, silent
from recoup.training.checkpoint import Run, require_storable, restore_checkpoint, run_of, write_checkpoint
from recoup.training.data import labels_of, traces_of
from recoup.training.losses import on_labels, on_teacher, require_known_classes, require_labels_fit, scores_in
from recoup.training.measure import measured, require_measurable
from recoup.training.record import Epoch, Finetuned
from recoup.training.settings import Training
from recoup.training.tensors import finite_names

USUAL = Training()
# Steps between two looks at the loss, which make a GPU wait.
LOOK_EVERY = 50
# The second of the averages that AdamW keeps.
SECOND_AVERAGE = 0.999


@undisturbed
def finetune(
    model: nn.Module,
    batches: Iterable[Any],
    training: Training = USUAL,
    *,
    teacher: nn.Module | None = None,
    validation: Iterable[Any] | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> Finetuned:
    """A copy of `model` trained on `batches`, with the history of its epochs; `model` itself is not changed.

    Args:
        model: a result of `recoup.prune`, or any other module that returns class scores.
        batches: pairs (inputs, labels), or inputs alone for distillation; read once in every epoch, in their order.
        training: how: epochs, optimiser, loss and so on.
        teacher: the network to learn from; its answers are made in eval mode.
        validation: batches on which accuracy is measured after every epoch; it decides nothing.
        checkpoint: a file that is written after every epoch, to resume from.
        resume: go on from the checkpoint, to the same bits; without a file yet, begin.
        progress: called with the stage, the steps done and their number.

    Raises:
        CalibrationError: batches can be read only once, have no labels where they are needed, or make the model fail.
        TrainingError: the loss or a weight is not finite; the last checkpoint is that of the epoch before.
        ArtefactError: the checkpoint is damaged, belongs to another run, would be overwritten, or cannot hold a tensor.
        UsageError: the model returns no class scores, or images would move under labels of their positions.
    """
    _check(training, teacher, validation, progress)
    require_flag("resume", resume)
    device = device_of(model)
    _require_readable_again(batches)
    twin = duplicate(model).eval()
    guide = None if teacher is None else working_copy(teacher).to(device)
    if validation is not None:
        require_measurable(twin, validation)
    steps = _number_of(batches)
    optimiser = make_optimiser(twin, training)
    keeper = _keeper(_place(checkpoint, resume=resume), twin, guide, optimiser, training, batches, steps)
    with torch.enable_grad(), _repeatable():
        history = keeper.resumed(validation) if keeper is not None and resume else ()
        loop = _Loop(twin, guide, optimiser, training, steps, progress)
        for epoch in range(len(history), training.epochs):
            history = (*history, loop.run(epoch, batches))
            history = _kept(keeper, twin, history, validation)
    for parameter in twin.parameters():
        parameter.grad = None
    return Finetuned(twin.eval(), history)


def make_optimiser(model: nn.Module, training: Training) -> Optimizer:
    """The optimiser of all parameters that train: matrices and kernels decay, biases and the vectors of norms do not.

    Raises:
        UsageError: nothing trains.
    """
    every = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not every:
        raise UsageError("no parameter of the model requires a gradient, so nothing would be trained. Unfreeze some.")
    groups = [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": training.decay},
        {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if training.optimiser == "adamw":
        return AdamW(groups, lr=training.peak, betas=(training.momentum, SECOND_AVERAGE))
    return SGD(groups, lr=training.peak, momentum=training.momentum, nesterov=training.momentum > 0)


class _Loop:
    """One epoch after the other on a model of ours."""

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module | None,
        optimiser: Optimizer,
        training: Training,
        steps: int,
        progress: Progress,
    ) -> None:
        self._model, self._teacher, self._optimiser, self._training = model, teacher, optimiser, training
        self._steps, self._progress, self._device = steps, progress, device_of(model)
        self._are_labels_known = False
        # Some are not finite on purpose, such as masks of attention.
        self._finite = finite_names(model)

    def run(self, epoch: int, batches: Iterable[Any]) -> Epoch:
        """Read all batches once, with a step for each."""
        begin, total, number = time.perf_counter(), torch.zeros((), device=self._device), 0
        generator = _seeded(self._training.seed, epoch, self._device)
        with learning(self._model):
            for number, batch in enumerate(Stream(batches, "training"), start=1):
                step = epoch * self._steps + number - 1
                rate = self._set_rate(step)
                total += self._step(batch, number, generator)
                if number % LOOK_EVERY == 0:
                    self._require_finite(total, epoch, number)
                done = min(step + 1, self._training.epochs * self._steps)
                self._progress("finetune", done, self._training.epochs * self._steps)
        self._require_finite(total, epoch, number)
        self._require_finite_model(epoch)
        self._are_labels_known = True
        return Epoch(float(total) / number, rate, time.perf_counter() - begin)

    def _set_rate(self, step: int) -> float:
        rate = self._training.rate_at(step, self._training.epochs * self._steps)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        return rate

    def _step(self, batch: Any, number: int, generator: torch.Generator) -> Tensor:
        given = numbered_inputs(batch, self._model, number, "training")
        inputs = given.map(lambda tensor: _moved(tensor.detach(), self._device))
        inputs = varied(inputs, self._training.augment, generator)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._training.precision == "bfloat16"):
            scores = scores_in(call_checked(self._model, inputs, number, "training"))
            target = self._answers(inputs, number)
        loss = self._loss(scores, target, batch, number)
        if not loss.requires_grad:
            raise TrainingError("what the model returns does not depend on any parameter that trains. Unfreeze some.")
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self._optimiser.step()
        return loss.detach()

    def _answers(self, inputs: Inputs, number: int) -> Tensor | None:
        if self._teacher is None:
            return None
        with torch.no_grad():
            return scores_in(call_checked(self._teacher, inputs, number, "training"))

    def _loss(self, scores: Tensor, target: Tensor | None, batch: Any, number: int) -> Tensor:
        parts = []
        if self._training.needs_labels:
            parts.append(on_labels(scores, self._labels(batch, scores, number), self._training.smoothing))
        if target is not None:
            parts.append(on_teacher(scores, target, self._training.temperature))
        return torch.stack(parts).mean()

    def _labels(self, batch: Any, scores: Tensor, number: int) -> Tensor:
        if scores.dim() > 2 and self._training.augment != "none":
            raise UsageError(
                f"augment={self._training.augment!r} moves images, but not labels of their positions, and the model "
                f"returns scores of shape {tuple(scores.shape)}. Say augment='none', or loss='distillation', which "
                "needs no labels."
            )
        labels = require_labels_fit(labels_of(batch, self._model, number), scores, number)
        # On a GPU in the first epoch only, for it has to wait.
        if labels.device.type == "cpu" or not self._are_labels_known:
            require_known_classes(labels, scores.shape[1], number)
        return _moved(labels, self._device)

    def _require_finite(self, total: Tensor, epoch: int, number: int) -> None:
        if not bool(total.isfinite()):
            raise TrainingError(
                f"the loss is NaN or infinite in epoch {epoch + 1}, by step {number}. Lower the rate, or look for "
                "inputs that are not finite; a checkpoint is still that of the epoch before."
            )

    def _require_finite_model(self, epoch: int) -> None:
        """The last step of an epoch may spoil weights, which no loss has seen yet."""
        spoilt = sorted(self._finite - finite_names(self._model))
        if spoilt:
            raise TrainingError(
                f"{spoilt[0]} holds NaN or infinite values after epoch {epoch + 1}. Lower the rate, or look for inputs "
                "that are not finite; a checkpoint is still that of the epoch before."
            )


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; nobody waits for what goes to a GPU, but the CPU would read before all has come."""
    return tensor.to(device, non_blocking=device.type != "cpu")


@dataclass(frozen=True, slots=True, eq=False)
class _Keeper:
    """Writes checkpoints of a run, and reads the one that is there."""

    path: Path
    run: Run
    model: nn.Module
    optimiser: Optimizer

    def resumed(self, validation: Iterable[Any] | None) -> tuple[Epoch, ...]:
        """The epochs behind us; the last one is measured if the run was stopped before it was."""
        if not self.path.exists():
            return ()
        history = restore_checkpoint(self.path, self.run, self.model, self.optimiser)
        if not history or history[-1].accuracy is not None or validation is None:
            return history
        history = (*history[:-1], measured(history[-1], self.model, validation))
        self.keep(history)
        return history

    def keep(self, history: tuple[Epoch, ...]) -> None:
        """Replace the checkpoint."""
        write_checkpoint(self.path, self.run, self.model, self.optimiser, history)


def _keeper(
    path: Path | None,
    model: nn.Module,
    teacher: nn.Module | None,
    optimiser: Optimizer,
    training: Training,
    batches: Iterable[Any],
    steps: int,
) -> _Keeper | None:
    """Who keeps checkpoints of a run that is about to begin; nobody without a path."""
    if path is None:
        return None
    require_storable(model)
    _seeded(training.seed, 0, device_of(model))  # what shuffles begins with the same batch, if it can
    traces = traces_of(batches, model, needs_labels=training.needs_labels)
    return _Keeper(path, run_of(model, teacher, training, steps, traces), model, optimiser)


def _kept(
    keeper: _Keeper | None, model: nn.Module, history: tuple[Epoch, ...], validation: Iterable[Any] | None
) -> tuple[Epoch, ...]:
    """The history with the accuracy of its last epoch, which is kept before it is measured and again afterwards."""
    if keeper is not None:
        keeper.keep(history)
    if validation is None:
        return history
    history = (*history[:-1], measured(history[-1], model, validation))
    if keeper is not None:
        keeper.keep(history)
    return history


def _check(training: Training, teacher: object, validation: Iterable[Any] | None, progress: Progress) -> None:
    require_kind("training", training, Training, "a recoup.Training, such as recoup.Training(epochs=10)")
    require_progress(progress)
    if validation is not None:
        require_repeatable(validation, "validation")
    if teacher is not None:
        require_kind("teacher", teacher, nn.Module, "a torch.nn.Module")
    if training.needs_teacher and teacher is None:
        raise UsageError(f"loss={training.loss!r} learns from a teacher. Pass teacher=, the original for example.")
    if teacher is not None and not training.needs_teacher:
        raise UsageError("a teacher is given, and loss='labels' does not ask it. Say loss='distillation' or 'both'.")


def _require_readable_again(batches: Iterable[Any]) -> None:
    if isinstance(batches, Iterator):
        raise CalibrationError(
            "batches is an iterator that can be read only once, and every epoch reads it again. Pass a list, a "
            "DataLoader, or an object whose __iter__ begins anew."
        )


def _number_of(batches: Iterable[Any]) -> int:
    """Batches in an epoch; where nobody knows, they are counted."""
    known = length_of(batches)
    return sum(1 for _ in Stream(batches, "training")) if known is None else max(1, known)


def _place(checkpoint: str | Path | None, *, resume: bool) -> Path | None:
    if checkpoint is None:
        if resume:
            raise UsageError("resume=True goes on from a checkpoint. Pass checkpoint=, the file that was written.")
        return None
    require_kind("checkpoint", checkpoint, (str, Path), "the path of a file")
    path = Path(checkpoint)
    mode = _mode_of(path)
    if mode is not None and stat.S_ISDIR(mode):
        raise ArtefactError(f"the checkpoint {path} is a folder. Give the path of a file.")
    if mode is not None and not resume:
        raise ArtefactError(f"the checkpoint {path} exists already. Go on from it with resume=True, or remove it.")
    return path


def _mode_of(path: Path) -> int | None:
    """What kind of file is at a path; None for nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ArtefactError(
            f"the checkpoint {str(path)!r} cannot be reached ({told(error)}). Give the path of a file."
        ) from error


def _seeded(seed: int, epoch: int, device: torch.device) -> torch.Generator:
    """A generator for images; those of torch, numpy and Python, which loaders and dropout use, are seeded alike.

    Every epoch begins with numbers of its own, so that one that is resumed draws what it would have drawn.
    """
    drawn = int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:4], "big")
    random.seed(drawn)
    np.random.seed(drawn)
    torch.manual_seed(drawn)
    return torch.Generator(device).manual_seed(drawn)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Convolutions on a GPU by algorithms that give the same every time."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
