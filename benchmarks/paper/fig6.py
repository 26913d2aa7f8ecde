"""Figure 6: what is lost of a layer's output after compensation, over the sparsity of its inputs, for every selector.

Varies the selector. The loss is the squared error of a layer over the variance of its output, as expected from the
covariance of the calibration images, averaged over the layers that read a group.

Asserts: the loss rises with sparsity; the lower of forward and backward lies below all others on average.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from matplotlib.figure import Figure

import recoup
from benchmarks.paper.cases import Case, Outcome, Row, grouped, markdown, measured
from benchmarks.paper.checks import require
from benchmarks.paper.drawing import colour, legend_beside, marker, panels
from benchmarks.paper.experiment import Experiment, Options
from benchmarks.paper.opening import at_hand
from benchmarks.paper.selectors import CAP, selectors_of
from benchmarks.paper.workbench import Sample, method_of
from recoup.algebra.ridge import compensate
from recoup.channels.structure import Group
from recoup.statistics.rank import problem_of

SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SHOWN = (0.3, 0.5, 0.7)
PANELS = 6
# Losses below this are those of rounding, and look alike on a log scale.
FLOOR = 1e-9
# Rounding may lower a loss by so much where one more channel goes, and put one selector below another.
RISE, TIE = 1e-6, 1.02
HEAD = ("network", "selector", *(f"loss at {share:.0%}" for share in SHOWN), "geometric mean of all")


def cases(options: Options) -> list[Case]:
    return [
        Case(network, seed=seed, selector=selector)
        for network in at_hand(("vgg16",), options)
        for seed in range(options.seeds or 1)
        for selector in selectors_of(options)
    ]


def measure(sample: Sample, case: Case, options: Options) -> Outcome:
    ranked = sample.ranked(method_of(case, options))
    losses = {
        group.name: losses_of(ranked.seen, group, ranked.rankings[group.name])
        for group in ranked.seen.structure.prunable
    }
    return Outcome(losses=losses, stages=ranked.clock.seconds)


def losses_of(seen: recoup.Calibration, group: Group, ranking: recoup.Ranking) -> list[float]:
    """The relative loss after compensation when the best channels of a ranking stay, at every sparsity."""
    problem = problem_of(seen, group)
    found = []
    for sparsity in SPARSITIES:
        kept = ranking.order[: max(1, math.ceil((1 - sparsity) * group.width))].to(problem.device)
        layers = []
        for layer in problem.layers:
            stays = (layer.channel_of < 0) | torch.isin(layer.channel_of, kept)
            fitted = compensate(layer.covariance, layer.weight, stays, ridge=seen.method.ridge, name=group.name)
            layers.append(fitted.relative_residual)
        found.append(fmean(layers))
    return found


def curves(rows: Sequence[Row]) -> Mapping[str, list[float]]:
    """The loss of every layer at every sparsity, averaged over samples."""
    return {
        layer: [fmean(each) for each in zip(*(row.outcome.losses[layer] for row in rows), strict=True)]
        for layer in rows[0].outcome.losses
    }


def overall(found: Mapping[str, Sequence[float]]) -> float:
    """The geometric mean over layers and sparsities."""
    return math.exp(fmean(math.log(max(loss, FLOOR)) for losses in found.values() for loss in losses))


def table(rows: Sequence[Row]) -> str:
    lines = []
    for mine in grouped(rows, lambda case: (case.network, case.selector)):
        case, found = mine[0].case, measured(mine)
        if not found:
            lines.append([case.network, case.selector, *["-"] * (len(SHOWN) + 1)])
            continue
        losses = curves(found)
        means = [fmean(each[SPARSITIES.index(share)] for each in losses.values()) for share in SHOWN]
        lines.append([case.network, case.selector, *(f"{mean:.4f}" for mean in means), f"{overall(losses):.5f}"])
    return markdown(HEAD, lines)


def draw(rows: Sequence[Row]) -> Figure:
    """Loss over sparsity on a log scale, a panel for some layers, a line for every selector."""
    groups = grouped(measured(rows), lambda case: (case.network, case.selector))
    found = {group[0].case.selector: curves(group) for group in groups}
    layers = list(next(iter(found.values())))
    chosen = layers[:: max(1, -(-len(layers) // PANELS))]
    figure, axes = panels(len(chosen), height=3.0)
    for panel, layer in zip(axes, chosen, strict=True):
        for place, (selector, losses) in enumerate(found.items()):
            points = [max(loss, FLOOR) for loss in losses[layer]]
            panel.plot(
                [100 * share for share in SPARSITIES], points, f"{marker(place)}-", color=colour(place),
                label=selector, markersize=3, linewidth=1,
            )  # fmt: skip
        panel.set(xlabel="% of the channels removed", ylabel="relative loss", yscale="log", title=f"layer {layer}")
    legend_beside(figure, axes[0])
    return figure


def check(rows: Sequence[Row]) -> None:
    for mine in grouped(measured(rows), lambda case: case.network):
        means = {}
        for group in grouped(mine, lambda case: case.selector):
            selector, found = group[0].case.selector, curves(group)
            means[selector] = overall(found)
            for layer, losses in found.items():
                pairs = itertools.pairwise(losses)
                require(
                    all(after >= before - RISE for before, after in pairs),
                    f"{selector}, {layer}: the loss falls with sparsity: {losses}",
                )
        ours = [means[name] for name in CAP if name in means]
        if ours:
            least = min(means, key=lambda name: means[name])
            require(min(ours) <= TIE * means[least], f"{least} loses {means[least]:.5f}, CaP {min(ours):.5f}")


EXPERIMENT = Experiment("fig6", "Loss of a layer over its sparsity", cases, table, draw, check, measure)
