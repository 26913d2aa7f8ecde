"""`recoup prune`: a smaller network from a trained one, saved into a new folder."""

from __future__ import annotations

import dataclasses
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from recoup.artefact import PAGE, require_new
from recoup.cli.display import note, print_costs, print_json, print_widths, shown_progress, warn_of_fresh_weights
from recoup.cli.failure import reports_failures
from recoup.cli.opening import Network, is_untrained
from recoup.cli.options import (
    NAMES,
    batch_size_option,
    combined,
    common_options,
    folder_option,
    normalise_option,
    number_of_images,
    shape_option,
    weights_option,
)
from recoup.data import Data, open_data
from recoup.errors import UsageError
from recoup.models import OpenModel
from recoup.progress import Progress
from recoup.prune import Result, prune
from recoup.report.content import Report
from recoup.settings import Budget, Settings, find_preset

GOALS = ("tolerance", "macs", "parameters", "width", "latency")
NAMED = "--tolerance, --macs, --parameters, --width and --latency"
SETTINGS = (
    "selector",
    "ridge",
    "order",
    "constraint",
    "unit",
    "steps",
    "positions",
    "confidence",
    "outputs",
    "multiple_of",
    "seed",
)


@dataclass(frozen=True, slots=True)
class Request:
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
    preset: str
    selector: str | None
    ridge: float | None
    order: str | None
    constraint: str | None
    unit: str | None
    steps: int | None
    positions: int | None
    confidence: float | None
    outputs: str | None
    refine: float
    multiple_of: int | None
    keep_class: bool
    calibration_images: int | None
    validation_images: int | None
    batch_size: int
    shape: str | None
    normalise: str | None
    output: Path
    device: str
    seed: int

    def budget(self) -> Budget | None:
        """The budget, or None for a tolerance; refuses anything but exactly one goal."""
        given = [name for name in GOALS if getattr(self, name) is not None]
        if len(given) != 1:
            listed = ", ".join(f"--{name}" for name in given) or "none"
            raise UsageError(f"give exactly one of {NAMED}; got {listed}.")
        if self.tolerance is None:
            return Budget(self.macs, self.parameters, self.width, self.latency)
        if not self.tolerance > 0:
            raise UsageError(
                f"--tolerance must be above 0 points, got {self.tolerance:g}. For a fixed size or speed give "
                "--macs, --parameters, --width or --latency, the share to keep."
            )
        return None

    def settings(self) -> Settings:
        """The preset with what was set beside it."""
        said: dict[str, Any] = {name: getattr(self, name) for name in SETTINGS if getattr(self, name) is not None}
        return dataclasses.replace(find_preset(self.preset), **said)

    def network(self) -> Network:
        """How to open the network."""
        return Network(self.model, self.weights, self.shape, self.normalise, self.device, self.seed)


goal_options = combined(
    click.option("--tolerance", metavar="P", type=float, help="Lose at most P points of accuracy, or"),
    click.option("--macs", metavar="F", type=float, help="keep the share F of the multiply-accumulates, or"),
    click.option("--parameters", metavar="F", type=float, help="keep the share F of the parameters, or"),
    click.option("--width", metavar="F", type=float, help="keep the share F of every group's channels, or"),
    click.option("--latency", metavar="F", type=float, help="keep the share F of the time of a batch on the device."),
)

setting_options = combined(
    click.option(
        "--preset", default="best", show_default=True, metavar="NAME", help="Settings: best, fast, paper, released."
    ),
    click.option("--selector", metavar="NAME", help="Ranks channels: forward, backward, l2, random."),
    click.option("--ridge", metavar="R", type=float, help="Added to a covariance, relative to its mean diagonal."),
    click.option("--order", metavar="NAME", help="Of the search: bottom-up, top-down, random."),
    click.option("--constraint", metavar="NAME", help="Of the search: step or global."),
    click.option("--unit", metavar="NAME", help="Of the search: layer or block."),
    click.option("--steps", metavar="K", type=int, help="Bisections per unit of the search."),
    click.option("--positions", metavar="N", type=int, help="Output positions per image that are looked at."),
    click.option(
        "--confidence", metavar="C", type=float, help="That the tolerance holds on other images, such as 0.95."
    ),
    click.option("--outputs", metavar="NAME", help="What the model returns: classes or values."),
    click.option(
        "--refine", metavar="S", type=float, default=0.0, help="Seconds of gradient steps at the end, no labels."
    ),
    click.option("--multiple-of", metavar="N", type=int, help="Keep widths to multiples of N, such as 8."),
    click.option("--keep-class", is_flag=True, help="Lock what the model's class cannot hold; no standalone graph."),
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
@setting_options
@shape_option
@normalise_option
@folder_option(required=True, help="New folder for plan, weights and report.")
@common_options
@reports_failures
def prune_command(as_json: bool, **given: Any) -> None:
    """Make MODEL smaller without retraining and save the result into a new folder.

    Give exactly one goal: --tolerance, --macs, --parameters, --width or --latency.
    """
    request = Request(**given)
    with shown_progress() as progress, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)  # noted below, when the progress bar is gone
        report = _prune(request, progress)
    for text in dict.fromkeys(str(w.message) for w in caught if w.category is UserWarning and w.filename == __file__):
        note(f"warning: {text}")
    if report.form is not None:
        note(f"the result is a standalone graph: {report.form}")
    if as_json:
        print_json({"folder": str(request.output), "model": request.model, "report": report.to_json()})
    else:
        _print(report)
    _tell_how_to_go_on(request)


def _prune(request: Request, progress: Progress) -> Report:
    """Everything that can be refused is refused before the work begins."""
    require_new(request.output)
    budget, settings = request.budget(), request.settings()
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
        preset=settings,
        refine=request.refine,
        keep_class=request.keep_class,
        progress=progress,
    )
    return _save(result, request)


def _open(spec: str, opened: OpenModel, request: Request, limit: int | None) -> Data:
    return open_data(spec, opened.input, batch_size=request.batch_size, limit=limit, seed=request.seed)


def _open_validation(opened: OpenModel, request: Request) -> Data | None:
    if request.validation is None:
        return None
    return _open(request.validation, opened, request, request.validation_images)


def _save(result: Result, request: Request) -> Report:
    result.save(request.output, source=request.model)
    return result.report


def _print(report: Report) -> None:
    scores = {} if report.score is None else {report.score.what.capitalize(): (report.score.before, report.score.after)}
    print_costs(report, scores)
    print_widths(report.groups)


def _tell_how_to_go_on(request: Request) -> None:
    said = (("--input", request.shape), ("--normalise", request.normalise))
    extra = [word for name, value in said if value is not None for word in (name, value)]
    data = request.validation or "DATA"
    command = shlex.join(["recoup", "evaluate", str(request.output), "--data", data, *extra])
    note(f"saved: {request.output}, report: {request.output / PAGE}")
    note(f"measure it:  {command}")
    note(f'use it:      smaller = recoup.load("{request.output}", original)   # the network as it was built')
