"""What every ingredient of the preset `best` is worth: each of them switched alone, at one share of the MACs.

    python -m benchmarks.ablation --cifar DIR --checkpoints DIR --imagenet DIR --device cuda

VGG-16 loses 60 % of its MACs, ResNet-56 50 %, both on CIFAR-10; EfficientNet-Lite0 loses 25 % on ImageNet (packages
and folders as in benchmarks/efficientnet.py). Variants:

- best: the preset.
- no joint refits, one joint step: `joint` of 0 and 1 in the place of 4.
- single blocks: joint refits of one block at a time, instead of three, where blocks end in an addition.
- one round: the groups are measured in the original network only, not once more in the pruned one.
- recovery once: layers are refitted from the statistics of the original network alone.
- uniform widths: the same share of every group, instead of widths by measured harm.
- ridge fixed at 1e-4: held-out images have no choice.
- forward selection: channels are chosen by growing the kept set, instead of shrinking it.
- slope weights: positions are weighed by the slope of what follows the layer.
- harm at one width: the groups are measured with half of their channels, not with three quarters and one quarter.
- harm on half the images: the groups are measured on every other held-out image.
- harm on plain images: the groups are measured on held-out images as they are, not blended.
- flipped images too: every image that is fitted to is there in its mirror image too. Held-out images stay as they are.
- batch norm: the result's batch norms are estimated once more on all calibration images, as other tools do.

Points lost and KL are those of validation and test images; Lite0 has only validation images.
Choices go by validation and held-out images. Held-out harm is that of the plan on the same blended calibration images
in every row. Seconds are those of the whole way, as if the row had been made alone: stages that a variant has in common
with `best` are run once and counted again.

Rows are kept in `--out` as they come, and a second call goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import recoup
from benchmarks.baselines import reestimated
from benchmarks.networks import CIFAR_IMAGES, LITE0, Bench, add_arguments, check_places, measure_all
from benchmarks.paper import timed
from benchmarks.rows import Case, Outcome, Plain, Row, Store, alike, mean, mean_and_values
from benchmarks.stages import Prepared, fitting, prepare
from recoup.calibrate import calibrate
from recoup.judging.harm import Reference
from recoup.judging.sample import Sample
from recoup.search import LEVELS, allocator, fit_budget
from recoup.settings import Budget, find_preset
from recoup.structure.verify import prove
from recoup.variants import Chosen

SHARES = {"vgg16": 0.6, "resnet56": 0.5, LITE0: 0.25}
RESNET20 = {"resnet20": 0.5}
OUT = Path(__file__).parent / "results" / "ablation.json"
Stage = Literal["calibrate", "select", "allocate", "widths", "recover", "finish"]
STAGES: tuple[Stage, ...] = ("calibrate", "select", "allocate", "widths", "recover", "finish")


@dataclass(frozen=True, slots=True)
class Variant:
    """One switch: settings that change, or something beside the settings, and the first stage that notices."""

    name: str
    since: Stage
    changes: Mapping[str, Any] = field(default_factory=dict)
    uniform: bool = False
    half: bool = False
    plain: bool = False
    mirrored: bool = False
    levels: tuple[float, ...] = LEVELS
    estimated: bool = False

    def redoes(self, stage: Stage) -> bool:
        """Whether a stage has to be run for this variant alone."""
        return STAGES.index(stage) >= STAGES.index(self.since)


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("best", "finish"),
        Variant("no joint refits", "recover", {"joint": 0}),
        Variant("one joint step", "recover", {"joint": 1}),
        Variant("single blocks", "recover", {"span": 1}),
        Variant("one round", "widths", {"rounds": 1}),
        Variant("recovery once", "widths", {"recovery": "once", "joint": 0}),
        Variant("uniform widths", "widths", uniform=True),
        Variant("ridge fixed at 1e-4", "widths", {"ridges": (1e-4,)}),
        Variant("forward selection", "select", {"selector": "forward"}),
        Variant("slope weights", "calibrate", {"weighting": "slope"}),
        Variant("harm at one width", "allocate", levels=(0.5,)),
        Variant("harm on half the images", "allocate", half=True),
        Variant("harm on plain images", "allocate", plain=True),
        Variant("flipped images too", "calibrate", mirrored=True),
        Variant("batch norm", "finish", estimated=True),
    )
}


class Shared:
    """What the preset decides at a share of the MACs: made when a variant first asks for it, its seconds remembered."""

    def __init__(self, base: Prepared) -> None:
        self.base = base
        self._made: dict[tuple[Stage, float], tuple[Any, float]] = {}

    def keep(self, share: float, stages: dict[str, float]) -> Tensor:
        """The mask of the preset; `stages` gets the seconds of the widths."""
        mask: Tensor = self._once("widths", share, stages, lambda: self.base.keep(share))
        return mask

    def plan(self, share: float, stages: dict[str, float]) -> Chosen:
        """The plan of the preset; `stages` gets the seconds of the widths and of recovery."""
        keep = self.keep(share, stages)
        chosen: Chosen = self._once("recover", share, stages, lambda: self.base.recoverer().plan(keep))
        return chosen

    def _once(self, stage: Stage, share: float, stages: dict[str, float], work: Callable[[], Any]) -> Any:
        if (stage, share) not in self._made:
            result = timed(stages, stage, work)
            self._made[stage, share] = result, stages[stage]
        result, stages[stage] = self._made[stage, share]
        return result


def main() -> None:
    options = parse()
    store = Store(options.out, common_settings(options))
    measure_all(store, options, cases, rows)
    print(table(store.rows))


def cases(network: str, options: argparse.Namespace) -> list[Case]:
    """What there is to do for a network, in order."""
    share = options.share or {**SHARES, **RESNET20}[network]
    return [Case(network, name, seed, share) for seed in range(options.seeds) for name in options.variants]


def rows(bench: Bench, seed: int, here: Sequence[Case], _: argparse.Namespace) -> Iterator[Row]:
    """The rows of the cases of one calibration sample, one by one as they are done."""
    shared = Shared(prepare(bench.model, bench.calibration(seed), replace(find_preset("best"), seed=seed)))
    yield from (Row(case, outcome(bench, shared, case)) for case in here)


def outcome(bench: Bench, shared: Shared, case: Case) -> Outcome:
    """What one variant makes of the network."""
    assert case.share is not None
    variant, share = VARIANTS[case.method], case.share
    prepared, stages = varied(shared.base, variant), dict[str, float]()
    if variant.redoes("widths"):
        keep = timed(stages, "widths", lambda: uniform(prepared, share) if variant.uniform else prepared.keep(share))
    else:
        keep = shared.keep(share, stages)
    if variant.redoes("recover"):
        chosen = timed(stages, "recover", lambda: prepared.recoverer().plan(keep))
    else:
        chosen = shared.plan(share, stages)
    if variant.estimated:
        return estimated(bench, prepared, keep, chosen, stages)
    return prepared.outcome(bench, keep, chosen, stages)


def estimated(bench: Bench, prepared: Prepared, keep: Tensor, chosen: Chosen, stages: dict[str, float]) -> Outcome:
    """The smaller network after its batch norms have seen all calibration images; it has no plan, and no harm."""
    seconds = {**prepared.seconds, **stages}
    smaller, _ = timed(seconds, "prove", lambda: prove(prepared.model, chosen.plan, prepared.traced.inputs))
    batches = [(batch.args[0], batch.args[0][:0]) for batch in prepared.sample.batches]
    again = timed(seconds, "batch norm", lambda: reestimated(smaller, batches))
    return bench.outcome(again, prepared.removed(keep), seconds)


def varied(base: Prepared, variant: Variant) -> Prepared:
    """What comes before the widths, with one thing switched; stages that do not notice are those of `base`."""
    model, seconds = base.model, dict(base.seconds)
    sample = mirrored(base.sample) if variant.mirrored else base.sample
    seen, rankings, allocation = base.with_settings(**variant.changes).seen, base.rankings, base.allocation
    if variant.redoes("calibrate"):
        seen = timed(seconds, "calibrate", lambda: calibrate(model, base.traced, fitting(sample), seen.settings))
    if variant.redoes("select"):
        rankings = timed(seconds, "select", lambda: recoup.select(seen))
    if variant.redoes("allocate"):
        reference = reference_of(base, variant)
        allocation = timed(
            seconds, "allocate", lambda: allocator(model, seen, rankings, reference, levels=variant.levels)
        )
    if variant.uniform:
        del seconds["allocate"]
    return Prepared(model, base.traced, sample, base.reference, seen, rankings, allocation, seconds)


def uniform(prepared: Prepared, share: float) -> Tensor:
    """The mask that removes `share` of the MACs with the same share of every group."""
    return fit_budget(prepared.model, prepared.seen, prepared.rankings, Budget(macs=1 - share))


def reference_of(base: Prepared, variant: Variant) -> Reference:
    """The original's outputs on the images that groups are measured on."""
    if variant.half:
        return base.reference.part(sum(base.sample.batches[place].size for place in base.sample.held) // 2)
    return plain_reference(base) if variant.plain else base.reference


def plain_reference(base: Prepared) -> Reference:
    """The original's outputs on held-out images that are not blended."""
    sample = base.sample
    held = [sample.batches[place].to(sample.device) for place in sample.held]
    return Reference(base.traced.standalone.host, held, base.seen.settings.outputs)


def mirrored(sample: Sample) -> Sample:
    """The sample with the mirror images of what is fitted to; were held-out images mirrored too, nothing would compare.

    Appended to the batches before some images are held out, mirror images would be held out whose twins are fitted to.
    """

    def with_twins(images: Tensor) -> Tensor:
        return torch.cat([images, images.flip(-1)])

    seen = set(sample.seen)
    batches = [batch.map(with_twins) if place in seen else batch for place, batch in enumerate(sample.batches)]
    return replace(sample, batches=tuple(batches))


def table(found: Sequence[Plain]) -> str:
    """Averages over calibration samples, as Markdown, by network and variant."""
    lines = [
        "| network | MACs removed | variant | lost on validation | lost on test | KL on validation | KL | "
        "held-out harm | time |",
        "|---" * 9 + "|",
    ]
    order = list(VARIANTS)
    for network in alike(found, "network"):
        network.sort(key=lambda row: order.index(row["method"]))
        bests = [row["seconds"] for row in network if row["method"] == order[0] and row["device"] == "CPU"]
        lines += [line(mine, bests) for mine in alike(network, "share", "method")]
    return "\n".join(lines)


def line(mine: Sequence[Plain], bests: Sequence[float]) -> str:
    """The averages of one variant; `bests` are the seconds of the preset on the same network, on a CPU."""
    return (
        f"| {mine[0]['network']} | {mean(mine, 'removed', '.1%')} | {mine[0]['method']} | "
        f"{mean_and_values(mine, 'validation_drop')} | {mean_and_values(mine, 'test_drop')} | "
        f"{mean(mine, 'validation_kl', '.4f')} | {mean(mine, 'kl', '.4f')} | {mean(mine, 'harm', '.4f')} | "
        f"{time(mine, bests)} |"
    )


def time(mine: Sequence[Plain], bests: Sequence[float]) -> str:
    """Seconds on a GPU; those of a CPU say little elsewhere, and are given relative to the preset's."""
    if any(row["device"] != "CPU" for row in mine):
        return f"{mean(mine, 'seconds', '.1f')} s"
    if not bests:
        return "-"
    return f"{sum(row['seconds'] for row in mine) / len(mine) / (sum(bests) / len(bests)):.2f} of best's"


def common_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What must not differ between the rows of one file."""
    return {name: getattr(options, name) for name in ("images", "validation_images", "test_images")}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--imagenet", default=os.environ.get("RECOUP_IMAGENET"), help="folder as for EfficientNet")
    parser.add_argument("--networks", nargs="+", default=list(SHARES), choices=[*SHARES, *RESNET20])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--share", type=float, help="of the MACs to remove; each network's own if not said")
    parser.add_argument("--seeds", type=int, default=1, help="calibration samples")
    parser.add_argument("--images", type=int, help=f"for calibration; {CIFAR_IMAGES} or all of ImageNet if not said")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(words)
    check_places(parser, options)
    return options


if __name__ == "__main__":
    main()
