"""`recoup evaluate`: accuracy and cost of a saved result or of any model."""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from recoup._prune import inspect
from recoup.artefact.reading import is_standalone, load, read_source, sample_shape
from recoup.cli.data import Data, open_data
from recoup.cli.display import print_json, print_table, warn_of_fresh_weights
from recoup.cli.failure import reports_failures
from recoup.cli.input_spec import IMAGENET, InputSpec
from recoup.cli.models import OpenModel
from recoup.cli.network import Network, choose_input, find_device, is_untrained, parse_shape
from recoup.cli.options import (
    NAMES,
    batch_size_option,
    common_options,
    normalise_option,
    number_of_images,
    shape_option,
    weights_option,
)
from recoup.errors import UsageError
from recoup.inputs.batches import device_of
from recoup.judge.accuracy import accuracies

# Names in these libraries, which build their models without running anything of a folder's.
_OF_A_LIBRARY = re.compile(r"(recoup|torchvision|timm):[A-Za-z0-9_.\-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """Everything `recoup evaluate` was told; None where nothing was said."""

    target: str
    data: str
    weights: str | None
    model: str | None
    limit: int | None
    batch_size: int
    shape: str | None
    normalise: str | None
    device: str
    seed: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured, and on how many images."""

    target: str
    data: str
    images: int
    accuracy: float
    macs: int
    parameters: int
    top5: float | None
    flops: int


@click.command("evaluate", epilog=NAMES)
@click.argument("target", metavar="FOLDER_OR_MODEL")
@click.option("--data", metavar="DATA", required=True, help="Labelled inputs.")
@weights_option
@click.option("--model", metavar="MODEL", help="The original of a saved result, where the folder does not say.")
@shape_option
@normalise_option
@number_of_images("--limit", "At most N images, drawn at random.")
@batch_size_option
@common_options
@reports_failures
def evaluate_command(as_json: bool, **given: Any) -> None:
    """Print accuracy, MACs and parameters of a folder that `recoup prune` saved, or of a model."""
    evaluation = _evaluate(EvaluateRequest(**given))
    if as_json:
        print_json(dataclasses.asdict(evaluation))
    else:
        _print(evaluation)


def _evaluate(request: EvaluateRequest) -> Evaluation:
    opened = _open_saved(request) if Path(request.target).is_dir() else _open_model(request)
    data = _open_data(request, opened.input)
    if is_untrained(request.target, request.weights):
        warn_of_fresh_weights(request.target)
    cost = inspect(opened.model, next(iter(data))).cost
    points, top5 = accuracies(opened.model, data)
    return Evaluation(request.target, request.data, data.count, points, cost.macs, cost.parameters, top5, cost.flops)


def _open_saved(request: EvaluateRequest) -> OpenModel:
    if request.weights is not None:
        raise UsageError(f"{request.target} holds its own weights. Leave --weights out.")
    spec = request.model or _trusted_source(request.target)
    if spec is None:
        return _open_graph(request)
    opened = _network(spec, request).open()
    smaller = load(request.target, opened.model).to(device_of(opened.model))
    return dataclasses.replace(opened, model=smaller.eval())


def _trusted_source(folder: str) -> str | None:
    """The original that a folder names, if building it runs no code but that of the libraries; None if none is needed.

    A folder may come from a stranger, and to build `path/file.py:factory` is to run whatever that file holds.
    """
    source = read_source(folder)
    if source is not None and _OF_A_LIBRARY.fullmatch(source):
        return source
    if is_standalone(folder):
        return None
    if source is None:
        raise UsageError(f"{folder} does not say which model it was made from. Name it with --model.")
    raise UsageError(
        f"{folder} says that it was made from {source!r}, which is code of somebody's own and is not imported unasked. "
        f"If you trust it, pass --model {shlex.quote(source)}."
    )


def _open_graph(request: EvaluateRequest) -> OpenModel:
    """A standalone result by itself: its input has the shape of the samples stored with it, unless one was given."""
    device, shape = find_device(request.device), parse_shape(request.shape) or sample_shape(request.target)
    torch.manual_seed(request.seed)
    model = load(request.target).to(device).eval()
    return OpenModel(model, choose_input(IMAGENET, shape, request.normalise), request.target)


def _open_model(request: EvaluateRequest) -> OpenModel:
    if request.model is not None:
        raise UsageError(
            f"--model names the original of a saved result, but {request.target} is no folder. Check the path, or "
            "leave --model out to evaluate a model."
        )
    return _network(request.target, request).open()


def _network(spec: str, request: EvaluateRequest) -> Network:
    return Network(spec, request.weights, request.shape, request.normalise, request.device, request.seed)


def _open_data(request: EvaluateRequest, expected: InputSpec) -> Data:
    data = open_data(request.data, expected, batch_size=request.batch_size, limit=request.limit, seed=request.seed)
    if not data.labelled:
        raise UsageError(f"--data {request.data} has no labels, so accuracy cannot be measured. Give labelled data.")
    return data


def _print(evaluation: Evaluation) -> None:
    rows = (
        ("Accuracy", f"{evaluation.accuracy:.2f}"),
        *([] if evaluation.top5 is None else [("Top-5 accuracy", f"{evaluation.top5:.2f}")]),
        ("Images", f"{evaluation.images:,}"),
        ("MACs", f"{evaluation.macs:,}"),
        ("FLOPs", f"{evaluation.flops:,}"),
        ("Parameters", f"{evaluation.parameters:,}"),
    )
    print_table((evaluation.target, ""), rows, numbers=(1,))
