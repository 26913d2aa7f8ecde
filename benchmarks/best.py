"""Accuracy at fixed shares of the MACs without retraining, for networks on CIFAR-10, beside other methods.

    python -m benchmarks.best --cifar DIR --checkpoints DIR --device cuda
    python -m benchmarks.best --cifar DIR --checkpoints DIR --device cuda --tolerance 1.0

Methods, for every share of the MACs to remove:

- best: `recoup.Best()`, closed form throughout. Trace, split, statistics and rankings are made once per calibration
  sample and shared by shares and methods; a row's seconds are those of the shared steps and its own.
- refined: the result of `best`, then `--refine` seconds of gradient steps towards the original's outputs.
- fast: `recoup.Fast()`, `best` without the second round and the joint refits.
- uniform widths, one pass: the same share of every group with the paper's compensation, `recoup.prune(...,
  budget=..., method="paper", keep_class=True)`, the first sample only. This is not the paper's search.
- torch-pruning: MagnitudePruner as in benchmarks/baselines.py, and again after the batch norms have been estimated on
  the calibration images; the first sample only. Needs `pip install --no-deps torch-pruning==1.6.1`.

The table also has the paper's search, layer by layer within a tolerance: as published, and our run of it, the rows
of benchmarks/paper/searches.py in benchmarks/results/.

With `--tolerance` none of these: `recoup.prune` with `recoup.Best()`, end to end, searches the share by itself.

Drops are in points: on the validation images, which only the tolerance looks at, and on the test images, which nothing
does. KL is on the test images. The first trace of the process is made beforehand and not counted.

Rows are kept in `--out` as they come. A second call goes on where the first stopped, so that the work can be spread
over several: by `--networks`, `--methods`, `--shares` and `--seeds`. To make a row anew, take it out of the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import recoup
from benchmarks.baselines import count_macs, prune_with_torch_pruning, reestimated
from benchmarks.machine import timed
from benchmarks.networks import (
    CIFAR,
    CIFAR_IMAGES,
    Batches,
    Bench,
    Ranked,
    add_arguments,
    check_places,
    measure_all,
    ranked,
)
from benchmarks.paper.published import PUBLISHED, PUBLISHED_SECONDS, PUBLISHED_WITH
from benchmarks.paper.searches import SEARCH, made_with, seconds_of, stored_searches
from benchmarks.rows import Case, Outcome, Plain, Row, Store, alike, mean, mean_and_values
from recoup.errors import BudgetError, ModelError
from recoup.recovery.choose import refined

SHARES = {"vgg16": (0.5, 0.6, 0.7), "resnet56": (0.3, 0.5, 0.6), "resnet20": (0.3, 0.5)}
BEST, REFINED, FAST = "best", "refined", "fast"
UNIFORM, TORCH_PRUNING, TOLERANCE = "uniform widths, one pass", "torch-pruning", "tolerance"
OURS = (BEST, REFINED, FAST)
METHODS = (*OURS, UNIFORM, TORCH_PRUNING)
WITH_BATCH_NORM = f"{TORCH_PRUNING} + batch norm"
OUT = Path(__file__).parent / "results" / "best.json"


def main() -> None:
    options = parse()
    store = Store(options.out, common_settings(options))
    measure_all(store, options, cases, rows)
    print(table(store.rows, stored_searches(CIFAR)))


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
    batches, method = bench.calibration(seed), recoup.Best(seed=seed)
    yield from rows_in_steps(bench, batches, method, [case for case in here if case.method in OURS], options)
    for case in here:
        if case.method == UNIFORM:
            yield Row(case, with_uniform_widths(bench, batches, case))
        elif case.method == TOLERANCE:
            yield Row(case, within_tolerance(bench, batches, method, case))
    for share in dict.fromkeys(case.share for case in here if case.method in (TORCH_PRUNING, WITH_BATCH_NORM)):
        assert share is not None
        yield from rows_of_torch_pruning(bench, batches, Case(bench.network, TORCH_PRUNING, seed, share), share)


def rows_in_steps(
    bench: Bench, batches: Batches, method: recoup.Best, waiting: Sequence[Case], options: argparse.Namespace
) -> Iterator[Row]:
    """Recoup's own methods on one calibration sample."""
    if not waiting:
        return
    before = ranked(bench.model, batches, method)
    for share in dict.fromkeys(case.share for case in waiting):
        assert share is not None
        here = {case.method: case for case in waiting if case.share == share}
        try:
            yield from rows_at(bench, before, share, here, options.refine)
        except BudgetError as error:
            yield from (Row(case, Outcome(note=str(error))) for case in here.values())


def rows_at(bench: Bench, before: Ranked, share: float, here: dict[str, Case], refine: float) -> Iterator[Row]:
    """The methods in `here` at one share of the MACs."""
    goal, method = recoup.Goal(budget=recoup.Budget(macs=1 - share)), before.method
    if FAST in here:
        fast = steps(before, recoup.Fast(seed=method.seed), goal)
        yield Row(here[FAST], bench.outcome_of(fast.seen, fast.keep, fast.recovered, fast.seconds))
    if BEST not in here and REFINED not in here:
        return
    best = steps(before, method, goal)
    if BEST in here:
        yield Row(here[BEST], bench.outcome_of(best.seen, best.keep, best.recovered, best.seconds))
    if REFINED in here:
        longer = replace(best.seen, method=replace(method, refine=refine))
        after = timed(best.seconds, "refine", lambda: refined(longer, best.recovered, best.keep))
        yield Row(here[REFINED], bench.outcome_of(best.seen, best.keep, after, best.seconds))


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """What allocating and recovering gave, and the seconds of all steps so far."""

    seen: recoup.Calibration
    keep: Tensor
    recovered: recoup.Recovered
    seconds: dict[str, float]


def steps(before: Ranked, method: recoup.Best | recoup.Fast, goal: recoup.Goal) -> Steps:
    """Allocate and recover with a method, which remembers nothing: the seconds are all its own."""
    seen, seconds = replace(before.seen, method=method), dict(before.seconds)
    allocation = timed(seconds, "allocate", lambda: recoup.allocate(seen, before.rankings, goal))
    recovered = timed(seconds, "recover", lambda: recoup.recover(seen, allocation))
    return Steps(seen, allocation.keep, recovered, seconds)


def with_uniform_widths(bench: Bench, batches: Batches, case: Case) -> Outcome:
    """The same share of every group, and the paper's compensation, in the network's own class."""
    assert case.share is not None
    budget, stages = recoup.Budget(macs=1 - case.share), dict[str, float]()
    try:
        result = timed(
            stages, "prune", lambda: recoup.prune(bench.model, batches, budget=budget, method="paper", keep_class=True)
        )
    except BudgetError as error:
        return Outcome(note=str(error))
    return bench.outcome(result.model, result.report.macs_removed, stages)


def within_tolerance(bench: Bench, batches: Batches, method: recoup.Best, case: Case) -> Outcome:
    """The default for a tolerance on the validation images; the bound is that of the last trial it accepted."""
    stages: dict[str, float] = {}
    result = timed(
        stages,
        "prune",
        lambda: recoup.prune(
            bench.model, batches, validation=bench.splits["validation"], tolerance=case.tolerance, method=method
        ),
    )
    report: recoup.Report = result.report
    trials = report.score.trials if report.score is not None else ()
    bounds = [trial.drop for trial in trials if trial.accepted]
    made = bench.outcome(result.model, report.macs_removed, stages)
    error = min(report.held_out.values(), default=None)
    return replace(made, bound=bounds[-1] if bounds else None, output_error=error)


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


def table(found: Sequence[Plain], searches: Sequence[Plain] = ()) -> str:
    """Averages over calibration samples, as Markdown: the fixed shares, then the tolerances, where there are any.

    `searches` are rows of benchmarks/paper/searches.py with the names of their networks.
    """
    by_share = [row for row in found if row["share"] is not None]
    by_tolerance = [row for row in found if row["tolerance"] is not None]
    tables = [share_table(by_share, searches)] if by_share else []
    return "\n\n".join([*tables, *([tolerance_table(by_tolerance)] if by_tolerance else [])])


def share_table(found: Sequence[Plain], searches: Sequence[Plain] = ()) -> str:
    order = [*OURS, UNIFORM, TORCH_PRUNING, WITH_BATCH_NORM]
    lines = ["| network (top-1) | MACs removed | method | test drop | KL | seconds |", "|---" * 6 + "|"]
    for network in alike(found, "network"):
        network.sort(key=lambda row: (row["share"], order.index(row["method"])))
        for at_share in alike(network, "share"):
            lines += [share_line(title(network), mine) for mine in alike(at_share, "method")]
            lines += published_lines(title(network), at_share[0])
        mine = [row for row in searches if row["network"] == network[0]["network"]]
        lines += [search_line(title(network), group) for group in alike(mine, "tolerance")]
    return "\n".join(lines)


def published_lines(name: str, row: Plain) -> list[str]:
    """The paper's own figure nearest to a share, where it has any: points lost on the test images by its search."""
    if row["network"] != "vgg16":
        return []
    nearest = min(PUBLISHED, key=lambda figure: abs(figure.removed - 100 * row["share"]))
    return [
        f"| {name} | {row['share']:.0%} | paper, as published | {nearest.test_drop:.2f} for {nearest.removed:.1f} % | "
        f"- | {PUBLISHED_SECONDS} ({PUBLISHED_WITH}) |"
    ]


def search_line(name: str, mine: Sequence[Plain]) -> str:
    """Our run of the paper's search within one tolerance, at the share of the MACs that it removed."""
    seconds = sum(map(seconds_of, mine)) / len(mine)
    return (
        f"| {name} | {mean(mine, 'macs_drop', '.1f')}% | {SEARCH}, tolerance {mine[0]['tolerance']} | "
        f"{mean_and_values(mine, 'test_drop')} | {mean(mine, 'kl', '.3f')} | {seconds:.1f} ({made_with(mine)}) |"
    )


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
