"""`recoup finetune`: train a saved result for some epochs and save it into a new folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from torch import nn

from recoup.artefact.again import SavedResult, read_result
from recoup.artefact.files import PAGE
from recoup.artefact.writing import require_new
from recoup.cli.data import open_data, reshuffled
from recoup.cli.display import note, print_json, print_table, shown_progress
from recoup.cli.failure import reports_failures
from recoup.cli.input_spec import InputSpec
from recoup.cli.network import Network, is_untrained
from recoup.cli.options import (
    NAMES,
    batch_size_option,
    combined,
    common_options,
    folder_option,
    normalise_option,
    number_of_images,
    shape_option,
)
from recoup.cli.saved import open_saved, trusted_source
from recoup.errors import ArtefactError, UsageError
from recoup.progress import Progress
from recoup.training.loop import finetune
from recoup.training.record import Finetuned
from recoup.training.settings import Training

# Options that are fields of `Training`, besides the seed.
FIELDS = (
    "epochs", "optimiser", "rate", "momentum", "decay", "warm_up", "smoothing", "loss", "temperature", "precision",
    "augment",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FinetuneRequest:
    """Everything `recoup finetune` was told; None where nothing was said."""

    folder: str
    data: str
    model: str | None
    teacher_weights: str | None
    validation: str | None
    limit: int | None
    batch_size: int
    fields: Mapping[str, Any]
    resume: bool
    shape: str | None
    normalise: str | None
    output: Path
    device: str
    seed: int

    @property
    def checkpoint(self) -> Path:
        """A file beside the new folder, until that is there."""
        return self.output.with_name(f"{self.output.name}.checkpoint.safetensors")

    def training(self) -> Training:
        """How to train, with the fields that were set."""
        return Training(**self.fields, seed=self.seed)

    def network(self, spec: str, weights: str | None = None) -> Network:
        """How to open a network."""
        return Network(spec, weights, self.shape, self.normalise, self.device, self.seed)


training_options = combined(
    click.option("--epochs", metavar="N", type=int, help="How often the data is read; 10 if not said."),
    click.option("--optimiser", metavar="NAME", help="sgd or adamw."),
    click.option("--rate", metavar="R", type=float, help="Highest learning rate: 0.01 for sgd, 0.001 for adamw."),
    click.option("--momentum", metavar="M", type=float, help="Of the gradient."),
    click.option("--decay", metavar="D", type=float, help="Weight decay, of matrices and kernels."),
    click.option("--warm-up", metavar="F", type=float, help="Share of the steps over which the rate rises."),
    click.option("--smoothing", metavar="F", type=float, help="Share of a label that is spread over all classes."),
    click.option("--loss", metavar="NAME", help="labels, distillation or both."),
    click.option("--temperature", metavar="T", type=float, help="Of distillation."),
    click.option("--precision", metavar="NAME", help="float32 or bfloat16."),
    click.option("--augment", metavar="NAME", help="none, flip, or crop: shift by 1/8 and flip."),
)


@click.command("finetune", epilog=NAMES)
@click.argument("folder", metavar="DIR")
@click.option("--data", metavar="DATA", required=True, help="Inputs to train on; labels unless --loss distillation.")
@click.option("--model", metavar="MODEL", help="The original of the saved result, where the folder does not say.")
@click.option("--teacher-weights", metavar="FILE", help="Trained weights of the original, to learn from.")
@click.option("--validation", metavar="DATA", help="Labelled inputs to measure on after every epoch; decides nothing.")
@training_options
@number_of_images("--limit", "At most N images, drawn at random.")
@batch_size_option
@click.option("--resume", is_flag=True, help="Go on where a run to the same folder was stopped.")
@shape_option
@normalise_option
@folder_option(required=True, help="New folder for the trained result.")
@common_options
@reports_failures
def finetune_command(as_json: bool, **given: Any) -> None:
    """Train a result that `recoup prune` saved in DIR, and save it into a new folder.

    After every epoch a checkpoint is written beside the new folder, for --resume; it goes when the folder is there.
    """
    fields = {name: given.pop(name) for name in FIELDS}
    request = FinetuneRequest(**given, fields={name: value for name, value in fields.items() if value is not None})
    training = request.training()
    with shown_progress() as progress:
        finetuned = _finetune(request, training, progress)
    if as_json:
        history = [dataclasses.asdict(epoch) for epoch in finetuned.history]
        print_json({"folder": str(request.output), "training": dataclasses.asdict(training), "history": history})
    else:
        _print(finetuned)
    note(f"saved: {request.output}, report: {request.output / PAGE}")


def _finetune(request: FinetuneRequest, training: Training, progress: Progress) -> Finetuned:
    """Everything that can be refused is refused before the work begins."""
    require_new(request.output)
    if request.checkpoint.exists() and not request.resume:
        raise ArtefactError(
            f"{request.checkpoint} is there from a run that was stopped. Go on from it with --resume, or remove it."
        )
    saved = read_result(request.folder)
    teacher = _teacher(request, training)
    opened = open_saved(request.folder, request.model, request.network(""))
    validation = None
    if request.validation is not None:
        validation = _open(request.validation, opened.input, request, None)
        if not validation.labelled:
            raise UsageError(f"--validation {request.validation} has no labels, so accuracy cannot be measured.")
    data = _open(request.data, opened.input, request, request.limit)
    if training.needs_labels and not data.labelled:
        raise UsageError(f"--data {request.data} has no labels. Give labelled data, or say --loss distillation.")
    finetuned = finetune(
        opened.model,
        reshuffled(data),
        training,
        teacher=teacher,
        validation=validation,
        checkpoint=request.checkpoint,
        resume=request.resume,
        progress=progress,
    )
    return _save(saved, request, finetuned)


def _save(saved: SavedResult, request: FinetuneRequest, finetuned: Finetuned) -> Finetuned:
    saved.save_finetuned(request.output, finetuned)
    request.checkpoint.unlink(missing_ok=True)
    return finetuned


def _open(spec: str, expected: InputSpec, request: FinetuneRequest, limit: int | None) -> Any:
    return open_data(spec, expected, batch_size=request.batch_size, limit=limit, seed=request.seed)


def _teacher(request: FinetuneRequest, training: Training) -> nn.Module | None:
    """The original with its trained weights, where the loss asks for it."""
    if not training.needs_teacher:
        if request.teacher_weights is not None:
            raise UsageError("--teacher-weights are given, and --loss labels does not ask for a teacher.")
        return None
    spec = request.model or trusted_source(request.folder)
    if spec is None:
        raise UsageError(f"{request.folder} does not say which model it was made from. Name the teacher with --model.")
    if is_untrained(spec, request.teacher_weights):
        raise UsageError(f"{spec} as a teacher has fresh weights. Give its trained ones with --teacher-weights.")
    return request.network(spec, request.teacher_weights).open().model


def _print(finetuned: Finetuned) -> None:
    rows = [
        (
            str(number),
            f"{epoch.loss:.4f}",
            f"{epoch.rate:.2e}",
            f"{epoch.seconds:.1f}",
            "-" if epoch.accuracy is None else f"{epoch.accuracy:.2f}",
        )
        for number, epoch in enumerate(finetuned.history, start=1)
    ]
    print_table(("Epoch", "Loss", "Rate", "Seconds", "Accuracy"), rows, numbers=(1, 2, 3, 4))
