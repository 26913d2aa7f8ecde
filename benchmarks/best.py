"""Accuracy at fixed shares of the MACs without retraining, for networks on CIFAR-10, beside other methods.

    python -m benchmarks.best --cifar DIR --checkpoints DIR --device cuda
    python -m benchmarks.best --cifar DIR --checkpoints DIR --device cuda --tolerance 1.0

Methods, for every share of the MACs to remove:

- best: recoup's preset, closed form throughout. Trace, statistics, rankings and allocation are made once per
  calibration sample and shared by shares and methods; a row's seconds are those of the shared stages and its own.
- refined: the result of `best`, then `--refine` seconds of gradient steps towards the original's outputs.
- fast: recoup's preset of that name, `best` without the second round and the joint refits.
- paper: recoup's preset of that name, `recoup.prune(..., preset="paper", keep_class=True)`, the first sample only.
- torch-pruning: MagnitudePruner as in benchmarks/baselines.py, and again after the batch norms have been estimated on
  the calibration images; the first sample only. Needs `pip install --no-deps torch-pruning==1.6.1`.

With `--tolerance` none of these: `recoup.prune` with the preset `best`, end to end, searches the share by itself.

Drops are in points: on the validation images, which only the tolerance looks at, and on the test images, which nothing
does. KL is on the test images. The first trace of the process is made beforehand and not counted.

Rows are kept in `--out` as they come. A second call goes on where the first stopped, so that the work can be spread
over several: by `--networks`, `--methods`, `--shares` and `--seeds`. To make a row anew, take it out of the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

import recoup
from benchmarks.baselines import count_macs, prune_with_torch_pruning, reestimated
from benchmarks.networks import CIFAR, CIFAR_IMAGES, Batches, Bench, add_arguments, check_places, measure_all
from benchmarks.paper import PAPER as PUBLISHED
from benchmarks.paper import timed
from benchmarks.rows import Case, Outcome, Plain, Row, Store, alike, mean, mean_and_values
from benchmarks.stages import Prepared, prepare
from recoup.errors import BudgetError, ModelError
from recoup.settings import Budget, Settings, find_preset

SHARES = {"vgg16": (0.5, 0.6, 0.7), "resnet56": (0.3, 0.5, 0.6), "resnet20": (0.3, 0.5)}
BEST, REFINED, FAST = "best", "refined", "fast"
PAPER, TORCH_PRUNING, TOLERANCE = "paper", "torch-pruning", "tolerance"
OURS = (BEST, REFINED, FAST)
METHODS = (*OURS, PAPER, TORCH_PRUNING)
WITH_BATCH_NORM = f"{TORCH_PRUNING} + batch norm"
OUT = Path(__file__).parent / "results" / "best.json"


def main() -> None:
    options = parse()
    store = Store(options.out, common_settings(options))
    measure_all(store, options, cases, rows)
    print(table(store.rows))


def cases(network: str, options: argparse.Namespace) -> list[Case]:
    """What there is to do for a network, in order."""
    if options.tolerance is not None:
        seeds = range(options.first_seed, options.first_seed + options.tolerance_seeds)
        return [Case(network, TOLERANCE, seed, tolerance=options.tolerance) for seed in seeds]
    methods = [*options.methods, *([WITH_BATCH_NORM] if TORCH_PRUNING in options.methods else [])]
    return [
        Case(network, method, seed, share)
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for share in options.shares or SHARES[network]
        for method in methods
        if method in OURS or seed == 0
    ]


def rows(bench: Bench, seed: int, here: Sequence[Case], options: argparse.Namespace) -> Iterator[Row]:
    """The rows of the cases of one calibration sample, one by one as they are done."""
    batches = bench.calibration(seed)
    settings = replace(find_preset("best"), seed=seed)
    yield from rows_in_stages(bench, batches, settings, [case for case in here if case.method in OURS], options)
    for case in here:
        if case.method == PAPER:
            yield Row(case, as_in_paper(bench, batches, case))
        elif case.method == TOLERANCE:
            yield Row(case, within_tolerance(bench, batches, settings, case))
    for share in dict.fromkeys(case.share for case in here if case.method in (TORCH_PRUNING, WITH_BATCH_NORM)):
        assert share is not None
        yield from rows_of_torch_pruning(bench, batches, Case(bench.network, TORCH_PRUNING, seed, share), share)


def rows_in_stages(
    bench: Bench, batches: Batches, settings: Settings, waiting: Sequence[Case], options: argparse.Namespace
) -> Iterator[Row]:
    """Recoup's own methods on one calibration sample."""
    if not waiting:
        return
    prepared = prepare(bench.model, batches, settings)
    for share in dict.fromkeys(case.share for case in waiting):
        assert share is not None
        here = {case.method: case for case in waiting if case.share == share}
        try:
            yield from rows_at(bench, prepared, share, here, options.refine)
        except BudgetError as error:
            yield from (Row(case, Outcome(note=str(error))) for case in here.values())


def rows_at(bench: Bench, prepared: Prepared, share: float, here: dict[str, Case], refine: float) -> Iterator[Row]:
    """The methods in `here` at one share of the MACs."""
    stages: dict[str, float] = {}
    if FAST in here:
        preset = find_preset(FAST)
        without = prepared.with_settings(joint=preset.joint, rounds=preset.rounds)
        keep = timed(stages, "widths", lambda: without.keep(share))
        fast = timed(stages, "recover", lambda: without.recoverer().plan(keep))
        yield Row(here[FAST], prepared.outcome(bench, keep, fast, stages))
    if BEST not in here and REFINED not in here:
        return
    stages, recoverer = {}, prepared.recoverer()
    keep = timed(stages, "widths", lambda: prepared.keep(share))
    chosen = timed(stages, "recover", lambda: recoverer.plan(keep))
    if BEST in here:
        yield Row(here[BEST], prepared.outcome(bench, keep, chosen, stages))
    if REFINED in here:
        refined = timed(stages, "refine", lambda: recoverer.refined(chosen, keep, refine))
        yield Row(here[REFINED], prepared.outcome(bench, keep, refined, stages))


def as_in_paper(bench: Bench, batches: Batches, case: Case) -> Outcome:
    """The paper's recipe, in the network's own class."""
    assert case.share is not None
    budget, stages = Budget(macs=1 - case.share), dict[str, float]()
    try:
        result = timed(
            stages, "prune", lambda: recoup.prune(bench.model, batches, budget=budget, preset="paper", keep_class=True)
        )
    except BudgetError as error:
        return Outcome(note=str(error))
    return bench.outcome(result.model, result.report.macs_removed, stages)


def within_tolerance(bench: Bench, batches: Batches, settings: Settings, case: Case) -> Outcome:
    """The preset `best` for a tolerance on the validation images; the bound is that of the last trial it accepted."""
    stages: dict[str, float] = {}
    result = timed(
        stages,
        "prune",
        lambda: recoup.prune(
            bench.model, batches, validation=bench.splits["validation"], tolerance=case.tolerance, preset=settings
        ),
    )
    report: recoup.Report = result.report
    trials = report.score.trials if report.score is not None else ()
    bounds = [trial.drop for trial in trials if trial.accepted]
    made = bench.outcome(result.model, report.macs_removed, stages)
    harm = min(report.held_out.values(), default=None)
    return replace(made, bound=bounds[-1] if bounds else None, harm=harm)


def rows_of_torch_pruning(bench: Bench, batches: Batches, case: Case, share: float) -> Iterator[Row]:
    """Torch-Pruning as it is, and with the batch norms estimated again; a crash is a row as well."""
    again = replace(case, method=WITH_BATCH_NORM)
    stages: dict[str, float] = {}
    try:
        plain = timed(stages, "prune", lambda: torch_pruned(bench, share))
        removed = 1 - count_macs(plain, bench.example) / count_macs(bench.model, bench.example)
        first = bench.outcome(plain, removed, stages)
    except ModelError as error:  # the library is missing: nothing is known of what it would do
        print(f"{case}: skipped, {error}", file=sys.stderr, flush=True)
        return
    except Exception as error:  # a library that breaks the network may raise anything, here or when it is run
        note = f"{type(error).__name__}: {str(error)[:200]}"
        yield from (Row(broken, Outcome(note=note)) for broken in (case, again))
        return
    yield Row(case, first)
    estimated = timed(stages, "batch norm", lambda: reestimated(plain, batches))
    yield Row(again, bench.outcome(estimated, removed, stages))


def torch_pruned(bench: Bench, share: float) -> nn.Module:
    return prune_with_torch_pruning(bench.model, bench.example, 1 - share, ignored=bench.classifier)


def table(found: Sequence[Plain]) -> str:
    """Averages over calibration samples, as Markdown: the fixed shares, then the tolerances, where there are any."""
    by_share = [row for row in found if row["share"] is not None]
    by_tolerance = [row for row in found if row["tolerance"] is not None]
    pairs = ((share_table, by_share), (tolerance_table, by_tolerance))
    return "\n\n".join(render(mine) for render, mine in pairs if mine)


def share_table(found: Sequence[Plain]) -> str:
    order = [*OURS, PAPER, TORCH_PRUNING, WITH_BATCH_NORM]
    lines = ["| network (top-1) | MACs removed | method | test drop | KL | seconds |", "|---" * 6 + "|"]
    for network in alike(found, "network"):
        network.sort(key=lambda row: (row["share"], order.index(row["method"])))
        for at_share in alike(network, "share"):
            lines += [share_line(title(network), mine) for mine in alike(at_share, "method")]
            lines += published_lines(title(network), at_share[0])
    return "\n".join(lines)


def published_lines(name: str, row: Plain) -> list[str]:
    """The paper's own figure nearest to a share, where it has any: it is by tolerance, in validation accuracy."""
    if row["network"] != "vgg16":
        return []
    tolerance, removed = min(PUBLISHED.items(), key=lambda pair: abs(pair[1] - 100 * row["share"]))
    return [f"| {name} | {row['share']:.0%} | paper, as published | {tolerance} for {removed:.1f} % | - | 720 |"]


def share_line(name: str, mine: Sequence[Plain]) -> str:
    return (
        f"| {name} | {mine[0]['share']:.0%} | {mine[0]['method']} | {mean_and_values(mine, 'test_drop')}{note_of(mine)}"
        f" | {mean(mine, 'kl', '.3f')} | {mean(mine, 'seconds', '.1f')} |"
    )


def tolerance_table(found: Sequence[Plain]) -> str:
    lines = [
        "| network (top-1) | tolerance | samples | MACs removed (least to most) | validation drop (worst) | "
        "bound (worst) | test drop (worst) | beyond the tolerance on test | seconds |",
        "|---" * 9 + "|",
    ]
    return "\n".join([*lines, *(tolerance_line(mine) for mine in alike(found, "network", "tolerance"))])


def tolerance_line(mine: Sequence[Plain]) -> str:
    removed, tolerance = [row["removed"] for row in mine], mine[0]["tolerance"]
    drops = [mean_and_worst(mine, name) for name in ("validation_drop", "bound", "test_drop")]
    return (
        f"| {title(mine)} | {tolerance} | {len(mine)} | "
        f"{mean(mine, 'removed', '.1%')} ({min(removed):.1%} to {max(removed):.1%}) | {' | '.join(drops)} | "
        f"{sum(row['test_drop'] > tolerance for row in mine)} | {mean(mine, 'seconds', '.1f')} |"
    )


def title(found: Sequence[Plain]) -> str:
    """A network's name, with the test accuracy it starts from."""
    bases = [row["top1"] + row["test_drop"] for row in found if row["top1"] is not None]
    return f"{found[0]['network']} ({bases[0]:.2f})" if bases else str(found[0]["network"])


def note_of(found: Sequence[Plain]) -> str:
    """Why there is no number, in a form that a table can hold."""
    notes = dict.fromkeys(" ".join(row["note"].split()).replace("|", "/") for row in found if row["note"])
    return "".join(f", {note}" for note in notes)


def mean_and_worst(found: Sequence[Plain], name: str) -> str:
    values = [row[name] for row in found if row[name] is not None]
    return f"{mean(found, name)} ({max(values):.2f})" if values else "-"


def common_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What must not differ between the rows of one file."""
    return {name: getattr(options, name) for name in ("images", "validation_images", "test_images", "refine")}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--networks", nargs="+", default=list(SHARES), choices=list(CIFAR))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--shares", type=float, nargs="+", help="of the MACs to remove; each network's own if not said")
    parser.add_argument("--seeds", type=int, default=3, help="calibration samples")
    parser.add_argument("--first-seed", type=int, default=0, help="the number of the first calibration sample")
    parser.add_argument("--refine", type=float, default=60.0, help="seconds")
    parser.add_argument("--images", type=int, default=CIFAR_IMAGES, help="for calibration")
    parser.add_argument("--tolerance", type=float, help="in points; search within it instead of fixed shares")
    parser.add_argument("--tolerance-seeds", type=int, default=10, help="calibration samples with --tolerance")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(words)
    check_places(parser, options)
    return options


if __name__ == "__main__":
    main()
