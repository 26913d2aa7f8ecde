"""Networks pruned in one pass: what the stages of recovery in sequence are handed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

import recoup
from recoup.graph.standalone import Standalone
from recoup.inputs.split import Split
from recoup.judge.output_error import Reference
from recoup.plan import Plan
from recoup.recovery.one_pass import recover_in_one_pass
from recoup.recovery.schedule import Schedule, make_schedule
from recoup.recovery.segments import Segment
from recoup.recovery.twin_run import TwinRun
from recoup.statistics.calibrate import Calibration
from recoup.surgery.apply import masked
from tests.test_laws import draw_keep
from tests.zoo import ZOO


@dataclass(frozen=True, eq=False)
class Bench:
    """A model with its calibration, the images, a mask and the one-pass plan for it."""

    model: nn.Module
    calibration: Calibration
    split: Split
    keep: Tensor
    start: Plan
    schedule: Schedule

    @property
    def host(self) -> Standalone:
        return self.calibration.traced.standalone.host

    @property
    def joint_steps(self) -> int:
        """Of the method."""
        return self.calibration.method.joint_steps

    @property
    def reference(self) -> Reference:
        """Held-out images as they are, not blended."""
        return Reference(self.host, [self.split.batches[place] for place in self.split.held])

    def twin(self, written: Any = None, segments: tuple[Segment, ...] = (), **options: Any) -> TwinRun:
        written = self.start.weights if written is None else written
        batches, device = self.split.batches, self.split.device
        return TwinRun(self.host, self.schedule, batches, written, device, segments=segments, **options)

    def whole(self, plan: Plan, inputs: Any) -> list[Tensor]:
        """What the network at full size returns with the plan's weights."""
        twin = masked(self.model, plan)
        with torch.no_grad():
            found = inputs.call(twin.eval())
        return list(found.values()) if isinstance(found, dict) else [found]


class Written(nn.Module):
    """Writes into a diagonal of a value that others read, which no other way to write it down can stand for.

    What the first layer makes can be pruned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)
        self.c, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.relu(self.a(x))))
        y = self.c(x)
        y.diagonal(dim1=2, dim2=3).zero_()
        return self.head((x + y).mean((2, 3)))


class Fixed(nn.Module):
    """Runs other operations for another number of samples: its graph serves one batch size only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.b(torch.relu(self.a(image[None]))) for image in x]
        return self.head(torch.cat(maps).mean((2, 3)))


class Windows(nn.Module):
    """Two layers on whole images, and two on their quarters, which are no longer in one row per image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 6, 1), nn.Linear(6, 16), nn.Linear(16, 6)
        self.c, self.d, self.head = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        x = x + self.b(torch.relu(self.a(x)))
        y = x.reshape(-1, 2, 4, 2, 4, 6).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, 6)
        y = self.d(torch.relu(self.c(y))).reshape(-1, 2, 2, 4, 4, 6)
        return self.head((x + y.permute(0, 1, 3, 2, 4, 5).reshape(-1, 8, 8, 6)).mean((1, 2)))


class Judged(nn.Module):
    """Returns class scores with a number for the whole batch and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.head(torch.relu(self.b(torch.relu(self.a(x)))))
        return x.square().mean(), x, x > 0


def fast(**options: Any) -> recoup.Fast:
    """`Fast` with other fields, or, as a class of its own, with other facts."""
    known = {field.name for field in fields(recoup.Fast)}
    facts = {name: value for name, value in options.items() if name not in known}
    kind = type("Variant", (recoup.Fast,), facts)
    return kind(**{name: value for name, value in options.items() if name in known})


def bench(model: nn.Module, batch: Any, keep: Any = None, seed: int = 3, **options: Any) -> Bench:
    """`keep` is a mask over all channels, or one by group (those not named stay whole); drawn without it."""
    split = recoup.split(model, [batch])
    traced = recoup.trace(model, batch)
    calibration = recoup.calibrate(traced, split, fast(**options))
    keep = draw_keep(traced.structure, seed) if keep is None else keep
    if not isinstance(keep, Tensor):
        masks = {group.name: torch.ones(group.width, dtype=torch.bool) for group in traced.structure.groups}
        keep = torch.cat(list({**masks, **keep}.values()))
    schedule = make_schedule(traced.standalone.host.graph, traced.structure)
    return Bench(model, calibration, split, keep, recover_in_one_pass(calibration, keep), schedule)


def zoo_bench(name: str, width: int = 6, samples: int = 40, **options: Any) -> Bench:
    return bench(ZOO[name].build(width), ZOO[name].batch(samples), **options)


class Shaped(nn.Module):
    """A map that is looked at in another shape on its way: by `reshape`, which copies it where it has to, or a view."""

    def __init__(self, way):
        super().__init__()
        self.way, self.a, self.b, self.head = way, nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x):
        x = torch.relu(self.a(x))
        y = x.flatten(1)
        x = {"none": x, "reshape": y.reshape(x.shape), "view_as": x.view_as(y).view_as(x)}[self.way]
        return self.head(torch.tanh(self.b(x)).mean((2, 3)))
