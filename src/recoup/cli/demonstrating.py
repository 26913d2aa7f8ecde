"""`recoup demo`: the whole method on handwritten digits, in less than two minutes and without a download."""

from __future__ import annotations

from pathlib import Path

import click

from recoup.artefact import PAGE
from recoup.cli.display import note, print_costs, print_json, print_widths, shown_progress
from recoup.cli.failure import reports_failures
from recoup.cli.opening import find_device
from recoup.cli.options import common_options, folder_option
from recoup.demo import FOLDER, INPUT, DemoResult, free_folder, run_demo

GO_ON = """
With a network of your own:
  recoup inspect my_file.py:build --input 3,32,32
  recoup prune my_file.py:build --weights trained.pt --input 3,32,32 --calibration folder:images \\
      --validation folder:labelled --tolerance 1.0 -o smaller

In Python:
  import recoup
  result = recoup.prune(model, calibration_batches, validation=labelled_batches, tolerance=1.0)
  result.save("smaller")"""


@click.command("demo")
@folder_option(required=False, help=f"New folder for the result. [default: {FOLDER}, or {FOLDER}-2, ...]")
@common_options
@reports_failures
def demo_command(output: Path | None, device: str, seed: int, as_json: bool) -> None:
    """Train a small network on handwritten digits, prune it and measure both on held-out images."""
    place = find_device(device)
    with shown_progress() as progress:
        result = run_demo(output or free_folder(), progress, device=place, seed=seed)
    if as_json:
        print_json(result.to_json())
        return
    _print(result)
    note(GO_ON)


def _print(result: DemoResult) -> None:
    print_costs(result.report, {"Accuracy on held-out digits": (result.before, result.after)})
    print_widths(result.report.groups)
    click.echo(f"{result.seconds:.0f} seconds. Report: {result.folder / PAGE}")
    shape = ",".join(map(str, INPUT.shape))
    note(f"Measure it again: recoup evaluate {result.folder} --data digits@test --input {shape}")
