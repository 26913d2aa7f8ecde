"""`recoup inspect`: what a network consists of, what could be pruned, what is locked and why."""

from __future__ import annotations

import click

from recoup.cli.display import print_json, print_table
from recoup.cli.failure import reports_failures
from recoup.cli.opening import Network
from recoup.cli.options import NAMES, common_options, shape_option, weights_option
from recoup.data import open_data
from recoup.prune import inspect
from recoup.report.inspection import InspectedGroup, Inspection


@click.command("inspect", epilog=NAMES)
@click.argument("model")
@weights_option
@shape_option
@common_options
@reports_failures
def inspect_command(model: str, weights: str | None, shape: str | None, device: str, seed: int, as_json: bool) -> None:
    """List the groups of channels in MODEL: widths, costs, what is locked and why. Prunes nothing."""
    inspection = _inspect(Network(model, weights, shape, None, device, seed))
    if as_json:
        print_json({"model": model, **inspection.to_json()})
    else:
        _print(inspection)


def _inspect(network: Network) -> Inspection:
    opened = network.open()
    noise = open_data("noise:1", opened.input, seed=network.seed)
    return inspect(opened.model, next(iter(noise)))


def _print(inspection: Inspection) -> None:
    heads = ("Group", "Channels", "Free", "MACs", "Read by", "Locked because")
    print_table(heads, map(_row, inspection.groups), numbers=(1, 2, 3))
    click.echo(
        f"{inspection.network}: {inspection.cost.macs:,} MACs, {inspection.cost.parameters:,} parameters, "
        f"{inspection.prunable} of {len(inspection.groups)} groups prunable"
    )


def _row(group: InspectedGroup) -> tuple[str, ...]:
    row = group.row
    free = str(row.before - row.locked)
    return row.name, str(row.before), free, f"{group.macs:,}", ", ".join(row.consumers), "; ".join(row.reasons)
