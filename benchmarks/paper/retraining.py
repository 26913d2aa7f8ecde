"""Retraining: what labels and epochs add to every selector and recovery, and what Torch-Pruning makes of them.

Varies selector, recovery and epochs at one share of the MACs, every group cut alike; beside them `Best` with widths of
its own, on labels alone or with the original as its teacher too, and Torch-Pruning 1.6.1 with batch norms estimated
again, each with the same epochs. Two controls train the network that the L2 norm leaves, at the rate of a training from
nothing: with the weights that are left (the learning rate is rewound), and with fresh ones (from scratch). The
question: what does one get from the same minute of GPU time? Accuracy over seconds, all stages counted.

Torch-Pruning is left out where it is not installed (`pip install --no-deps torch-pruning==1.6.1`).

Asserts: at 0 epochs compensation beats none; the most epochs lose no more than a point against none.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from matplotlib.figure import Figure
from torch import nn

import recoup
from benchmarks.baselines import count_macs, reestimated, torch_pruned, torch_pruning_ratio
from benchmarks.paper.cases import BEST, Case, Outcome, Row, average, grouped, markdown, measured, shown
from benchmarks.paper.checks import require
from benchmarks.paper.drawing import INK, colour, marker, panels
from benchmarks.paper.experiment import Experiment, Options
from benchmarks.paper.opening import at_hand
from benchmarks.paper.recoveries import IN_ONE_PASS, NONE, ONE_PASS, SEQUENTIAL, recovered, recoveries_of
from benchmarks.paper.selectors import CAP, selectors_of
from benchmarks.paper.training import RETRAINING_RATE, trained
from benchmarks.paper.workbench import Clock, Sample, finished, with_sizes
from benchmarks.train import Recipe
from recoup.errors import ModelError, VerificationError

GRID, TORCH_PRUNING = "uniform", "torch-pruning"
# Controls that train at the rate of a training from nothing, and what they are called.
REWOUND, SCRATCH = "rewound", "scratch"
CONTROLS = {REWOUND: "learning rate rewound", SCRATCH: "from scratch"}
# `Best` that learns from labels and from the original's scores.
TAUGHT = "taught"
# Selectors that look at weights alone: ranking by them needs no statistics, and is not charged any.
WEIGHTS_ALONE = ("l1", "l2", "fpgm", "bn-scale", "lookahead", "nisp", "synflow", "random")
EPOCHS, KEPT = (0, 1, 10, 100), 0.4
# More epochs than these take most of the time.
FEW = 1
# Seconds of GPU time within which families are compared.
MOMENTS = (15.0, 60.0, 300.0)
# Points below the original that the figure reaches down to; the table has what lies below.
DRAWN = 15.0
# Points that a test accuracy may fall by chance.
NOISE = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """A smaller network before retraining, its outcome but for what is measured of it, and its clock."""

    model: nn.Module
    sizes: Outcome
    clock: Clock


def cases(options: Options) -> list[Case]:
    """The grid, `Best` and Torch-Pruning: first all with few epochs, then what is drawn with many, then the rest."""
    kept = options.kept or KEPT
    ours = [
        Case("", GRID, 0, kept=kept, selector=selector, recovery=recovery)
        for selector in (("forward", "l2") if options.smoke and not options.selectors else selectors_of(options))
        for recovery in recoveries_of(options)
    ]
    others = [Case("", BEST, 0, kept=kept, recovery=each) for each in ("", TAUGHT)]
    if importlib.util.find_spec("torch_pruning") is None:
        print("retraining: torch-pruning is not installed and left out", file=sys.stderr)
    else:
        others += [Case("", TORCH_PRUNING, 0, kept=kept, recovery=each) for each in (NONE, "batch-norm")]
    others += [Case("", control, 0, kept=kept, selector="l2", recovery=NONE) for control in CONTROLS]
    every = [
        replace(case, network=network, seed=seed, epochs=epochs)
        for network in at_hand(("vgg16",), options)
        for epochs in options.epochs or ((0, 2) if options.smoke else EPOCHS)
        for seed in range(options.seeds or 1)
        for case in (*others, *ours)
        if epochs or (case.method not in CONTROLS and case.recovery != TAUGHT)
    ]
    return sorted(every, key=lambda case: (case.epochs or 0) > FEW and not is_drawn(case))


def measure(sample: Sample, case: Case, options: Options) -> Outcome:  # noqa: ARG001 - every measure takes them
    """The smaller network of the case after its epochs."""
    assert case.epochs is not None
    begins = replace(case, epochs=None, recovery="") if case.method == BEST else replace(case, epochs=None)
    subject, start = sample.subject, sample.once(begins, lambda: start_of(sample, case))
    clock, epochs, model = start.clock.copy(), case.epochs, start.model
    if epochs:
        batches = sample.once("training", subject.training)
        rate = Recipe().rate if case.method in CONTROLS else RETRAINING_RATE
        teacher = subject.model if case.recovery == TAUGHT else None
        model = clock(
            "training", lambda: trained(start.model, batches, epochs, rate=rate, seed=case.seed, teacher=teacher)
        ).model
    made, sizes = subject.outcome(model, clock.seconds, clock.memory), start.sizes
    return replace(made, removed=sizes.removed, flops_removed=sizes.flops_removed, sparsity=sizes.sparsity)


def start_of(sample: Sample, case: Case) -> Start:
    """The network that a case begins with."""
    made: dict[str, Callable[[Sample, Case], Start]] = {
        GRID: cut_alike, REWOUND: cut_alike, SCRATCH: with_fresh_weights, BEST: cut_by_default,
        TORCH_PRUNING: cut_by_torch_pruning,
    }  # fmt: skip
    return made[case.method](sample, case)


def cut_alike(sample: Sample, case: Case) -> Start:
    """The same share of every group by the case's selector, then the case's recovery."""
    ranked = sample.ranked(recoup.Paper(selector=case.selector, seed=case.seed))
    clock = ranked.clock
    found = clock("search", lambda: recoup.allocate(ranked.seen, ranked.rankings, goal_of(case)))
    smaller = recovered(sample, ranked, found.keep, case.recovery, clock)
    if case.recovery in (NONE, *SEQUENTIAL) and case.selector in WEIGHTS_ALONE:
        clock.forget("statistics")
    return Start(smaller, with_sizes(Outcome(), ranked.seen, found.keep), clock)


def with_fresh_weights(sample: Sample, case: Case) -> Start:
    """The same network with weights drawn anew: what its form alone is worth.

    Raises:
        ModelError: it is a captured graph, whose layers cannot be drawn anew.
    """
    start = cut_alike(sample, case)
    model = copy.deepcopy(start.model)
    redraw = [module.reset_parameters for module in model.modules() if hasattr(module, "reset_parameters")]
    if not redraw:
        raise ModelError(f"{case.network} is a captured graph without layers; --keep-class gives one that has them")
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        for each in redraw:
            cast(Callable[[], None], each)()
    return replace(start, model=model)


def cut_by_default(sample: Sample, case: Case) -> Start:
    """`Best`, which measures what every group may lose and refits in sequence."""
    ranked = sample.ranked(recoup.Best(seed=case.seed))
    clock = ranked.clock
    found = clock("search", lambda: recoup.allocate(ranked.seen, ranked.rankings, goal_of(case)))
    smaller = clock("recovery", lambda: finished(ranked.seen, found))
    return Start(smaller, with_sizes(Outcome(), ranked.seen, found.keep), clock)


def cut_by_torch_pruning(sample: Sample, case: Case) -> Start:
    """What a user of Torch-Pruning gets, as it is or with batch norms estimated again.

    Raises:
        VerificationError: the library broke the network.
    """
    assert case.kept is not None
    kept, clock, subject = case.kept, Clock(), sample.subject
    example = subject.splits["validation"][0][0][:1]
    last = [name for name, module in subject.model.named_modules() if isinstance(module, nn.Linear)][-1]
    try:
        ratio = torch_pruning_ratio(subject.model, example, kept, ignored=last)  # its users know theirs: not counted
        smaller = clock("search", lambda: torch_pruned(subject.model, example, last, ratio))
        if case.recovery != NONE:
            smaller = clock("recovery", lambda: reestimated(smaller, sample.batches))
        macs = [count_macs(each, example) for each in (subject.model, smaller)]
    except ModelError:
        raise
    except Exception as error:  # a library that breaks the network may raise anything
        raise VerificationError(f"{type(error).__name__}: {str(error)[:200]}") from error
    return Start(smaller, Outcome(removed=100 * (1 - macs[1] / macs[0])), clock)


def goal_of(case: Case) -> recoup.Goal:
    """The share of the MACs to keep."""
    return recoup.Goal(budget=recoup.Budget(macs=case.kept))


def name_of(case: Case) -> str:
    """What a case is called, whatever its epochs."""
    if case.method == GRID:
        return f"{case.selector}, {case.recovery}"
    if case.method == BEST:
        return "Best, taught by the original" if case.recovery == TAUGHT else "Best"
    if case.method in CONTROLS:
        return f"{case.selector}, {CONTROLS[case.method]}"
    return "Torch-Pruning" + ("" if case.recovery == NONE else f", {case.recovery}")


def table(rows: Sequence[Row]) -> str:
    """What is drawn, by epochs, what every family reaches within some moments, then selectors by recoveries."""
    drawn = [row for row in rows if is_drawn(row.case)]
    parts = [table_of_ways(drawn)] if drawn else []
    grid = sorted((row for row in rows if row.case.method == GRID), key=lambda row: row.case.epochs or 0)
    grids = grouped(grid, lambda case: (case.network, case.kept, case.epochs))
    return "\n\n".join([*parts, table_of_moments(rows), *(table_of_grid(each) for each in grids)])


def table_of_grid(rows: Sequence[Row]) -> str:
    """Test accuracy for every selector and recovery, after so many epochs."""
    recoveries = [name for name in (*IN_ONE_PASS, *SEQUENTIAL) if any(row.case.recovery == name for row in rows)]
    lines = []
    for mine in grouped(rows, lambda case: case.selector):
        by_recovery = {name: [row for row in mine if row.case.recovery == name] for name in recoveries}
        lines.append([mine[0].case.selector, *(shown(found, "top1") for found in by_recovery.values())])
    case = rows[0].case
    return markdown((f"{case.network}, {case.kept:.0%} of the MACs, {case.epochs} epochs: top-1", *recoveries), lines)


def table_of_ways(rows: Sequence[Row]) -> str:
    """Accuracy and seconds by epochs."""
    epochs = sorted({row.case.epochs or 0 for row in rows})
    lines = []
    for mine in grouped(rows, lambda case: (case.network, case.kept, name_of(case))):
        case, cells = mine[0].case, []
        for each in epochs:
            found = [row for row in mine if row.case.epochs == each]
            timed = alone(measured(found))
            seconds = f" ({average(timed, 'seconds'):.1f} s)" if timed else ""
            cells.append(f"{shown(found, 'top1')}{seconds}")
        lines.append([f"{case.network}{base_of(mine)}", f"{case.kept:.0%}", name_of(case), *cells])
    head = ("network (top-1)", "MACs kept", "selector, recovery", *(f"{each} epochs" for each in epochs))
    return markdown(head, lines)


def alone(rows: Sequence[Row]) -> list[Row]:
    """The rows of runs that had the machine for themselves: only their seconds can be compared."""
    return [row for row in rows if row.stamp.shared == 1]


def base_of(rows: Sequence[Row]) -> str:
    """The accuracy of the original, in brackets, where a row knows it."""
    return f" ({average(rows, 'base'):.2f})" if measured(rows) else ""


def table_of_moments(rows: Sequence[Row]) -> str:
    """The test accuracy of what validation images would choose among a family's runs that are done in time."""
    lines = []
    for at_one_size in grouped(alone(measured(rows)), lambda case: (case.network, case.kept)):
        size = f"{at_one_size[0].case.network}, {at_one_size[0].case.kept:.0%}"
        for name, mine in families(at_one_size).items():
            cells = []
            for moment in MOMENTS:
                done = [row for row in mine if row.outcome.seconds <= moment]
                best = min(done, key=lambda row: row.outcome.validation_drop or 0.0, default=None)
                cells.append(f"{best.outcome.top1:.2f} ({name_of(best.case)}, {best.case.epochs})" if best else "-")
            lines.append([size, name, *cells])
    heads = (f"within {moment:.0f} s" for moment in MOMENTS)
    return markdown(("top-1 on test, chosen on validation", "way", *heads), lines)


def families(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows by what a user does, each family one way that was named beforehand; the rest of the grid has none."""
    tools = {BEST: "Recoup", TORCH_PRUNING: "Torch-Pruning", GRID: "L2 norm"}
    found: dict[str, list[Row]] = {}
    for row in rows:
        case = row.case
        if case.method == GRID and (case.selector, case.recovery) != ("l2", NONE):
            continue
        tool = tools.get(case.method)
        name = CONTROLS[case.method] if tool is None else f"{tool} + fine-tuning" if case.epochs else tool
        found.setdefault(name, []).append(row)
    return found


def is_drawn(case: Case) -> bool:
    """Whether a line of the grid is in the figure: compensation with the paper's selectors, and no recovery at all."""
    drawn = {*((selector, ONE_PASS) for selector in CAP), ("l2", NONE)}
    return case.method != GRID or (case.selector, case.recovery) in drawn


def draw(rows: Sequence[Row]) -> Figure:
    """Test accuracy over seconds of all stages, a line over the epochs for every way."""
    networks = grouped(alone(measured(rows)) or measured(rows), lambda case: case.network)
    figure, axes = panels(len(networks), columns=1, height=4.2)
    for panel, mine in zip(axes, networks, strict=True):
        ways = grouped([row for row in mine if is_drawn(row.case)], name_of)
        for place, way in enumerate(ways):
            at = sorted(grouped(way, lambda case: case.epochs), key=lambda group: group[0].case.epochs or 0)
            seconds, top1 = ([average(group, of) for group in at] for of in ("seconds", "top1"))
            label = name_of(way[0].case) + ("" if way[0].case.method in CONTROLS else " + fine-tuning")
            panel.plot(seconds, top1, f"{marker(place)}-", color=colour(place), label=label, markersize=5)
            for group, x, y in zip(at, seconds, top1, strict=True):
                epochs = str(group[0].case.epochs)
                panel.annotate(epochs, (x, y), fontsize=6, xytext=(3, -7), textcoords="offset points")
        base = average(mine, "base")
        panel.set_ylim(base - DRAWN, base + 1)
        panel.axhline(base, color=INK, linewidth=0.6, linestyle=":", label="original")
        panel.axvline(60, color=INK, linewidth=0.6)
        panel.set(xlabel=f"seconds ({mine[0].stamp.machine}), numbers are epochs", ylabel="top-1 on test", xscale="log")
        panel.set_title(f"{mine[0].case.network}, {mine[0].case.kept:.0%} of the MACs kept; the line is a minute")
        panel.legend(loc="lower right")
    return figure


def check(rows: Sequence[Row]) -> None:
    for mine in grouped(measured(rows), lambda case: (case.network, case.kept, name_of(case))):
        by_epochs = {group[0].case.epochs or 0: average(group, "top1") for group in grouped(mine, lambda c: c.epochs)}
        most = max(by_epochs)
        if 0 in by_epochs and most:
            before, after = by_epochs[0], by_epochs[most]
            require(after >= before - NOISE, f"{name_of(mine[0].case)}: {most} epochs take {before:.2f} to {after:.2f}")
    for mine in grouped(measured(rows, method=GRID, epochs=0), lambda case: (case.network, case.kept, case.selector)):
        plain, compensated = (measured(mine, recovery=name) for name in (NONE, ONE_PASS))
        if plain and compensated:
            less, more = average(plain, "top1"), average(compensated, "top1")
            require(more > less, f"{mine[0].case.selector}: {more:.2f} with compensation, {less:.2f} without")


EXPERIMENT = Experiment(
    "retraining", "Accuracy over seconds, with and without retraining", cases, table, draw, check, measure
)
