"""`recoup prune`: a smaller network from a trained one, saved into a new folder."""

from __future__ import annotations

import dataclasses
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from recoup._prune import Result, prune
from recoup.algebra.selection import SELECTORS
from recoup.artefact.files import PAGE
from recoup.artefact.writing import require_new
from recoup.cli.data import Data, open_data
from recoup.cli.display import note, print_costs, print_json, print_widths, shown_progress, warn_of_fresh_weights
from recoup.cli.failure import reports_failures
from recoup.cli.models import OpenModel
from recoup.cli.network import Network, is_untrained
from recoup.cli.options import (
    NAMES,
    batch_size_option,
    choice_options,
    combined,
    common_options,
    folder_option,
    normalise_option,
    number_of_images,
    shape_option,
    weights_option,
)
from recoup.config import Budget, Method
from recoup.errors import RecoupWarning, UsageError
from recoup.methods.registry import find_method
from recoup.progress import Progress
from recoup.report.content import Report

GOALS = ("tolerance", "macs", "parameters", "width", "latency")
NAMED = "--tolerance, --macs, --parameters, --width and --latency"
# Options that are fields of a method; which method has which, the method itself says.
FIELDS = (
    "selector", "ridge", "positions", "multiple_of", "confidence", "outputs", "refine", "weighting", "recovery",
    "steps", "constraint", "order", "unit", "classifier",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PruneRequest:
    """Everything `recoup prune` was told; None where nothing was said."""

    model: str
    weights: str | None
    calibration: str
    validation: str | None
    tolerance: float | None
    macs: float | None
    parameters: float | None
    width: float | None
    latency: float | None
    widths: tuple[tuple[str, int], ...]
    min_width: int
    only: tuple[str, ...]
    exclude: tuple[str, ...]
    method: str
    fields: Mapping[str, Any]
    keep_class: bool | None
    keep_config: bool
    calibration_images: int | None
    validation_images: int | None
    batch_size: int
    shape: str | None
    normalise: str | None
    output: Path
    device: str
    seed: int

    def budget(self) -> Budget | None:
        """The budget, or None for a tolerance or widths by hand; refuses more than one goal."""
        given = [name for name in GOALS if getattr(self, name) is not None]
        if len(given) > 1 or not (given or self.widths):
            listed = ", ".join(f"--{name}" for name in given) or "none"
            raise UsageError(f"give exactly one of {NAMED}, or --widths alone; got {listed}.")
        if self.tolerance is None:
            return Budget(self.macs, self.parameters, self.width, self.latency) if given else None
        if not self.tolerance > 0:
            raise UsageError(
                f"--tolerance must be above 0 points, got {self.tolerance:g}. For a fixed size or speed give "
                "--macs, --parameters, --width or --latency, the share to keep."
            )
        return None

    def chosen_method(self) -> Method:
        """The method with the fields that were set; refuses a field that it does not have."""
        kind = type(find_method(self.method))
        has = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # every method is a dataclass
        for name in self.fields:
            if name not in has:
                options = ", ".join(f"--{field.replace('_', '-')}" for field in has)
                raise UsageError(
                    f"--{name.replace('_', '-')} is no option of the method {self.method!r}, which has {options}. "
                    "Choose another --method, or leave it out."
                )
        return kind(**self.fields, seed=self.seed)  # type: ignore[call-arg]  # every method has a seed

    def network(self) -> Network:
        """How to open the network."""
        return Network(self.model, self.weights, self.shape, self.normalise, self.device, self.seed)


def _named_widths(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """`layer1.0.conv1=48` as a name and a number."""
    return tuple(_named_width(text) for text in given)


def _named_width(text: str) -> tuple[str, int]:
    name, _, width = text.rpartition("=")
    if not name or not width.isdecimal():
        raise click.BadParameter(f"{text!r} is no width by hand. Write a group and its channels, as layer1.conv1=48.")
    return name, int(width)


def _multiple(_: click.Context, __: click.Parameter, given: str | None) -> int | str | None:
    """A whole number, or the word `device`."""
    if given is None or given == "device":
        return given
    if not given.isdecimal():
        raise click.BadParameter(f"{given!r} is neither a whole number nor 'device'.")
    return int(given)


goal_options = combined(
    click.option("--tolerance", metavar="P", type=float, help="Lose at most P points of accuracy, or"),
    click.option("--macs", metavar="F", type=float, help="keep the share F of the multiply-accumulates, or"),
    click.option("--parameters", metavar="F", type=float, help="keep the share F of the parameters, or"),
    click.option("--width", metavar="F", type=float, help="keep the share F of every group's channels, or"),
    click.option("--latency", metavar="F", type=float, help="keep the share F of the time of a batch on the device."),
)

width_options = combined(
    click.option(
        "--widths",
        metavar="NAME=N",
        multiple=True,
        callback=_named_widths,
        help="Keep N channels of a group; repeatable.",
    ),
    click.option("--min-width", metavar="N", type=click.IntRange(min=1), default=1, help="Fewest channels of a group."),
)

method_options = combined(
    click.option("--method", default="best", show_default=True, metavar="NAME", help="best, fast, paper or released."),
    click.option("--selector", metavar="NAME", help=f"Ranks channels: {', '.join(SELECTORS)}."),
    click.option("--ridge", metavar="R", type=float, help="Added to a covariance, relative to its mean diagonal."),
    click.option("--positions", metavar="N", type=int, help="Output positions per image in the statistics."),
    click.option("--multiple-of", metavar="N", callback=_multiple, help="Multiples of N, such as 8, or 'device'."),
    click.option(
        "--confidence", metavar="C", type=float, help="best, fast: that the tolerance holds on unseen images."
    ),
    click.option("--outputs", metavar="NAME", help="best, fast: what the model returns, classes or values."),
    click.option("--refine", metavar="S", type=float, help="best, fast: seconds of gradient steps, no labels."),
    click.option("--weighting", metavar="NAME", help="paper: slope, outputs or none."),
    click.option("--recovery", metavar="NAME", help="paper: none, mean-shift, batch-norm, one-pass, rescale."),
    click.option("--order", metavar="NAME", help="paper, released: bottom-up, top-down, random."),
    click.option("--constraint", metavar="NAME", help="paper, released: step or global."),
    click.option("--unit", metavar="NAME", help="paper, released: block or layer."),
    click.option("--steps", metavar="K", type=int, help="paper, released: bisections per unit."),
    click.option("--classifier", is_flag=True, default=None, help="paper, released: prune the classifier too."),
)

data_options = combined(
    click.option("--calibration", metavar="DATA", required=True, help="Inputs to learn from; labels are not needed."),
    click.option("--validation", metavar="DATA", help="Inputs to measure on: accuracy, or without labels agreement."),
    number_of_images("--calibration-images", "At most N images, drawn at random."),
    number_of_images("--validation-images", "At most N images, drawn at random."),
    batch_size_option,
)


@click.command("prune", epilog=NAMES)
@click.argument("model")
@weights_option
@data_options
@goal_options
@choice_options
@width_options
@method_options
@shape_option
@normalise_option
@folder_option(required=True, help="New folder for plan, weights and report.")
@common_options
@reports_failures
def prune_command(as_json: bool, **given: Any) -> None:
    """Make MODEL smaller without retraining and save the result into a new folder.

    Give exactly one goal: --tolerance, --macs, --parameters, --width or --latency. With --widths, none is needed.
    """
    fields = {name: given.pop(name) for name in FIELDS}
    request = PruneRequest(**given, fields={name: value for name, value in fields.items() if value is not None})
    with shown_progress() as progress, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecoupWarning)  # noted below, when the progress bar is gone
        report = _prune(request, progress)
    for text in dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, RecoupWarning)):
        note(f"warning: {text}")
    if report.form is not None:
        note(f"the result is a standalone graph: {report.form}")
    if report.held_by_class is not None:
        note(report.held_by_class)
    if as_json:
        print_json({"folder": str(request.output), "model": request.model, "report": report.to_json()})
    else:
        _print(report)
    _tell_how_to_go_on(request)


def _prune(request: PruneRequest, progress: Progress) -> Report:
    """Everything that can be refused is refused before the work begins."""
    require_new(request.output)
    budget, method = request.budget(), request.chosen_method()
    opened = request.network().open()
    calibration = _open(request.calibration, opened, request, request.calibration_images)
    validation = _open_validation(opened, request)
    if is_untrained(request.model, request.weights):
        warn_of_fresh_weights(request.model)
    result = prune(
        opened.model,
        calibration,
        validation=validation,
        tolerance=request.tolerance,
        budget=budget,
        widths=dict(request.widths),
        min_width=request.min_width,
        only=request.only,
        exclude=request.exclude,
        method=method,
        keep_class=request.keep_class,
        keep_config=request.keep_config,
        progress=progress,
    )
    return _save(result, request)


def _open(spec: str, opened: OpenModel, request: PruneRequest, limit: int | None) -> Data:
    return open_data(spec, opened.input, batch_size=request.batch_size, limit=limit, seed=request.seed)


def _open_validation(opened: OpenModel, request: PruneRequest) -> Data | None:
    if request.validation is None:
        return None
    return _open(request.validation, opened, request, request.validation_images)


def _save(result: Result, request: PruneRequest) -> Report:
    result.save(request.output, source=request.model)
    return result.report


def _print(report: Report) -> None:
    score, scores = report.score, {}
    if score is not None:
        scores[score.what.capitalize()] = (score.before, score.after)
        if score.top5_before is not None and score.top5_after is not None:
            scores["Top-5 accuracy"] = (score.top5_before, score.top5_after)
    print_costs(report, scores)
    print_widths(report)


def _tell_how_to_go_on(request: PruneRequest) -> None:
    said = (("--input", request.shape), ("--normalise", request.normalise))
    extra = [word for name, value in said if value is not None for word in (name, value)]
    if not is_untrained(request.model, None):  # a factory of the user's own, which a folder alone does not get to run
        extra = ["--model", request.model, *extra]
    data = request.validation or "DATA"
    command = shlex.join(["recoup", "evaluate", str(request.output), "--data", data, *extra])
    note(f"saved: {request.output}, report: {request.output / PAGE}")
    note(f"measure it:  {command}")
    note(f'use it:      smaller = recoup.load("{request.output}", original)   # the network as it was built')
