"""`recoup evaluate`: accuracy and cost of a saved result or of any model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from recoup._prune import inspect
from recoup.cli.data import Data, open_data
from recoup.cli.display import print_json, print_table, warn_of_fresh_weights
from recoup.cli.failure import reports_failures
from recoup.cli.input_spec import InputSpec
from recoup.cli.models import OpenModel
from recoup.cli.network import Network, is_untrained
from recoup.cli.options import (
    NAMES,
    batch_size_option,
    common_options,
    normalise_option,
    number_of_images,
    shape_option,
    weights_option,
)
from recoup.cli.saved import open_saved
from recoup.errors import UsageError
from recoup.judge.accuracy import accuracies


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
    """What was measured, and on how many images; `top5` is None with ten classes or fewer."""

    target: str
    data: str
    images: int
    accuracy: float
    top5: float | None
    macs: int
    flops: int
    parameters: int


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
    """Print accuracy, MACs, FLOPs and parameters of a folder that `recoup prune` saved, or of a model."""
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
    return Evaluation(*(request.target, request.data, data.count, points, top5), cost.macs, cost.flops, cost.parameters)


def _open_saved(request: EvaluateRequest) -> OpenModel:
    if request.weights is not None:
        raise UsageError(f"{request.target} holds its own weights. Leave --weights out.")
    return open_saved(request.target, request.model, _network("", request))


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
