"""Table III: how much goes at a tolerance of two points when few images, other images or only noise calibrate.

Varies the calibration images (shares of the network's own, another source, N(0, 1) noise) and the method. Validation
images are the network's own throughout, as in the paper: what is "data-free" still searches on real labels. The paper
has VGG-19 on ImageNet and percent of ImageNet; here a share is one of the 40,000 training images of CIFAR-10.

Asserts: no search exceeds its tolerance; noise removes less than the largest number of real images.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.paper.cases import BEST, PAPER, Case, Row, against, average, grouped, markdown, measured, shown, values
from benchmarks.paper.checks import require, require_within_tolerance
from benchmarks.paper.drawing import INK, colour, panels
from benchmarks.paper.experiment import Experiment, Options
from benchmarks.paper.opening import CIFAR_TRAINING, NOISE, OTHER, OWN, at_hand
from benchmarks.paper.published import LIMITED_DATA

PERCENT = (100, 50, 20, 10, 5, 1, 0.2)
TOLERANCE = 2.0
# Images of another source, and of noise: as many as these shares of the network's own, in percent.
FOREIGN = {OTHER: (5, 1), NOISE: (50, 5)}
NAMES = {OWN: "own images", OTHER: "another source", NOISE: "noise"}
HEAD = (
    "network", "method", "images", "count", "FLOPs removed, %: paper | ours | difference", "validation drop",
    "test drop", "KL",
)  # fmt: skip


def cases(options: Options) -> list[Case]:
    return [
        Case(network, method, seed, TOLERANCE, data=data)
        for network in at_hand(("vgg16", "vgg19"), options)
        for seed in range(options.seeds or 1)
        for data in data_of(options)
        for method in options.methods or (PAPER, BEST)
    ]


def data_of(options: Options) -> list[str]:
    """The calibration images to compare, as "source:count"; another source only where one is given."""
    if options.smoke:
        return [f"{OWN}:1000", f"{OWN}:200", f"{OTHER}:1000", f"{NOISE}:1000"]
    own = [f"{OWN}:{round(CIFAR_TRAINING * percent / 100)}" for percent in PERCENT]
    others = (OTHER, NOISE) if options.other_source else (NOISE,)
    return own + [f"{source}:{round(CIFAR_TRAINING * p / 100)}" for source in others for p in FOREIGN[source]]


def percent_of(data: str) -> str:
    """The share of CIFAR-10's training images that the count is, in percent."""
    return f"{100 * int(data.partition(':')[2]) / CIFAR_TRAINING:g}"


def table(rows: Sequence[Row]) -> str:
    lines = []
    for mine in grouped(rows, lambda case: (case.network, case.method, case.data)):
        case = mine[0].case
        source, _, count = case.data.partition(":")
        published = LIMITED_DATA[source].get(percent_of(case.data)) if case.method == PAPER else None
        removed = against(mine, "flops", published)
        lines.append(
            [case.network, case.method, NAMES[source], f"{int(count):,}", removed]
            + [shown(mine, of, form) for of, form in (("validation_drop", ".2f"), ("test_drop", ".2f"), ("kl", ".3f"))]
        )
    return markdown(HEAD, lines)


def draw(rows: Sequence[Row]) -> Figure:
    """FLOPs removed by the number of images, a line for every source and method."""
    networks = grouped(measured(rows), lambda case: case.network)
    figure, axes = panels(len(networks), columns=2, height=3.6)
    for panel, mine in zip(axes, networks, strict=True):
        for place, method in enumerate(grouped(mine, lambda case: case.method)):
            for style, source in zip(("o-", "s--", "x:"), NAMES, strict=True):
                found = [row for row in method if row.case.data.startswith(source)]
                groups = sorted(grouped(found, lambda case: case.data), key=_count)
                points = [average(group, "flops") for group in groups]
                label = f"{method[0].case.method}, {NAMES[source]}"
                if points:
                    panel.plot([_count(g) for g in groups], points, style, color=colour(place), label=label)
        panel.set(xlabel="calibration images", ylabel="% of the FLOPs removed", xscale="log")
        panel.set_title(f"{mine[0].case.network}, tolerance {TOLERANCE:g}")
        panel.axhline(0, color=INK, linewidth=0.3)
        panel.legend(fontsize=7)
    return figure


def _count(group: Sequence[Row]) -> int:
    return int(group[0].case.data.partition(":")[2])


def check(rows: Sequence[Row]) -> None:
    require_within_tolerance(rows)
    for mine in grouped(measured(rows, method=PAPER), lambda case: (case.network, case.seed)):
        noise = values([row for row in mine if row.case.data.startswith(NOISE)], "flops")
        real = [row for row in mine if row.case.data.startswith(OWN)]
        if noise and real:
            most = max(real, key=lambda row: _count([row])).outcome.flops or 0.0
            case = mine[0].case
            require(max(noise) < most, f"{case.network}: noise removes {max(noise):.1f} %, real images {most:.1f} %")


EXPERIMENT = Experiment("table3", "FLOPs removed by calibration images", cases, table, draw, check)
