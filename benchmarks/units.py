"""Hidden units of recurrent networks and of experts: what is left of one when half or a quarter of them stay.

    python -m benchmarks.units --out benchmarks/results/units.json --docs docs

The networks read handwritten digits (of scikit-learn, 8 x 8), recurrent ones row by row, and are trained here, in
seconds. Magnitude is a cut by the size of weights, and nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import recoup
from benchmarks.machine import timed, versions
from benchmarks.pages import publish
from benchmarks.rows import Plain, Store, alike, mean
from recoup.config import Method

ROWS, PIXELS, CLASSES = 8, 8, 10
TRAINED, EPOCHS, RATE, BATCH = 1300, 25, 3e-3, 64
KEPT = (0.5, 0.25)
METHODS: Mapping[str, Method] = {
    "magnitude": recoup.Paper(selector="l2", weighting="none", recovery="none", classifier=True),
    "fast": recoup.Fast(),
    "best": recoup.Best(),
    "best, refined": recoup.Best(refine=10.0),
}


class Reader(nn.Module):
    """Reads a picture row by row; a linear layer tells the class by the hidden units of the last step."""

    def __init__(
        self, kind: Callable[..., nn.Module], hidden: int, layers: int = 1, *, both_ways: bool = False
    ) -> None:
        """Random weights."""
        super().__init__()
        self.cells = kind(PIXELS, hidden, layers, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(hidden * (1 + both_ways), CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.head(self.cells(images)[0][:, -1])
        return scores


class Mixture(nn.Module):
    """Experts that all look at the whole picture; gates weigh what they say."""

    def __init__(self, experts: int, hidden: int) -> None:
        """Random weights."""
        super().__init__()
        size = ROWS * PIXELS
        self.gates = nn.Linear(size, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)) for _ in range(experts)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        images = images.flatten(1)
        said = torch.stack([expert(images) for expert in self.experts], dim=1)
        scores: Tensor = (self.gates(images).softmax(dim=1)[..., None] * said).sum(dim=1)
        return scores


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "LSTM, 64": lambda: Reader(nn.LSTM, 64),
    "GRU, 64": lambda: Reader(nn.GRU, 64),
    "LSTM, 2 layers of 2 x 32": lambda: Reader(nn.LSTM, 32, 2, both_ways=True),
    "8 experts of 16": lambda: Mixture(8, 16),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A network, a method, the share of the hidden units that stay, and the seed it was trained from."""

    network: str
    method: str
    share: float
    seed: int


@dataclass(frozen=True, slots=True)
class Row:
    """Top-1 on test images before and after, in percent, the share of the MACs that is left, and seconds of pruning."""

    case: Case
    macs: float
    before: float
    after: float
    seconds: float

    def plain(self) -> Plain:
        """For the file."""
        return {**asdict(self.case), **{name: value for name, value in asdict(self).items() if name != "case"}}


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """Images (n, rows, pixels) and labels, to train and calibrate on, and to test on."""

    images: Tensor
    labels: Tensor
    test: tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", type=Path, help="folder whose more-results.md gets the table")
    options = parser.parse_args()
    store = Store(options.out, versions(), lambda row: Case(*(row[name] for name in Case.__dataclass_fields__)))
    for name in NETWORKS:
        for seed in range(options.seeds):
            cases = store.waiting(Case(name, method, share, seed) for share in KEPT for method in METHODS)
            for row in rows(NETWORKS[name], cases, seed) if cases else ():
                store.add(row)
    publish(table(store.rows), "units", None if options.docs is None else options.docs / "more-results.md")


def rows(network: Callable[[], nn.Module], cases: Sequence[Case], seed: int) -> Iterator[Row]:
    """The network is trained once for all cases."""
    digits = shuffled_digits(seed)
    model = trained(network, digits, seed)
    before = accuracy(model, digits)
    for case in cases:
        seconds: dict[str, float] = {}
        result = timed(seconds, "prune", lambda case=case: half_of(model, digits, case))  # type: ignore[misc]  # bound at once
        kept = 1 - result.report.macs_removed
        yield Row(case, kept, before, accuracy(result.model, digits), seconds["prune"])


def half_of(model: nn.Module, digits: Digits, case: Case) -> recoup.Result:
    """The network with its share of the hidden units."""
    calibration = list(digits.images.split(100))
    return recoup.prune(model, calibration, budget=recoup.Budget(width=case.share), method=METHODS[case.method])


def shuffled_digits(seed: int) -> Digits:
    """Split by the seed."""
    values, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(values, dtype=torch.float32).view(-1, ROWS, PIXELS)[order] / 16
    labels = torch.tensor(classes)[order]
    return Digits(images[:TRAINED], labels[:TRAINED], (images[TRAINED:], labels[TRAINED:]))


def trained(network: Callable[[], nn.Module], digits: Digits, seed: int) -> nn.Module:
    """Adam, a fixed number of epochs."""
    torch.manual_seed(seed)
    model = network()
    optimiser = torch.optim.Adam(model.parameters(), RATE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(TRAINED).split(BATCH):
            optimiser.zero_grad()
            F.cross_entropy(model(digits.images[batch]), digits.labels[batch]).backward()
            optimiser.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Top-1 on the test images, in percent."""
    images, labels = digits.test
    return 100 * float((model(images).argmax(dim=1) == labels).float().mean())


def table(found: Sequence[Plain]) -> str:
    """A line for every network and share, methods side by side; means over the seeds."""
    lines = [
        f"| network | hidden units kept | MACs kept | whole | {' | '.join(METHODS)} |",
        "|---" * (4 + len(METHODS)) + "|",
    ]
    for group in alike(found, "network", "share"):
        by_method = [mean([row for row in group if row["method"] == method], "after") for method in METHODS]
        first, macs = group[0], mean([{**row, "macs": 100 * row["macs"]} for row in group], "macs", ".0f")
        cells = [first["network"], f"{first['share']:.0%}", f"{macs} %", mean(group, "before"), *by_method]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
