"""Code under autocast: written out where that changes nothing, one operation otherwise."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import recoup


class Region(nn.Module):
    """Two convolutions under autocast, which is on or off."""

    def __init__(self, *, is_on: bool) -> None:
        super().__init__()
        self.is_on = is_on
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.is_on):
            y = self.third(self.second(y).relu())
        return self.head(y.float().mean((2, 3)))


class Nested(Region):
    """A region within a region, and one that returns what it reads."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        with torch.autocast("cpu", enabled=False):
            y = self.second(y)
            with torch.autocast("cpu", enabled=False):
                z = self.third(y.relu())
        return self.head(z.mean((2, 3)) + y.mean((2, 3))[:, :8])


def test_a_region_that_switches_autocast_off_is_pruned_as_any_code() -> None:
    result = recoup.prune(
        Region(is_on=False), [torch.randn(40, 3, 8, 8)], budget=recoup.Budget(width=0.5), method="fast"
    )
    assert type(result.model) is Region
    assert [layer.out_channels for layer in (result.model.first, result.model.second, result.model.third)] == [4, 8, 4]


def test_regions_within_regions_are_written_out() -> None:
    inspection = recoup.inspect(Nested(is_on=False), torch.randn(2, 3, 8, 8))
    assert not inspection.operations
    assert "wrap_with_autocast" not in str(inspection)


def test_a_region_that_switches_autocast_on_locks_what_it_reads_and_its_work_is_counted() -> None:
    inspection = recoup.inspect(Region(is_on=True), torch.randn(2, 3, 8, 8))
    inside = 8 * 16 * 9 * 16 + 16 * 8 * 16  # channels, kernel, 4 x 4 positions
    (operation,) = inspection.operations
    assert operation.macs == inside
    assert "wrap_with_autocast in forward is not understood" in str(inspection)
