"""The patches a convolution reads, as rows of a matrix: any number of spatial dims, stride, padding and dilation.

x    activations                   (b, C, *size)
a    patch of one output position  (C · K,)   K = product of the kernel sizes, channel-major as in the weight
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Values gathered at once: 16 Mi of them, with the float64 copies that summing makes, take about 0.5 GiB.
CHUNK_VALUES = 1 << 24


@dataclass(frozen=True, slots=True)
class Window:
    """Kernel, stride, dilation, and padding (before, after), each per spatial dim; `flipped` turns the kernel round.

    A transposed convolution is a flipped window of stride 1 over its input with zeros put between (`stuff`).
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    flipped: bool = False

    def reach(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Number of output positions per dim for an input of `size`."""
        spans = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]
        padded = self._padded(size)
        return tuple((n - span) // s + 1 for n, span, s in zip(padded, spans, self.stride, strict=True))

    def pad(self, x: Tensor) -> Tensor:
        """`x` with its zero border."""
        if not any(before or after for before, after in self.padding):
            return x
        return F.pad(x, [amount for pair in reversed(self.padding) for amount in pair])

    def index(self, size: tuple[int, ...], positions: Tensor) -> Tensor:
        """(P, K) places in the flattened padded input that the output `positions` (P,) read."""
        place = torch.zeros(len(positions), 1, dtype=torch.long, device=positions.device)
        remaining = positions[:, None]
        stride_of_dim = 1
        padded = self._padded(size)
        for dim in reversed(range(len(size))):
            reach = self.reach(size)[dim]
            along = (remaining % reach) * self.stride[dim]
            offsets = torch.arange(self.kernel[dim], device=positions.device) * self.dilation[dim]
            step = (along + offsets) * stride_of_dim  # (P, k_dim)
            place = (step[:, :, None] + place[:, None, :]).flatten(1)
            remaining = remaining // reach
            stride_of_dim *= padded[dim]
        return place.flip(1) if self.flipped else place

    def _padded(self, size: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n + before + after for n, (before, after) in zip(size, self.padding, strict=True))


def stuff(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """`x` (b, C, *size) with stride - 1 zeros between neighbours along every spatial dim."""
    if all(step == 1 for step in stride):
        return x
    size = [(n - 1) * step + 1 for n, step in zip(x.shape[2:], stride, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *size)
    places: tuple[slice, ...] = (slice(None), slice(None), *(slice(None, None, step) for step in stride))
    wide[places] = x
    return wide


def sample_positions(
    count: int, limit: int | None, generator: torch.Generator, device: torch.device | str = "cpu"
) -> Tensor:
    """All `count` positions, or `limit` of them drawn without replacement, in ascending order."""
    if limit is None or count <= limit:
        return torch.arange(count, device=device)
    return torch.randperm(count, generator=generator)[:limit].sort().values.to(device)


def patch_rows(x: Tensor, window: Window, positions: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields (samples, rows): rows (samples · P, C · K), sample-major, a bounded number of samples at a time."""
    index = window.index(tuple(x.shape[2:]), positions)
    flat = window.pad(x).flatten(2)
    values_per_sample = x.shape[1] * index.numel()
    step = max(1, CHUNK_VALUES // max(1, values_per_sample))
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        gathered = flat[part][:, :, index]  # (b, C, P, K)
        yield part, gathered.permute(0, 2, 1, 3).reshape(-1, x.shape[1] * index.shape[1])


def paired_rows(
    inputs: Tensor,
    outputs: Tensor,
    window: Window | None,
    limit: int | None,
    generator: torch.Generator,
    counted: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields what a layer read and what it made of it, row by row: (n, d) and (n, N), at up to `limit` positions.

    The outputs of a convolution lie along dim 1, those of a linear layer (window None) along the last dim, whose
    leading dims but the first count as positions. Of a linear layer, rows may be left out: those where `counted`, of
    the shape of the leading dims, is false.
    """
    if window is None:
        yield from _linear_rows(inputs, outputs, limit, generator, counted)
        return
    count = outputs[0, 0].numel() if outputs.dim() == inputs.dim() else outputs[0].numel()
    positions = sample_positions(count, limit, generator, inputs.device)
    rows_of = outputs.reshape(len(inputs), -1, count)[:, :, positions].transpose(1, 2)  # (b, P, N)
    for part, rows in patch_rows(inputs, window, positions):
        yield rows, rows_of[part].flatten(0, 1)


def _linear_rows(
    inputs: Tensor, outputs: Tensor, limit: int | None, generator: torch.Generator, counted: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    samples = len(inputs) if inputs.dim() > 1 else 1
    rows = inputs.reshape(samples, -1, inputs.shape[-1])
    targets = outputs.reshape(samples, -1, outputs.shape[-1])
    positions = sample_positions(rows.shape[1], limit, generator, rows.device)
    step = max(1, CHUNK_VALUES // max(1, rows.shape[2] * len(positions)))
    if counted is None:
        for part, target in zip(rows.split(step), targets.split(step), strict=True):
            yield part[:, positions].flatten(0, 1), target[:, positions].flatten(0, 1)
        return
    flags = counted.reshape(rows.shape[:2]).to(rows.device)
    for part, target, flag in zip(rows.split(step), targets.split(step), flags.split(step), strict=True):
        if bool((chosen := flag[:, positions]).any()):
            yield part[:, positions][chosen], target[:, positions][chosen]
