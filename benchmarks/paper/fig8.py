"""Figure 8: sparsity per layer of one form of network, trained for different images.

Varies the data set. The paper has VGG-16 on CIFAR-10 and on ImageNet. Here are VGG-16 on CIFAR-10, the same form
trained in the run on digits of scikit-learn at 32 pixels, and VGG-16 on ImageNet for whoever has images and weights.

Asserts: every network stays within the tolerance; the layers are the same, what goes of them is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.paper.cases import Case, Row, grouped, measured
from benchmarks.paper.checks import require, require_within_tolerance
from benchmarks.paper.experiment import Experiment, Options
from benchmarks.paper.opening import at_hand
from benchmarks.paper.sparsity import draw_profiles, profile, sparsity_table

DATA = {
    "vgg16": "CIFAR-10",
    "vgg16-digits": "digits",
    "vgg16-imagenet": "ImageNet",
    "small-vgg": "digits",
    "small-vgg-stripes": "stripes",
}


def cases(options: Options) -> list[Case]:
    return [
        Case(network, seed=seed, tolerance=tolerance)
        for network in at_hand(("vgg16", "vgg16-digits", "vgg16-imagenet"), options)
        for seed in range(options.seeds or 1)
        for tolerance in options.tolerances or ((4.0,) if options.smoke else (2.0,))
    ]


def data_of(case: Case) -> str:
    """The name of the line."""
    return DATA.get(case.network, case.network)


def check(rows: Sequence[Row]) -> None:
    require_within_tolerance(rows)
    for mine in grouped(measured(rows), lambda case: case.tolerance):
        networks = grouped(mine, lambda case: case.network)
        profiles = [profile(group) for group in networks]
        require(len({len(each) for each in profiles}) == 1, "the networks do not have the same number of layers")
        different = {tuple(each) for each in profiles}
        require(len(different) > 1 or len(networks) == 1, "the data set decides nothing")


EXPERIMENT = Experiment(
    "fig8",
    "Sparsity per layer by data set",
    cases,
    partial(sparsity_table, what="data set", label=data_of),
    partial(
        draw_profiles,
        panel_of=lambda case: case.tolerance,
        label=data_of,
        title=lambda case: f"tolerance {case.tolerance:g}",
    ),
    check,
)
