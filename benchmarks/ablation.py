"""What every ingredient of `recoup.Best` is worth: each of them switched alone, at one share of the MACs.

    python -m benchmarks.ablation --cifar DIR --checkpoints DIR --imagenet DIR --device cuda

VGG-16 loses 60 % of its MACs, ResNet-56 50 %, both on CIFAR-10; EfficientNet-Lite0 loses 25 % on ImageNet (packages
and folders as in benchmarks/efficientnet.py). Variants:

- best: the method as it is.
- no joint refits, one joint step: `joint_steps` of 0 and 1 in the place of 4.
- single blocks: joint refits of one block at a time, instead of three, where blocks end in an addition.
- one round: the groups are measured in the original network only, not once more in the pruned one.
- recovery once: layers are refitted from the statistics of the original network alone.
- uniform widths: the same share of every group, instead of widths by measured output error.
- ridge fixed at 1e-4: held-out images have no choice.
- forward selection: channels are chosen by growing the kept set, instead of shrinking it.
- slope weights: positions are weighed by the slope of what follows the layer.
- error at one width: the groups are measured with half of their channels, not with three quarters and one quarter.
- error on half the images: the groups are measured on every other held-out image.
- error on plain images: the groups are measured on held-out images as they are, not blended.
- flipped images too: every image that is fitted to is there in its mirror image too. Held-out images stay as they are.
- batch norm: the result's batch norms are estimated once more on all calibration images, as other tools do.

Points lost and KL are those of validation and test images; Lite0 has only validation images.
Choices go by validation and held-out images. The held-out output error is that of the plan on the same blended
calibration images in every row. Seconds are those of the whole way, as if the row had been made alone: stages that a
variant has in common with `best` are run once and counted again.

Rows are kept in `--out` as they come, and a second call goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

import recoup
from benchmarks.baselines import reestimated
from benchmarks.machine import timed
from benchmarks.networks import (
    CIFAR_IMAGES,
    LITE0,
    Batches,
    Bench,
    Ranked,
    add_arguments,
    check_places,
    measure_all,
    ranked,
    removed,
    verified,
)
from benchmarks.rows import Case, Outcome, Plain, Row, Store, alike, mean, mean_and_values
from recoup.allocation.measured import LEVELS, Allocator, cost_model, keep_within, measure_errors
from recoup.allocation.rounds import keep_in_rounds
from recoup.allocation.uniform import keep_uniformly
from recoup.allocation.widths import widths_for
from recoup.judge.output_error import Reference
from recoup.recovery.choose import recover_quickly, reference_of

SHARES = {"vgg16": 0.6, "resnet56": 0.5, LITE0: 0.25}
RESNET20 = {"resnet20": 0.5}
OUT = Path(__file__).parent / "results" / "ablation.json"
Stage = Literal["calibrate", "rank", "measure", "allocate", "recover", "finish"]
STAGES: tuple[Stage, ...] = ("calibrate", "rank", "measure", "allocate", "recover", "finish")


@dataclass(frozen=True, slots=True)
class Variant:
    """One switch, and the first stage that notices.

    `switches` are what the method is, attributes of its class; `fields` are options that it has. All others are beside
    the method.
    """

    name: str
    since: Stage
    switches: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    uniform: bool = False
    half: bool = False
    plain: bool = False
    mirrored: bool = False
    levels: tuple[float, ...] = LEVELS
    estimated: bool = False

    def redoes(self, stage: Stage) -> bool:
        """Whether a stage has to be run for this variant alone."""
        return STAGES.index(stage) >= STAGES.index(self.since)

    def method(self, base: recoup.Best) -> recoup.Best:
        """The method with the switch, otherwise as `base`."""
        kind = type("Best", (recoup.Best,), dict(self.switches)) if self.switches else recoup.Best
        return cast("recoup.Best", kind(seed=base.seed, **self.fields))


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("best", "finish"),
        Variant("no joint refits", "recover", {"joint_steps": 0}),
        Variant("one joint step", "recover", {"joint_steps": 1}),
        Variant("single blocks", "recover", {"span": 1}),
        Variant("one round", "allocate", {"rounds": 1}),
        Variant("recovery once", "allocate", {"ridges": (), "joint_steps": 0}),
        Variant("uniform widths", "allocate", uniform=True),
        Variant("ridge fixed at 1e-4", "allocate", {"ridges": (1e-4,)}),
        Variant("forward selection", "rank", fields={"selector": "forward"}),
        Variant("slope weights", "calibrate", {"weighting": "slope"}),
        Variant("error at one width", "measure", levels=(0.5,)),
        Variant("error on half the images", "measure", half=True),
        Variant("error on plain images", "measure", plain=True),
        Variant("flipped images too", "calibrate", mirrored=True),
        Variant("batch norm", "finish", estimated=True),
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """All that comes before widths are decided, and the seconds of every stage."""

    seen: recoup.Calibration
    method: recoup.Best
    rankings: Mapping[str, recoup.Ranking]
    allocator: Allocator
    seconds: Mapping[str, float]

    def with_method(self, method: recoup.Best) -> Measured:
        """The same with another method, which only widths and recovery may notice; it remembers nothing."""
        return replace(self, method=method, seen=replace(self.seen, method=method))


class Shared:
    """What `best` decides at a share of the MACs: made when a variant first asks for it, its seconds remembered."""

    def __init__(self, base: Measured) -> None:
        self.base = base
        self._made: dict[tuple[Stage, float], tuple[Any, float]] = {}

    def keep(self, share: float, stages: dict[str, float]) -> Tensor:
        """The mask of `best`; `stages` gets the seconds of allocating."""
        mask: Tensor = self._once("allocate", share, stages, lambda: allocate(self.base, share))
        return mask

    def recovered(self, share: float, stages: dict[str, float]) -> recoup.Recovered:
        """The plan of `best`; `stages` gets the seconds of allocating and of recovering."""
        keep = self.keep(share, stages)
        found: recoup.Recovered = self._once("recover", share, stages, lambda: recoup.recover(self.base.seen, keep))
        return found

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
    shared = Shared(measured(bench, bench.calibration(seed), recoup.Best(seed=seed)))
    yield from (Row(case, outcome(bench, shared, case)) for case in here)


def measured(bench: Bench, batches: Batches, method: recoup.Best) -> Measured:
    """Everything up to the errors of the groups, as `best` does it."""
    before = ranked(bench.model, batches, method)
    seconds = dict(before.seconds)
    allocator = timed(seconds, "measure", lambda: allocator_of(before, reference_of(before.seen), LEVELS))
    return Measured(before.seen, method, before.rankings, allocator, seconds)


def allocator_of(before: Ranked, reference: Reference, levels: Sequence[float]) -> Allocator:
    """The errors of all groups at these levels, and what widths cost."""
    seen, rankings = before.seen, before.rankings
    widths = widths_for(seen, rankings)
    curves = measure_errors(seen, rankings, widths, reference, levels=levels)
    return Allocator(widths, curves, cost_model(seen, widths))


def outcome(bench: Bench, shared: Shared, case: Case) -> Outcome:
    """What one variant makes of the network."""
    assert case.share is not None
    variant, share = VARIANTS[case.method], case.share
    mine, stages = varied(shared.base, variant), dict[str, float]()
    if variant.redoes("allocate"):
        decide = allocate_uniformly if variant.uniform else allocate
        keep = timed(stages, "allocate", lambda: decide(mine, share))
    else:
        keep = shared.keep(share, stages)
    if variant.redoes("recover"):
        recovered = timed(stages, "recover", lambda: recoup.recover(mine.seen, keep))
    else:
        recovered = shared.recovered(share, stages)
    seconds = {**mine.seconds, **stages}
    if variant.estimated:
        return estimated(bench, mine, keep, recovered, seconds)
    return bench.outcome_of(mine.seen, keep, recovered, seconds)


def estimated(
    bench: Bench, mine: Measured, keep: Tensor, recovered: recoup.Recovered, seconds: dict[str, float]
) -> Outcome:
    """The smaller network after its batch norms have seen all calibration images; it has no plan, and no error."""
    smaller = timed(seconds, "apply", lambda: verified(mine.seen, recovered.plan))
    batches = [(batch.args[0], batch.args[0][:0]) for batch in mine.seen.split.batches]
    again = timed(seconds, "batch norm", lambda: reestimated(smaller, batches))
    return bench.outcome(again, removed(mine.seen, keep), seconds)


def varied(base: Measured, variant: Variant) -> Measured:
    """What comes before the widths, with one thing switched; stages that do not notice are those of `base`."""
    seconds, method = dict(base.seconds), variant.method(base.method)
    mine = base.with_method(method)
    seen, rankings, allocator = mine.seen, base.rankings, base.allocator
    split = mirrored(seen.split) if variant.mirrored else seen.split
    if variant.redoes("calibrate"):
        seen = timed(seconds, "calibrate", lambda: recoup.calibrate(seen.traced, split, method))
    if variant.redoes("rank"):
        rankings = timed(seconds, "rank", lambda: recoup.rank(seen))
    if variant.redoes("measure"):
        before, reference = Ranked(seen, method, rankings, seconds), measuring_reference(base, variant)
        allocator = timed(seconds, "measure", lambda: allocator_of(before, reference, variant.levels))
    if variant.uniform:
        del seconds["measure"]
    return Measured(seen, method, rankings, allocator, seconds)


def allocate(mine: Measured, share: float) -> Tensor:
    """The mask that removes `share` of the MACs: what `recoup.allocate` decides, given the errors of the groups."""
    budget = recoup.Budget(macs=1 - share)
    return keep_in_rounds(
        mine.allocator,
        lambda allocator: keep_within(allocator, budget),
        lambda keep: recover_quickly(mine.seen, keep),
        mine.method.rounds,
    )


def allocate_uniformly(mine: Measured, share: float) -> Tensor:
    """The mask that removes `share` of the MACs with the same share of every group."""
    return keep_uniformly(mine.seen, mine.allocator.widths, recoup.Budget(macs=1 - share))


def measuring_reference(base: Measured, variant: Variant) -> Reference:
    """The original's outputs on the images that groups are measured on."""
    if variant.half:
        split = base.seen.split
        return reference_of(base.seen).part(sum(split.batches[place].size for place in split.held) // 2)
    return plain_reference(base) if variant.plain else reference_of(base.seen)


def plain_reference(base: Measured) -> Reference:
    """The original's outputs on held-out images that are not blended."""
    split = base.seen.split
    held = [split.batches[place].to(split.device) for place in split.held]
    return Reference(base.seen.traced.standalone.host, held, base.method.outputs)


def mirrored(split: recoup.Split) -> recoup.Split:
    """The split with the mirror images of what is fitted to; were held-out images mirrored too, nothing would compare.

    Appended to the batches before some images are held out, mirror images would be held out whose twins are fitted to.
    """

    def with_twins(images: Tensor) -> Tensor:
        return torch.cat([images, images.flip(-1)])

    fit = set(split.fit)
    batches = [batch.map(with_twins) if place in fit else batch for place, batch in enumerate(split.batches)]
    return replace(split, batches=tuple(batches))


def table(found: Sequence[Plain]) -> str:
    """Averages over calibration samples, as Markdown, by network and variant."""
    lines = [
        "| network | MACs removed | variant | lost on validation | lost on test | KL on validation | KL | "
        "held-out output error | time |",
        "|---" * 9 + "|",
    ]
    order = list(VARIANTS)
    for network in alike(found, "network"):
        network.sort(key=lambda row: order.index(row["method"]))
        bests = [row["seconds"] for row in network if row["method"] == order[0] and row["device"] == "CPU"]
        lines += [line(mine, bests) for mine in alike(network, "share", "method")]
    return "\n".join(lines)


def line(mine: Sequence[Plain], bests: Sequence[float]) -> str:
    """The averages of one variant; `bests` are the seconds of `best` on the same network, on a CPU."""
    return (
        f"| {mine[0]['network']} | {mean(mine, 'removed', '.1%')} | {mine[0]['method']} | "
        f"{mean_and_values(mine, 'validation_drop')} | {mean_and_values(mine, 'test_drop')} | "
        f"{mean(mine, 'validation_kl', '.4f')} | {mean(mine, 'kl', '.4f')} | {mean(mine, 'output_error', '.4f')} | "
        f"{time(mine, bests)} |"
    )


def time(mine: Sequence[Plain], bests: Sequence[float]) -> str:
    """Seconds on a GPU; those of a CPU say little elsewhere, and are given relative to those of `best`."""
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
