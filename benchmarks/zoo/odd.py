"""Small networks, one odd operation each: what pruning tools are known to stumble over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.reading import Reads, numbers, tensors

WIDTH = 16
CLASSES = 10
TOKENS = 20
IMAGE = (3, 16, 16)
PICTURE, SEQUENCE = tensors(IMAGE), tensors((6, WIDTH))


@dataclass(frozen=True, slots=True)
class Entry:
    """A network, what it reads, and the layers that give its answer."""

    factory: Callable[[], nn.Module]
    reads: Reads = PICTURE
    heads: tuple[str, ...] = ("head",)


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class Images(nn.Module):
    """A stem, whatever `body` makes of its channels, the mean over positions, a classifier."""

    def __init__(self, last: int = WIDTH) -> None:
        super().__init__()
        self.stem = conv(3, WIDTH)
        self.head = nn.Linear(last, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(self.stem(x)).mean((2, 3)))
        return result

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class ChannelShuffle(Images):
    """ShuffleNet's unit: half of the channels go through a branch, then both halves are interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.last = conv(WIDTH // 2, WIDTH // 2), conv(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        x = torch.cat([left, self.branch(right)], dim=1)
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)
        result: Tensor = self.last(x)
        return result


class PixelShuffle(Images):
    """Four channels become the four pixels of one."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.wide, self.last = conv(WIDTH, 4 * WIDTH), conv(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(F.pixel_shuffle(self.wide(x), 2))
        return result


class ZeroPadShortcut(Images):
    """The CIFAR ResNet's shortcut: every other pixel, and zeros for the channels that are new."""

    def __init__(self) -> None:
        super().__init__(2 * WIDTH)
        self.block = nn.Sequential(conv(WIDTH, 2 * WIDTH, stride=2), conv(2 * WIDTH, 2 * WIDTH))

    def body(self, x: Tensor) -> Tensor:
        short = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, WIDTH // 2, WIDTH // 2))
        return F.relu(self.block(x) + short)


class Twice(Images):
    """The same channels twice in one concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.last = conv(2 * WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.cat([x, x], dim=1))
        return result


class Reused(Images):
    """One convolution called twice: its inputs and its outputs are the same channels."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def body(self, x: Tensor) -> Tensor:
        return F.relu(self.again(F.relu(self.again(x))))


class Grouped(Images):
    """A convolution of four groups and a GroupNorm of four others."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1, groups=4)
        self.norm, self.last = nn.GroupNorm(4, 2 * WIDTH), conv(2 * WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(F.relu(self.norm(self.grouped(x))))
        return result


class SpatialGate(Images):
    """A gate of a single channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Conv2d(WIDTH, 1, 7, padding=3), conv(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(x * self.gate(x).sigmoid())
        return result


class FreeKernel(Images):
    """A functional convolution with a parameter that no layer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(WIDTH, WIDTH, 3, 3) / 12)
        self.last = conv(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(F.relu(F.conv2d(x, self.kernel, padding=1)))
        return result


class DictOutput(nn.Module):
    """Scores and an intermediate feature in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.feature, self.last = conv(3, WIDTH), conv(WIDTH, WIDTH), conv(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        feature = self.feature(self.stem(x))
        return {"scores": self.head(self.last(feature).mean((2, 3))), "feature": feature}


class TwoInputs(nn.Module):
    """An image and a vector that meet in an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.vector, self.last = conv(3, WIDTH), nn.Linear(5, WIDTH), conv(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        x = F.relu(self.image(image) + self.vector(vector)[:, :, None, None])
        result: Tensor = self.head(self.last(x).mean((2, 3)))
        return result


class Split(Images):
    """Parts of unequal width that go different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = conv(4, WIDTH), conv(WIDTH - 4, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        small, large = x.split([4, WIDTH - 4], dim=1)
        result: Tensor = self.small(small) + self.large(large)
        return result


class Transposed(Images):
    """Transposed convolutions, the second one grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2)
        self.grouped = nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2, groups=2)
        self.last = conv(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(F.relu(self.grouped(F.relu(self.up(x)))))
        return result


class FusedAttention(nn.Module):
    """Queries, keys and values from one layer, split by reshape and unbind, as in timm."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        read = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        result: Tensor = self.head((x + self.out(read)).mean(1))
        return result


class GroupedQueries(nn.Module):
    """Four heads of queries share two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2)
        self.v, self.out = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        read = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        result: Tensor = self.head((x + self.out(read)).mean(1))
        return result


class Gated(nn.Module):
    """A gated linear unit: one half of the channels multiplies the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.stem(x))
        result: Tensor = self.head((x + self.down(F.glu(self.wide(x)))).mean(1))
        return result


class SqueezeExcite(Images):
    """Channels scaled by what their own means say."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.last = nn.Conv2d(WIDTH, 8, 1), nn.Conv2d(8, WIDTH, 1), conv(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        scale = self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))).sigmoid()
        result: Tensor = self.last(x * scale)
        return result


class Bilinear(nn.Module):
    """A product of two hidden vectors through a three-dimensional weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both, self.head = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(F.relu(self.both(F.relu(self.a(x)), F.relu(self.b(x)))).mean(1))
        return result


class Embedded(nn.Module):
    """Tokens, a learned place for each, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.randn(1, 6, WIDTH))
        self.a, self.b, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.tokens(x) + self.places
        result: Tensor = self.head((stream + self.b(F.gelu(self.a(stream)))).mean(1))
        return result


class Stacked(Images):
    """Branches stacked on a new dim, weighted by a softmax over it, and taken apart again (selective kernels)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.weigh = conv(WIDTH, WIDTH), conv(WIDTH, WIDTH, 5), nn.Conv2d(WIDTH, 2 * WIDTH, 1)

    def body(self, x: Tensor) -> Tensor:
        branches = torch.stack([self.a(x), self.b(x)], dim=1)
        weights = self.weigh(branches.sum(1).mean((2, 3), keepdim=True)).view(len(x), 2, -1, 1, 1).softmax(1)
        a, b = (branches * weights).unbind(1)
        return torch.add(a, b)


class RootMeanSquare(nn.Module):
    """A residual stream under RMSNorm with a gated perceptron, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32, bias=False)
        self.down, self.head = nn.Linear(32, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(x)
        result: Tensor = self.head(self.last(x + self.down(F.silu(self.gate(y)) * self.up(y))).mean(1))
        return result


def volumes() -> nn.Module:
    """Convolutions in three dims."""
    body = nn.Sequential(nn.Conv3d(2, WIDTH, 3), nn.BatchNorm3d(WIDTH), nn.ReLU(), nn.Conv3d(WIDTH, WIDTH, 3))
    return _with_head(nn.Sequential(body, nn.AdaptiveAvgPool3d(1), nn.Flatten()))


def signals() -> nn.Module:
    """Convolutions in one dim, read by a layer that sees every position."""
    body = nn.Sequential(nn.Conv1d(2, WIDTH, 5), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Conv1d(WIDTH, 2, 3))
    return _with_head(nn.Sequential(body, nn.Flatten(), nn.Linear(20, WIDTH), nn.ReLU()))


def _with_head(body: nn.Module) -> nn.Module:
    model = nn.Sequential()
    model.add_module("body", body)
    model.add_module("head", nn.Linear(WIDTH, CLASSES))
    return model


ODD = {
    "channel shuffle": Entry(ChannelShuffle),
    "pixel shuffle": Entry(PixelShuffle),
    "zero-pad shortcut": Entry(ZeroPadShortcut),
    "concatenation with itself": Entry(Twice),
    "reused convolution": Entry(Reused),
    "grouped convolution, GroupNorm": Entry(Grouped),
    "1-channel spatial gate": Entry(SpatialGate),
    "functional convolution": Entry(FreeKernel),
    "dict with a feature": Entry(DictOutput, heads=("feature", "head")),
    "two inputs": Entry(TwoInputs, tensors(IMAGE, (5,))),
    "unequal split": Entry(Split),
    "transposed convolution": Entry(Transposed),
    "fused attention": Entry(FusedAttention, SEQUENCE),
    "grouped-query attention": Entry(GroupedQueries, SEQUENCE),
    "gated linear unit": Entry(Gated, SEQUENCE),
    "squeeze and excite": Entry(SqueezeExcite),
    "bilinear": Entry(Bilinear, SEQUENCE),
    "embedding": Entry(Embedded, numbers(TOKENS, 6)),
    "stack and unbind": Entry(Stacked),
    "RMSNorm stream": Entry(RootMeanSquare, SEQUENCE),
    "conv3d": Entry(volumes, tensors((2, 8, 8, 8))),
    "conv1d": Entry(signals, tensors((2, 16))),
}
