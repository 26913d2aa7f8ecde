"""Table IV: seconds by stage and peak memory, beside the paper's hours and beside retraining.

Varies the method at one tolerance; for retraining, the epochs of a network that keeps half of its MACs. Stages are the
paper's: statistics, selection, search (with its measurements). Machines differ, so a ratio of the paper's hours and our
seconds is no speed-up; that of retraining and pruning on one machine is one.

Asserts: stages are all there, take time and sum up; more epochs take longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

import recoup
from benchmarks.networks import verified
from benchmarks.paper.cases import BEST, PAPER, Case, Outcome, Row, average, grouped, markdown, measured, shown
from benchmarks.paper.checks import require, require_within_tolerance
from benchmarks.paper.drawing import colour, panels
from benchmarks.paper.experiment import Experiment, Options
from benchmarks.paper.opening import at_hand
from benchmarks.paper.published import HOURS
from benchmarks.paper.training import trained
from benchmarks.paper.workbench import Sample, search, with_sizes

RETRAINING = "retraining"
STAGES = ("trace", "statistics", "selection", "search", "finish")
TOLERANCE, KEPT = 1.0, 0.5
GIGA = 1e9
HEAD = ("network", "method", *(f"{stage}, s" for stage in STAGES), "training, s", "total, s", "memory, GB", "test drop")


def cases(options: Options) -> list[Case]:
    tolerance = 3.0 if options.smoke else TOLERANCE
    epochs = options.epochs or ((1, 3) if options.smoke else (1, 10, 100))
    return [
        case
        for network in at_hand(("vgg16", "resnet50"), options)
        for seed in range(options.seeds or 1)
        for case in (
            *(Case(network, method, seed, tolerance) for method in options.methods or (PAPER, BEST)),
            *(Case(network, RETRAINING, seed, kept=KEPT, epochs=each) for each in epochs),
        )
    ]


def measure(sample: Sample, case: Case, options: Options) -> Outcome:
    return retrained(sample, case) if case.method == RETRAINING else search(sample, case, options)


def retrained(sample: Sample, case: Case) -> Outcome:
    """What labels make of a network that lost half of its MACs by the L2 norm of filters, and nothing was refitted.

    The norms need no statistics, and none are counted.
    """
    assert case.kept is not None and case.epochs is not None
    subject, ranked = sample.subject, sample.ranked(recoup.Paper(selector="l2", seed=case.seed))
    seen, clock = ranked.seen, ranked.clock
    goal = recoup.Goal(budget=recoup.Budget(macs=case.kept))
    allocation = clock("search", lambda: recoup.allocate(seen, ranked.rankings, goal))
    smaller = clock("finish", lambda: verified(seen, recoup.recover(seen, allocation, recovery="none").plan))
    clock.forget("statistics")
    epochs, batches = case.epochs, sample.once("training", subject.training)
    made = clock("training", lambda: trained(smaller, batches, epochs, seed=case.seed))
    return with_sizes(subject.outcome(made.model, clock.seconds, clock.memory), ranked.seen, allocation.keep)


def table(rows: Sequence[Row]) -> str:
    lines = []
    for mine in grouped(rows, lambda case: (case.network, case.method, case.epochs)):
        case = mine[0].case
        name = f"{case.epochs} epochs of retraining" if case.method == RETRAINING else case.method
        stages = [_mean_stage(mine, stage) for stage in (*STAGES, "training")]
        total, drop = shown(mine, "seconds", ".1f"), shown(mine, "test_drop")
        lines.append([case.network, name, *stages, total, _memory(mine), drop])
    for network, hours in HOURS.items():
        spent = [f"{3600 * part:.0f}" for part in (hours.statistics, hours.selection, hours.search)]
        lines.append([network, "paper, as published", "-", *spent, "-", "-", f"{3600 * hours.total:.0f}", "-", "-"])
        if hours.retraining is not None:
            again = f"{3600 * hours.retraining:.0f}"
            lines.append([network, "paper: 100 epochs of retraining", *["-"] * len(STAGES), again, again, "-", "-"])
    return markdown(HEAD, lines)


def _mean_stage(rows: Sequence[Row], stage: str) -> str:
    found = [row.outcome.stages[stage] for row in rows if stage in row.outcome.stages]
    return f"{sum(found) / len(found):.1f}" if found else "-"


def _memory(rows: Sequence[Row]) -> str:
    peaks = [max(row.outcome.memory.values()) for row in rows if row.outcome.memory]
    return f"{max(peaks) / GIGA:.1f}" if peaks else "-"


def draw(rows: Sequence[Row]) -> Figure:
    """Seconds by stage, one on top of the other."""
    networks = grouped(measured(rows), lambda case: case.network)
    figure, axes = panels(len(networks), columns=2, height=3.4)
    for panel, mine in zip(axes, networks, strict=True):
        bars = grouped(mine, lambda case: (case.method, case.epochs))
        names = [f"{bar[0].case.epochs} epochs" if bar[0].case.epochs else bar[0].case.method for bar in bars]
        start = [0.0] * len(bars)
        for place, stage in enumerate((*STAGES, "training")):
            seconds = [sum(row.outcome.stages.get(stage, 0.0) for row in bar) / len(bar) for bar in bars]
            panel.barh(names, seconds, left=start, color=colour(place), label=stage)
            start = [low + more for low, more in zip(start, seconds, strict=True)]
        panel.set(xlabel=f"seconds ({mine[0].stamp.machine})", title=mine[0].case.network)
        panel.invert_yaxis()
        panel.legend()
    return figure


def check(rows: Sequence[Row]) -> None:
    searched = [row for row in measured(rows) if row.case.method != RETRAINING]
    require_within_tolerance(searched)
    for row in searched:
        stages = row.outcome.stages
        require(set(STAGES) == set(stages), f"{row.case} has the stages {sorted(stages)}")
        require(all(seconds > 0 for seconds in stages.values()), f"{row.case}: a stage took no time: {stages}")
        require(abs(row.outcome.seconds - sum(stages.values())) < 1e-9, f"{row.case}: stages do not sum up")
    for mine in grouped(measured(rows, method=RETRAINING), lambda case: case.network):
        by_epochs = sorted(grouped(mine, lambda case: case.epochs), key=lambda group: group[0].case.epochs or 0)
        seconds = [average(group, "seconds") for group in by_epochs]
        require(seconds[-1] > seconds[0] or len(seconds) == 1, f"more epochs take no longer: {seconds}")


EXPERIMENT = Experiment("table4", "Seconds by stage", cases, table, draw, check, measure)
