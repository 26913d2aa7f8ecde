"""`recoup inspect`: what a network consists of, what could be pruned, what is locked and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from recoup._prune import inspect
from recoup.cli.data import open_data
from recoup.cli.display import note, print_json, print_table
from recoup.cli.failure import reports_failures
from recoup.cli.network import Network
from recoup.cli.options import NAMES, choice_options, common_options, shape_option, weights_option
from recoup.report.inspection import InspectedGroup, Inspection
from recoup.report.picture import require_new_picture


@click.command("inspect", epilog=NAMES)
@click.argument("model")
@weights_option
@shape_option
@click.option("--picture", metavar="FILE", type=click.Path(path_type=Path), help="New SVG file for a drawing of them.")
@choice_options
@common_options
@reports_failures
def inspect_command(
    model: str,
    picture: Path | None,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    keep_class: bool | None,
    keep_config: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """List the groups of channels in MODEL: widths, costs, what is locked and why. Prunes nothing."""
    if picture is not None:
        require_new_picture(picture)
    network = Network(model, normalise=None, **given)
    opened = network.open()
    noise = open_data("noise:1", opened.input, seed=network.seed)
    kept = {"keep_class": keep_class is True, "keep_config": keep_config}
    inspection = inspect(opened.model, next(iter(noise)), **kept, only=only, exclude=exclude)
    if picture is not None:
        note(f"picture: {inspection.save_picture(picture)}")
    if as_json:
        print_json({"model": model, **inspection.to_json()})
    else:
        _print(inspection)


def _print(inspection: Inspection) -> None:
    heads = ("Group", "Free", "MACs", "%", "Parameters", "%", "Read by", "Locked because")
    print_table(heads, map(_row, inspection.groups), numbers=range(1, 6))
    click.echo(inspection.summary)


def _row(group: InspectedGroup) -> tuple[str, ...]:
    row = group.row
    return (
        row.name,
        f"{row.before - row.locked} of {row.before}",
        f"{group.macs:,}",
        f"{100 * group.macs_share:.1f}",
        f"{group.parameters:,}",
        f"{100 * group.parameters_share:.1f}",
        ", ".join(row.consumers),
        "; ".join(row.reasons),
    )
