"""Pieces of networks with unusual wirings, (b, c, 8, 8) to (b, c', 8, 8), and networks composed of them at random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ChannelShuffle(nn.Module):
    """As in ShuffleNet: two halves interleaved."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.conv = c, nn.Conv2d(c, 2 * (c // 2), 3, padding=1)
        self.last = nn.Conv2d(2 * (c // 2), c, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x))
        y = y.view(len(y), 2, y.shape[1] // 2, 8, 8).transpose(1, 2).reshape(y.shape)
        return self.last(torch.tanh(y))


class PixelShuffle(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.conv, self.last = c, nn.Conv2d(c, 4 * c, 1), nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.avg_pool2d(torch.tanh(F.pixel_shuffle(self.conv(x), 2)), 2))


class ZeroPad(nn.Module):
    """A strided shortcut with zeros in the place of new channels."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.c, self.out = c, c + 3
        self.conv = nn.Conv2d(c, c + 3, 3, padding=1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 2))
        return F.interpolate(F.relu(y), scale_factor=2)


class WithItself(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.conv = c, nn.Conv2d(2 * c, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.conv(torch.cat([x, x], 1)))


class Reused(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.conv = c, nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(F.relu(self.conv(x))))


class GroupedAndGroupNorm(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.first, self.norm = c, nn.Conv2d(c, 12, 1), nn.GroupNorm(6, 12)
        self.grouped, self.last = nn.Conv2d(12, 9, 3, padding=1, groups=3), nn.Conv2d(9, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.grouped(F.relu(self.norm(self.first(x))))))


class WithinGroups(nn.Module):
    """Grouped convolutions of two groups in a row, one of them transposed."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.first, self.norm = c, nn.Conv2d(c, 16, 1), nn.BatchNorm2d(16)
        self.one, self.two = nn.Conv2d(16, 24, 3, padding=1, groups=2), nn.Conv2d(24, 16, 1, groups=2, bias=False)
        self.back, self.last = nn.ConvTranspose2d(16, 12, 3, padding=1, groups=2), nn.Conv2d(12, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.two(torch.tanh(self.one(F.relu(self.norm(self.first(x)))))))
        return self.last(F.relu(self.back(x)))


class SpatialGate(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.gate, self.conv = c, nn.Conv2d(c, 1, 3, padding=1), nn.Conv2d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x * self.gate(x).sigmoid()))


class Functional(nn.Module):
    """A convolution with a free parameter, and one along the channels."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.kernel, self.scale = (
            c + 1,
            nn.Parameter(torch.randn(c + 1, c, 3, 3) / 4),
            nn.Parameter(torch.rand(c + 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, self.kernel, padding=1)) * self.scale[:, None, None]


class UnequalSplit(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.mix = c, nn.Conv2d(c, 7, 1)
        self.a, self.b, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(5, 4, 1), nn.Conv2d(7, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.relu(self.mix(x)).split([2, 5], dim=1)
        halves = self.b(right).chunk(2, dim=1)
        return self.last(torch.cat([halves[1], torch.tanh(self.a(left)), halves[0]], 1))


class Transposed(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.down, self.up = (
            c,
            nn.Conv2d(c, c + 2, 2, stride=2),
            nn.ConvTranspose2d(c + 2, c, 4, 2, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(F.relu(self.down(x))))


class GroupedQuery(nn.Module):
    """Attention of four query heads over two heads of keys and values."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.q, self.kv, self.o = c, nn.Linear(c, 12), nn.Linear(c, 12), nn.Linear(12, c)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)[:, ::4]
        q = self.q(tokens).view(len(x), 16, 4, 3).transpose(1, 2)
        k, v = self.kv(tokens).view(len(x), 16, 2, 2, 3).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        y = self.o(y.transpose(1, 2).reshape(len(x), 16, 12))
        return x + F.interpolate(y.transpose(1, 2).reshape(len(x), -1, 4, 4), scale_factor=2)


class SqueezeExcite(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.down, self.up, self.last = c, nn.Linear(c, 3), nn.Linear(3, c), nn.Conv2d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x * self.up(F.relu(self.down(x.mean((2, 3))))).sigmoid()[:, :, None, None])


class Gated(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.conv, self.last = c, nn.Conv2d(c, 2 * c, 1), nn.Conv2d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.glu(self.conv(x), dim=1))


PIECES = (
    ChannelShuffle, PixelShuffle, ZeroPad, WithItself, Reused, GroupedAndGroupNorm, WithinGroups, SpatialGate,
    Functional, UnequalSplit, Transposed, GroupedQuery, SqueezeExcite, Gated,
)  # fmt: skip


class Composed(nn.Module):
    """Pieces in a row, some of them skipped over, two inputs, and a dict with an intermediate feature."""

    def __init__(self, pieces: list[type[nn.Module]], width: int, feature: int, skips: int) -> None:
        super().__init__()
        self.stem, self.side, self.feature = nn.Conv2d(3, width, 3, padding=1), nn.Linear(5, width), feature
        self.body, self.skips = nn.ModuleList(), []
        for number, piece in enumerate(pieces):
            self.body.append(piece(width))
            self.skips.append(bool(skips >> number & 1) and self.body[-1].out == width)
            width = self.body[-1].out
        self.head = nn.Linear(width, 4)

    def forward(self, image: Tensor, vector: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.stem(image) + self.side(vector)[:, :, None, None])
        found = {}
        for number, piece in enumerate(self.body):
            x = x + piece(x) if self.skips[number] else piece(x)
            if number == self.feature:
                found["feature"] = x
        return {"scores": self.head(x.mean((2, 3))), **found}


def example() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
