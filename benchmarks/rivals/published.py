"""What the rivals published, as data: points of top-1 lost at a share of the FLOPs removed, all after re-training.

The figures are those that Xie et al. (2021, arXiv 2108.13728) compare with. We have not checked them against the
original tables, so each says "as quoted by Xie et al."; bases are given where a second source has them.
"""

from __future__ import annotations

from dataclasses import dataclass

QUOTED = "as quoted by Xie et al. (arXiv 2108.13728)"
VGG16, RESNET50 = "VGG-16, CIFAR-10", "ResNet-50, ImageNet"


@dataclass(frozen=True, slots=True)
class Figure:
    """Points lost and FLOPs removed, both in percent; `base` is the top-1 before pruning, None if not known to us."""

    network: str
    method: str
    paper: str
    drop: float
    removed: float
    base: float | None = None
    source: str = QUOTED


PAPERS = {
    "HRank": "Lin et al. 2020, arXiv 2002.10179",
    "GAL": "Lin et al. 2019, arXiv 1903.09291",
    "DCP": "Zhuang et al. 2018, arXiv 1810.11809",
    "CAC": "Chen et al. 2020, doi 10.1109/TNNLS.2020.2979517",
    "FPGM": "He et al. 2019, arXiv 1811.00250",
    "IE": "Molchanov et al. 2019, arXiv 1906.10771",
    "MetaPruning": "Liu et al. 2019, arXiv 1903.10258",
    "ThiNet": "Luo et al. 2017, arXiv 1707.06342",
}
# Base accuracies that sources other than Xie et al. give too.
BASES = {(VGG16, "HRank"): 93.96, (RESNET50, "IE"): 76.18}
POINTS = {
    VGG16: {
        "HRank": ((0.53, 53.5), (2.73, 76.5)),
        "GAL": ((0.19, 39.6), (0.54, 45.2)),
        "DCP": ((0.31, 50.1),),
        "CAC": ((-0.43, 51.0),),
    },
    RESNET50: {
        "FPGM": ((0.56, 42.2),),
        "IE": ((1.68, 45.0),),
        "HRank": ((1.17, 43.8), (4.17, 62.1), (7.05, 76.0)),
        "GAL": ((4.20, 43.0), (6.27, 61.4), (4.35, 55.0), (6.84, 72.9)),
        "MetaPruning": ((0.40, 26.8), (1.20, 51.2)),
        "ThiNet": ((1.27, 42.0), (3.27, 55.8), (7.13, 71.5)),
        "DCP": ((1.02, 51.6),),
    },
}


def figures(network: str) -> list[Figure]:
    """All published figures for a network, by FLOPs removed."""
    found = [
        Figure(network, method, PAPERS[method], drop, removed, BASES.get((network, method)))
        for method, points in POINTS[network].items()
        for drop, removed in points
    ]
    return sorted(found, key=lambda figure: figure.removed)


def rows(network: str) -> list[str]:
    """The lines of a Markdown table of all published figures for a network."""
    lines = ["| method | paper | base | top-1 drop | FLOPs drop | source |", "|---|---|---|---|---|---|"]
    for figure in figures(network):
        base = "-" if figure.base is None else f"{figure.base:.2f}"
        cells = (figure.method, figure.paper, base, f"{figure.drop:.2f}", f"{figure.removed:.1f}", figure.source)
        lines.append(f"| {' | '.join(cells)} |")
    return lines
