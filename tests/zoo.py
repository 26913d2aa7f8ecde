"""Small networks, one wiring each. Every factory takes a width; `ZOO` lists them with the inputs they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, act: bool = True, **options: Any
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU() if act else nn.Identity())


def plain(width: int) -> nn.Module:
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    body = nn.Sequential(conv_bn(3, width), nn.MaxPool2d(2), conv_bn(width, width + 2), nn.Dropout(0.5))
    return nn.Sequential(body, pool, nn.Linear(width + 2, 4))


def flattened(width: int) -> nn.Module:
    """A linear layer that reads a flattened map: several inputs per channel."""
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(width * 9, 4))


class Residual(nn.Module):
    """An identity skip, then a block that changes width and resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = conv_bn(3, width)
        self.a = nn.Sequential(conv_bn(width, width + 1), conv_bn(width + 1, width, act=False))
        self.b = nn.Sequential(conv_bn(width, width + 3, stride=2), conv_bn(width + 3, width + 2, act=False))
        self.skip = conv_bn(width, width + 2, kernel=1, stride=2, act=False)
        self.head = nn.Linear(width + 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(x + self.a(x))
        x = F.relu(self.skip(x) + self.b(x))
        return self.head(x.mean((2, 3)))


class ZeroPad(nn.Module):
    """A shortcut that subsamples and pads channels with zeros."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.stem = conv_bn(3, width)
        self.block = nn.Sequential(conv_bn(width, width + 1, stride=2), conv_bn(width + 1, 2 * width, act=False))
        self.last = nn.Conv2d(2 * width, 5, 1)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        left = self.width // 2
        short = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, left, self.width - left))
        x = F.relu(self.block(x) + short)
        return self.head(F.relu(self.last(x)).mean((2, 3)))


def depthwise(width: int) -> nn.Module:
    middle = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
    tail = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU6(), nn.Conv2d(width, 5, 1), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(conv_bn(3, width), middle, tail, nn.Flatten(), nn.Linear(5, 4))


class Concat(nn.Module):
    """Two branches side by side, and the input itself beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = conv_bn(3, width), conv_bn(3, width + 1, kernel=1)
        self.mix = nn.Conv2d(2 * width + 4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.cat([self.a(x), x, self.b(x)], dim=1)).mean((2, 3))


class Shared(nn.Module):
    """One convolution called twice in a row: its inputs and outputs are the same channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.again, self.head = (
            conv_bn(3, width),
            nn.Conv2d(width, width, 3, padding=1),
            nn.Conv2d(width, 4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.again(self.stem(x)))
        return self.head(F.silu(self.again(x))).mean((2, 3))


class Gates(nn.Module):
    """Squeeze-and-excite, and a gate with a single channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = conv_bn(3, width)
        self.down, self.up, self.spot = (
            nn.Conv2d(width, 4, 1),
            nn.Conv2d(4, width, 1),
            nn.Conv2d(width, 1, 3, padding=1),
        )
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x * torch.sigmoid(self.up(F.gelu(self.down(F.adaptive_avg_pool2d(x, 1)))))
        return self.head(x * self.spot(x).sigmoid()).mean((2, 3))


class Windows(nn.Module):
    """Stride, dilation, padding by name, circular padding, kernels that are not square, PReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, width, (3, 1), stride=(1, 2), padding=(2, 0), dilation=(2, 1))
        self.b = nn.Conv2d(width, width + 1, (2, 3), padding="same", bias=False)
        self.c = nn.Conv2d(width + 1, width, 3, padding=1, padding_mode="circular")
        self.slope = nn.PReLU(width)
        self.d = nn.Conv2d(width, 4, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.slope(self.c(F.leaky_relu(self.b(torch.tanh(self.a(x))))))).mean((2, 3))


def one_dim(width: int) -> nn.Module:
    body = nn.Sequential(nn.Conv1d(3, width, 5, stride=2), nn.BatchNorm1d(width), nn.SiLU(), nn.Conv1d(width, 5, 3))
    return nn.Sequential(body, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(5, 4))


def three_dim(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, width, 3), nn.ELU(), nn.Conv3d(width, 4, 2), nn.AdaptiveAvgPool3d(1), nn.Flatten()
    )


def perceptron(width: int) -> nn.Module:
    """Linear layers on several leading dims."""
    return nn.Sequential(
        nn.Linear(6, width), nn.GELU(), nn.Linear(width, width + 3), nn.Tanh(), nn.Linear(width + 3, 4)
    )


class Several(nn.Module):
    """Two inputs and a dict of outputs, one of which is an intermediate feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, width, 3), nn.Linear(5, width), nn.Conv2d(width, width, 3, padding=1)
        self.out = nn.Conv2d(width, 4, 1)

    def forward(self, image: Tensor, vector: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.a(image) + self.b(vector)[:, :, None, None])
        feature = F.relu(self.c(x))
        return {"scores": self.out(feature).mean((2, 3)), "feature": feature}


class Scaled(nn.Module):
    """A free parameter along the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.gamma, self.b = (
            nn.Conv2d(3, width, 3),
            nn.Parameter(torch.rand(width, 1, 1) + 0.5),
            nn.Conv2d(width, 4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.hardswish(self.a(x)) * self.gamma).mean((2, 3))


class NormByHand(nn.Module):
    """An RMSNorm as language models write it: in float32, times a gain, or times 1 and more where that is `shifted`."""

    def __init__(self, width: int, eps: float = 1e-6, *, shifted: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if shifted else torch.ones(width))
        self.variance_epsilon, self.shifted = eps, shifted

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1.0 + self.weight if self.shifted else self.weight) * wide.to(x.dtype)


class Transformer(nn.Module):
    """Tokens and places are added to a stream that two normalised blocks read and write; scores for the last place."""

    def __init__(self, norm, width=16, tokens=13, places=6):
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Parameter(torch.randn(places, width))
        self.norms = nn.ModuleList(norm(width) for _ in range(4))
        self.into = nn.ModuleList(nn.Linear(width, 8, bias=i > 2) for i in range(5))
        self.out = nn.ModuleList([nn.Linear(8, width), nn.Linear(8, width)])
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, x):
        x = self.tokens(x) + self.places[: x.shape[1]]
        q, k, v = (self.into[i](self.norms[0](x)) for i in range(3))
        x = x + self.out[0](F.scaled_dot_product_attention(q, k, v))
        x = x + self.out[1](F.gelu(self.into[3](self.norms[1](x)) * self.into[4](self.norms[2](x)).sigmoid()))
        return self.head(self.norms[3](x)[:, -1])


class Unknown(nn.Module):
    """A normalisation over channels that is not understood; the layers before it are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.head = conv_bn(3, width), nn.Conv2d(width, width, 1), nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.normalize(self.b(self.a(x)), dim=1).cumsum(1)).mean((2, 3))


class Fixed(nn.Module):
    """Sizes written into the forward code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shape = (-1, width, 64)  # no number of its own, which could be put right
        self.a, self.b, self.head = conv_bn(3, width), conv_bn(width, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)).view(self.shape).mean(2))


@dataclass(frozen=True, slots=True)
class Entry:
    factory: Callable[[int], nn.Module]
    shapes: tuple[tuple[int, ...], ...]

    def build(self, width: int = 6, seed: int = 0) -> nn.Module:
        """In float64 and eval mode, with batch norms that do something."""
        with seeded(seed):
            model = self.factory(width).double().eval()
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    for tensor in (module.weight, module.running_var):
                        nn.init.uniform_(tensor, 0.5, 1.5)
                    nn.init.uniform_(module.bias, 0.3, 1.0)  # mostly on: no channel is dead by chance
                    nn.init.normal_(module.running_mean, std=0.1)
        return model

    def batch(self, samples: int = 40, seed: int = 1) -> Any:
        """One calibration batch: a tensor, or a tuple for a model with several inputs."""
        with seeded(seed):
            inputs = tuple(torch.randn(samples, *shape, dtype=torch.float64) for shape in self.shapes)
        return inputs[0] if len(inputs) == 1 else inputs


IMAGE = ((3, 8, 8),)
ZOO = {
    "plain": Entry(plain, IMAGE),
    "flattened": Entry(flattened, IMAGE),
    "residual": Entry(Residual, IMAGE),
    "zero-pad": Entry(ZeroPad, IMAGE),
    "depthwise": Entry(depthwise, IMAGE),
    "concat": Entry(Concat, IMAGE),
    "shared": Entry(Shared, IMAGE),
    "gates": Entry(Gates, IMAGE),
    "windows": Entry(Windows, IMAGE),
    "one-dim": Entry(one_dim, ((3, 20),)),
    "three-dim": Entry(three_dim, ((2, 5, 5, 5),)),
    "perceptron": Entry(perceptron, ((3, 6),)),
    "several": Entry(Several, ((3, 6, 6), (5,))),
    "scaled": Entry(Scaled, IMAGE),
    "unknown": Entry(Unknown, IMAGE),
    "fixed": Entry(Fixed, IMAGE),
}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
