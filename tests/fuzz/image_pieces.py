"""Pieces that read an image, (b, c, h, w), and give one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from tests import wirings
from tests.fuzz.kinds import kind

ACTIVATIONS = {
    "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "elu": F.elu,
    "leaky": F.leaky_relu, "hardswish": F.hardswish, "mish": F.mish, "softplus": F.softplus, "abs": torch.abs,
    "clamp": lambda x: x.clamp(-0.5, 0.8), "square": torch.square, "relu_": F.relu_, "exp": lambda x: (x / 4).exp(),
}  # fmt: skip


@kind("image", kernel=(3, 1, 5), stride=(1, 2), dilation=(1, 2), bias=(True, False), mode=("zeros", "circular"))
class Conv(nn.Module):
    def __init__(self, c: int, kernel: int, stride: int, dilation: int, bias: bool, mode: str) -> None:
        super().__init__()
        dilation = dilation if kernel < 5 else 1
        padding = dilation * (kernel // 2)
        self.out = 8
        self.conv = nn.Conv2d(c, 8, kernel, stride, padding, dilation, bias=bias, padding_mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@kind("image", act=("relu", "gelu", "silu"), bias=(False, True))
class ConvNormAct(nn.Module):
    def __init__(self, c: int, act: str, bias: bool) -> None:
        super().__init__()
        self.out, self.act = 12, act
        self.body = nn.Sequential(nn.Conv2d(c, 12, 3, padding=1, bias=bias), nn.BatchNorm2d(12))

    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.act](self.body(x))


@kind("image", groups=(2, 4), bias=(True, False))
class Grouped(nn.Module):
    def __init__(self, c: int, groups: int, bias: bool) -> None:
        super().__init__()
        self.out, self.conv = c, nn.Conv2d(c, c, 3, padding=1, groups=groups, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@kind("image", multiplier=(1, 2), bias=(True, False))
class Depthwise(nn.Module):
    def __init__(self, c: int, multiplier: int, bias: bool) -> None:
        super().__init__()
        self.out, self.point = 8, nn.Conv2d(multiplier * c, 8, 1)
        self.depth = nn.Conv2d(c, multiplier * c, 3, padding=1, groups=c, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.point(F.relu(self.depth(x)))


@kind("image", groups=(1, 2), bias=(True, False))
class TransposedConv(nn.Module):
    def __init__(self, c: int, groups: int, bias: bool) -> None:
        super().__init__()
        self.out, self.down = 8, nn.Conv2d(c, 8, 2, stride=2)
        self.up = nn.ConvTranspose2d(8, 8, 4, 2, 1, groups=groups, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.relu(self.down(x)))


@kind("image", act=tuple(ACTIVATIONS))
class Activation(nn.Module):
    def __init__(self, c: int, act: str) -> None:
        super().__init__()
        self.out, self.act = c, act

    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.act](x.clone() if self.act == "relu_" else x)


@kind("image", norm=("batch", "group", "group1", "instance", "instance_affine", "layer", "local"))
class Norm(nn.Module):
    def __init__(self, c: int, norm: str) -> None:
        super().__init__()
        self.out, self.kind = c, norm
        self.norm = {
            "batch": lambda: nn.BatchNorm2d(c), "group": lambda: nn.GroupNorm(4, c),
            "group1": lambda: nn.GroupNorm(1, c), "instance": lambda: nn.InstanceNorm2d(c),
            "instance_affine": lambda: nn.InstanceNorm2d(c, affine=True),
            "layer": lambda: nn.LayerNorm(c), "local": lambda: nn.LocalResponseNorm(3),
        }[norm]()  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.norm(x)


@kind("image", over=("space", "channels", "all"), by=("mean", "sum"))
class HandNorm(nn.Module):
    """A norm written out, with sizes from the shape."""

    def __init__(self, c: int, over: str, by: str) -> None:
        super().__init__()
        self.out, self.by, self.dims = c, by, {"space": (2, 3), "channels": (1,), "all": (1, 2, 3)}[over]
        self.weight, self.bias = nn.Parameter(torch.rand(c, 1, 1) + 0.5), nn.Parameter(torch.randn(1, c, 1, 1) / 4)

    def forward(self, x: Tensor) -> Tensor:
        count = 1
        for dim in self.dims:
            count = count * x.shape[dim]
        if self.by == "sum":
            mean = x.sum(self.dims, keepdim=True) / count
            var = ((x - mean) ** 2).sum(self.dims, keepdim=True) / count
        else:
            mean, var = x.mean(self.dims, keepdim=True), x.var(self.dims, keepdim=True, unbiased=False)
        return (x - mean) * torch.rsqrt(var + 1e-5) * self.weight + self.bias


@kind("image", act=("prelu", "glu", "swiglu", "geglu", "maxout"))
class Gate(nn.Module):
    def __init__(self, c: int, act: str) -> None:
        super().__init__()
        self.act, self.out = act, 8
        self.conv = nn.Conv2d(c, 8 if act == "prelu" else 16, 3, padding=1)
        self.slope = nn.PReLU(8) if act == "prelu" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.act == "prelu":
            return self.slope(y)
        if self.act == "glu":
            return F.glu(y, dim=1)
        if self.act == "maxout":
            return y.view(len(y), -1, 2, *y.shape[2:]).amax(2)
        left, right = y.chunk(2, dim=1)
        return (F.silu if self.act == "swiglu" else F.gelu)(left) * right


@kind("image", by=("chunk", "split", "slice", "unequal"), order=("same", "swapped"))
class SplitAndJoin(nn.Module):
    def __init__(self, c: int, by: str, order: str) -> None:
        super().__init__()
        self.out, self.by, self.order, self.c = 8, by, order, c
        first = c // 4 if by == "unequal" else c // 2
        self.first = first
        self.a, self.b = nn.Conv2d(first, 4, 3, padding=1), nn.Conv2d(c - first, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "chunk":
            left, right = x.chunk(2, dim=1)
        elif self.by == "slice":
            left, right = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        else:
            left, right = x.split([self.first, self.c - self.first], dim=1)
        parts = [self.a(left), torch.tanh(self.b(right))]
        return torch.cat(parts[::-1] if self.order == "swapped" else parts, 1)


@kind("image", by=("view", "unflatten", "module"), groups=(2, 4))
class Shuffle(nn.Module):
    def __init__(self, c: int, by: str, groups: int) -> None:
        super().__init__()
        self.out, self.by, self.groups, self.last = 8, by, groups, nn.Conv2d(c, 8, 1)
        self.shuffle = nn.ChannelShuffle(groups) if by == "module" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "view":
            b, c, h, w = x.shape
            x = x.view(b, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(b, c, h, w)
        elif self.by == "unflatten":
            x = x.unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)
        else:
            x = self.shuffle(x)
        return self.last(F.relu(x))


@kind("image", dim=(1, 2, 3), by=(1, 3, -2), flip=(False, True))
class Roll(nn.Module):
    def __init__(self, c: int, dim: int, by: int, flip: bool) -> None:
        super().__init__()
        self.out, self.dim, self.by, self.flip, self.last = 8, dim, by, flip, nn.Conv2d(c, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.roll(self.by, self.dim)
        return self.last(x.flip(self.dim) if self.flip else x)


@kind("image", over=("mean", "norm", "sum"), behind=("relu", "norm"), deep=(False, True))
class OverMaps(nn.Module):
    """Maps weighed at every place by what all of them are together."""

    def __init__(self, c: int, over: str, behind: str, deep: bool) -> None:
        super().__init__()
        self.out, self.over = c, over
        self.first, self.norm, self.last = nn.Conv2d(c, 12, 3, padding=1), nn.BatchNorm2d(12), nn.Conv2d(12, c, 1)
        self.deep = nn.Conv2d(12, 12, 3, padding=1, groups=12) if deep else nn.Identity()
        self.behind = nn.ReLU() if behind == "relu" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(self.behind(self.norm(self.first(x))))
        if self.over == "mean":
            y = y * torch.sigmoid(y.mean(1, keepdim=True))
        elif self.over == "norm":
            y = y / (y.square().mean(1, keepdim=True) + 1e-2).sqrt()
        else:
            y = y / (1 + y.abs().sum(1, keepdim=True))
        return self.last(y)


@kind("image", by=("mean", "pool", "sum"), layer=("linear", "conv"))
class SqueezeExciteBy(nn.Module):
    def __init__(self, c: int, by: str, layer: str) -> None:
        super().__init__()
        self.out, self.by, self.layer = c, by, layer
        made = (lambda a, b: nn.Linear(a, b)) if layer == "linear" else (lambda a, b: nn.Conv2d(a, b, 1))
        self.down, self.up = made(c, 4), made(4, c)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[2:]
        if self.by == "pool":
            squeezed = F.adaptive_avg_pool2d(x, 1)
        else:
            squeezed = x.mean((2, 3), keepdim=True) if self.by == "mean" else x.sum((2, 3), keepdim=True) / (h * w)
        if self.layer == "linear":
            gate = self.up(F.relu(self.down(squeezed.flatten(1)))).sigmoid()[:, :, None, None]
        else:
            gate = self.up(F.relu(self.down(squeezed))).sigmoid()
        return x * gate


@kind("image", by=("scalar", "zero", "buffer", "spatial"))
class Where(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.last = 8, by, nn.Conv2d(c, 8, 1)
        self.register_buffer("mask", torch.arange(c) % 4 < 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "scalar":
            y = torch.where(x > 0, x, 0.1 * x)
        elif self.by == "zero":
            y = torch.where(x.abs() < 0.5, torch.zeros_like(x), x)
        elif self.by == "buffer":
            y = torch.where(self.mask.view(1, -1, 1, 1), x, -x)
        else:
            y = x.masked_fill(x.mean(1, keepdim=True) > 0.37, 0.0)  # where no mean is likely to lie
        return self.last(y)


@kind("image", spelling=("bchw,oc->bohw", "bc...,co->bo...", "matmul", "tensordot"))
class EinsumConv(nn.Module):
    def __init__(self, c: int, spelling: str) -> None:
        super().__init__()
        self.out, self.spelling = 8, spelling
        shape = (8, c) if spelling == "bchw,oc->bohw" or spelling == "matmul" else (c, 8)
        self.weight, self.bias = nn.Parameter(torch.randn(shape) / 3), nn.Parameter(torch.randn(8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.spelling == "matmul":
            y = (self.weight @ x.flatten(2)).view(len(x), 8, *x.shape[2:])
        elif self.spelling == "tensordot":
            y = torch.tensordot(x, self.weight, dims=([1], [0])).movedim(-1, 1)
        else:
            y = torch.einsum(self.spelling, x, self.weight)
        return y + self.bias[:, None, None]


@kind("image", fold=(False, True))
class Unfold(nn.Module):
    """A convolution by patches, or patches put back where they came from."""

    def __init__(self, c: int, fold: bool) -> None:
        super().__init__()
        self.out, self.fold = (c, fold) if fold else (8, fold)
        self.layer = nn.Linear(9 * c, 9 * c if fold else 8)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 3, padding=1).transpose(1, 2)
        y = self.layer(patches).transpose(1, 2)
        if self.fold:
            return F.fold(y, x.shape[-2:], 3, padding=1) / 9
        return y.reshape(len(x), 8, *x.shape[-2:])


@kind("image", learned=(False, True))
class GridSample(nn.Module):
    def __init__(self, c: int, learned: bool) -> None:
        super().__init__()
        self.out, self.learned, self.last = 8, learned, nn.Conv2d(c, 8, 1)
        self.where = nn.Linear(c, 6)

    def forward(self, x: Tensor) -> Tensor:
        theta = torch.eye(2, 3, dtype=x.dtype, device=x.device).expand(len(x), 2, 3)
        if self.learned:
            theta = theta + 0.1 * self.where(x.mean((2, 3))).view(-1, 2, 3)
        grid = F.affine_grid(theta * 0.9, list(x.shape), align_corners=False)
        return self.last(F.grid_sample(x, grid, align_corners=False))


@kind("image", down=(False, True))
class PixelShuffled(nn.Module):
    def __init__(self, c: int, down: bool) -> None:
        super().__init__()
        self.out, self.down = 8, down
        self.conv = nn.Conv2d(4 * c if down else c, 8 if down else 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.down:
            return F.interpolate(self.conv(F.pixel_unshuffle(x, 2)), scale_factor=2.0)
        return F.avg_pool2d(torch.tanh(F.pixel_shuffle(self.conv(x), 2)), 2)


@kind("image", by=("scale", "size", "fixed"), mode=("nearest", "bilinear"))
class Interpolate(nn.Module):
    def __init__(self, c: int, by: str, mode: str) -> None:
        super().__init__()
        self.out, self.by, self.mode, self.down = 8, by, mode, nn.Conv2d(c, 8, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.down(x))
        how = {"scale_factor": 2.0} if self.by == "scale" else {"size": x.shape[-2:] if self.by == "size" else (8, 8)}
        return F.interpolate(y, mode=self.mode, **how)


@kind("image", by=("avg", "max", "adaptive", "adaptive_max", "lp", "unpool"))
class Pool(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by = c, by

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "avg":
            return F.avg_pool2d(x, 3, 2, padding=1)
        if self.by == "max":
            return F.max_pool2d(x, 2, ceil_mode=True)
        if self.by == "lp":
            return F.lp_pool2d(x.abs() + 0.1, 2, 2)
        if self.by == "unpool":
            small, where = F.max_pool2d(x, 2, return_indices=True)
            return F.max_unpool2d(small, where, 2)
        return (F.adaptive_avg_pool2d if self.by == "adaptive" else F.adaptive_max_pool2d)(x, 4)


@kind("image", multiple=(4, 3, 8), mode=("constant", "reflect"), back=(True, False))
class PadToMultiple(nn.Module):
    def __init__(self, c: int, multiple: int, mode: str, back: bool) -> None:
        super().__init__()
        self.out, self.multiple, self.mode, self.back, self.conv = (
            8,
            multiple,
            mode,
            back,
            nn.Conv2d(c, 8, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[2:]
        y = F.pad(x, (0, -w % self.multiple, 0, -h % self.multiple), mode=self.mode)
        y = self.conv(y)
        return y[:, :, :h, :w] if self.back else y


@kind("image", by=("centre", "border", "stride", "half"))
class Crop(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.conv = 8, by, nn.Conv2d(c, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y, (h, w) = self.conv(x), x.shape[2:]
        if self.by == "centre":
            return y[:, :, h // 4 : h // 4 + h // 2, w // 4 : w // 4 + w // 2]
        if self.by == "border":
            return y[..., 1:-1, 1:-1]
        return y[:, :, ::2, ::2] if self.by == "stride" else y.narrow(2, 0, h // 2 + 1)


@kind("image", by=("add", "set", "relu_", "channel_mul", "space"))
class InPlaceView(nn.Module):
    """Writes into a part of a value of its own."""

    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.conv, self.last = 8, by, nn.Conv2d(c, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.by == "add":
            y[:, :4] += 1
        elif self.by == "set":
            y[:, 2:4] = y[:, 4:6].tanh()
        elif self.by == "relu_":
            y[:, ::2].relu_()
        elif self.by == "channel_mul":
            y[:, 1].mul_(2.0)
        else:
            y[:, :, :1] = 0.0
        return self.last(y)


@kind("image", count=(2, 3), shared=(False, True))
class Loop(nn.Module):
    """A list of layers gone through in a loop, or one of them again and again."""

    def __init__(self, c: int, count: int, shared: bool) -> None:
        super().__init__()
        self.out, self.stem = 8, nn.Conv2d(c, 8, 1)
        layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(count)]
        self.layers = nn.ModuleList(layers[:1] * count if shared else layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, layer in enumerate(self.layers):
            x = F.relu(layer(x)) + (x if number else 0.0)
        return x


@kind("image", growth=(4, 8), count=(2, 3))
class DenseBlock(nn.Module):
    def __init__(self, c: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(c + growth * n, growth, 3, padding=1) for n in range(count))
        self.out, self.last = 8, nn.Conv2d(c + growth * count, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], 1)
        return self.last(x)


class _Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        w = w / (w.std((1, 2, 3), keepdim=True) + 1e-3)
        return F.conv2d(x, w / 6, self.bias, padding=1)


@kind(
    "image",
    by=("weight_norm", "spectral", "old_weight_norm", "standardised", "low_rank", "scaled", "orthogonal", "pruned"),
)
class ComputedWeight(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, conv = 8, by, nn.Conv2d(c, 8, 3, padding=1)
        if by == "weight_norm":
            conv = parametrizations.weight_norm(conv)
        elif by == "spectral":
            conv = parametrizations.spectral_norm(conv)
        elif by == "orthogonal":
            conv = parametrizations.orthogonal(nn.Conv2d(c, 8, 1))
        elif by == "old_weight_norm":
            conv = nn.utils.weight_norm(conv)
        elif by == "pruned":
            prune.l1_unstructured(conv, "weight", 0.3)
        elif by == "standardised":
            conv = _Standardised(c, 8, 3)
        self.conv = conv
        self.left, self.right = nn.Parameter(torch.randn(8, 4) / 2), nn.Parameter(torch.randn(4, c) / 2)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "low_rank":
            return F.conv2d(x, (self.left @ self.right)[:, :, None, None])
        if self.by == "scaled":
            return F.conv2d(x, self.conv.weight * self.scale[:, None, None, None], self.conv.bias, padding=1)
        return self.conv(x)


@kind("image", by=("ema", "counter", "last", "cache"))
class Stateful(nn.Module):
    """Remembers something of what it has seen, in a buffer or in a number."""

    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.conv = 8, by, nn.Conv2d(c, 8, 3, padding=1)
        self.register_buffer("ema", torch.zeros(c))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "ema":
            self.ema.mul_(0.9).add_(x.mean((0, 2, 3)).detach(), alpha=0.1)
            x = x - self.ema.view(1, -1, 1, 1)
        elif self.by == "counter":
            self.count += 1
            x = x / (1 + 0 * self.count)
        elif self.by == "last":
            self.ema = x.mean((0, 2, 3)).detach()
        else:
            self.ema.copy_(torch.full_like(self.ema, 0.5))
        return self.conv(x * (1 + self.ema.view(1, -1, 1, 1)) if self.by == "cache" else x)


@kind("image", by=("two_convs", "conv_and_transposed", "norms", "bias"))
class Tied(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by = c, by
        self.a, self.b, self.n, self.m = (
            nn.Conv2d(c, c, 3, padding=1),
            nn.Conv2d(c, c, 3, padding=1),
            nn.BatchNorm2d(c),
            nn.BatchNorm2d(c),
        )
        if by == "two_convs":
            self.b.weight = self.a.weight
        elif by == "norms":
            self.m.weight, self.m.bias = self.n.weight, self.n.bias
        elif by == "bias":
            self.b.bias = self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.n(self.a(x)))
        if self.by == "conv_and_transposed":
            return F.conv_transpose2d(y, self.a.weight, padding=1)
        return self.m(self.b(y))


@kind("image")
class NoGrad(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.out, self.conv, self.last = 8, nn.Conv2d(c, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = F.relu(self.conv(x))
        return self.last(y)


@kind("image", by=("autocast", "nonzero", "item", "branch", "checkpoint", "numpy", "list"))
class Awkward(nn.Module):
    """What a captured graph may not hold."""

    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.conv, self.last = 8, by, nn.Conv2d(c, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "autocast":
            with torch.autocast("cpu", enabled=False):
                return self.last(F.relu(self.conv(x)))
        if self.by == "checkpoint":
            return self.last(checkpoint(self.conv, x, use_reentrant=False))
        y = F.relu(self.conv(x))
        if self.by == "nonzero":
            y = y + y[y > 1e6].sum()
        elif self.by == "item":
            y = y * (1 + 0 * int(y.shape[0] * y.abs().sum().item()))
        elif self.by == "branch" and bool(y.sum() < -1e6):
            y = -y
        elif self.by == "numpy":
            y = y * float(torch.tensor(2.0).numpy())
        elif self.by == "list":
            y = torch.stack([sample * 2 for sample in y])
        return self.last(y)


@kind("image", by=("plain", "2d", "always_off"))
class Dropout(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.conv = 8, by, nn.Conv2d(c, 8, 3, padding=1)
        self.drop = nn.Dropout2d(0.3) if by == "2d" else nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x))
        return F.dropout(y, 0.3, training=False) if self.by == "always_off" else self.drop(y)


@kind("image", by=("channels", "space", "scaled"))
class BufferMask(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.last = 8, by, nn.Conv2d(c, 8, 3, padding=1)
        self.register_buffer(
            "mask", (torch.arange(c) % 4 != 3).float() if by != "space" else torch.ones(1, 1, 8, 8).tril()
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask if self.by == "space" else self.mask.view(1, -1, 1, 1)
        return self.last(x * mask + (0.25 if self.by == "scaled" else 0.0))


@kind("image", by=("scale", "range", "grid", "sqrt", "tensor"))
class ShapeNumbers(nn.Module):
    """Numbers and coordinates that are computed from the shape."""

    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.last = 8, by, nn.Conv2d(c + 1 if by in ("range", "grid") else c, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        if self.by == "scale":
            return self.last(x * (h * w) / 64)
        if self.by == "sqrt":
            return self.last(x / c**0.5)
        if self.by == "tensor":
            return self.last(x / torch.tensor(float(c)))
        line = torch.arange(w, dtype=x.dtype, device=x.device) / w
        if self.by == "grid":
            line = line[None] + torch.linspace(-1, 1, h, dtype=x.dtype, device=x.device)[:, None]
        return self.last(torch.cat([x, line.expand(b, 1, h, w)], 1))


@kind("image", size=(4, 1), at=("more", "one"))
class BatchBranch(nn.Module):
    """Takes another way for larger batches."""

    def __init__(self, c: int, size: int, at: str) -> None:
        super().__init__()
        self.out, self.size, self.at = 8, size, at
        self.a, self.b = nn.Conv2d(c, 8, 1), nn.Conv2d(c, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if (len(x) > self.size) if self.at == "more" else (len(x) == 1):
            return self.a(x)
        return self.b(x)


@kind("image", by=("sort", "topk", "cumsum", "gather", "median", "argmax", "argsort"))
class Ordered(nn.Module):
    """Sorts, chooses or accumulates along the positions."""

    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.last = 8, by, nn.Conv2d(c, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        if self.by == "sort":
            y = flat.sort(-1).values.view_as(x)
        elif self.by == "topk":
            y = flat.topk(4, -1).values.view(len(x), -1, 2, 2)
        elif self.by == "cumsum":
            y = (flat.cumsum(-1) / flat.shape[-1]).view_as(x)
        elif self.by == "gather":
            y = flat.gather(2, flat.mean(1, keepdim=True).argsort(-1).expand_as(flat)).view_as(x)
        elif self.by == "median":
            y = x - flat.median(-1).values[..., None, None]
        elif self.by == "argmax":
            y = x + flat.argmax(-1)[..., None, None] / flat.shape[-1]
        else:
            y = flat.argsort(-1).to(x.dtype).view_as(x) / flat.shape[-1]
        return self.last(y)


@kind("image", by=("space", "learned", "abs", "channels"))
class Fourier(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.last = 8, by, nn.Conv2d(c, 8, 1)
        self.filter = nn.Parameter(torch.randn(c, 1, 1, 2) / 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "channels":
            return self.last(torch.fft.fft(x, dim=1).real / 3)
        z = torch.fft.rfft2(x, norm="ortho")
        if self.by == "learned":
            z = z * torch.view_as_complex(self.filter)
        if self.by == "abs":
            return self.last(F.interpolate(z.abs(), size=x.shape[-2:]))
        return self.last(torch.fft.irfft2(z, s=x.shape[-2:], norm="ortho"))


@kind("image", by=("gram", "pool", "bilinear"))
class Outer(nn.Module):
    """Products of channels with channels."""

    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.a, self.b = 8, by, nn.Conv2d(c, 4, 1), nn.Conv2d(c, 4, 1)
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).flatten(2), self.b(x).flatten(2)
        if self.by == "gram":
            outer = a @ b.transpose(1, 2) / a.shape[-1]
        elif self.by == "pool":
            outer = a.mean(2)[:, :, None] * b.mean(2)[:, None]
        else:
            outer = torch.einsum("bip,bjp->bij", a, b) / a.shape[-1]
        return x[:, :1] + self.last(outer.flatten(1))[:, :, None, None]


@kind("image", by=("expand", "repeat", "interleave", "tile", "broadcast"))
class Repeat(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by = 8, by
        self.last = nn.Conv2d(c if by == "broadcast" else 2 * c, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        if self.by == "expand":
            y = x[:, None].expand(b, 2, c, h, w).reshape(b, 2 * c, h, w)
        elif self.by == "repeat":
            y = x.repeat(1, 2, 1, 1)
        elif self.by == "interleave":
            y = x.repeat_interleave(2, dim=1)
        elif self.by == "tile":
            y = x.tile((2, 1, 1))
        else:
            y = x.mean((2, 3), keepdim=True).expand(-1, -1, h, w)
        return self.last(torch.tanh(y))


@kind("image", by=("there_and_back", "space_to_depth", "heads", "transposed", "stack", "windows"))
class Maze(nn.Module):
    """Permutes, reshapes and comes back somewhere."""

    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.last = 8, by, nn.Conv2d(4 * c if by == "space_to_depth" else c, 8, 1)
        self.inner = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        if self.by == "there_and_back":
            y = self.inner(x.permute(0, 2, 3, 1).reshape(-1, c)).reshape(b, h, w, c).permute(0, 3, 1, 2)
        elif self.by == "space_to_depth":
            y = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4).reshape(b, 4 * c, h // 2, w // 2)
        elif self.by == "heads":
            y = x.view(b, 4, c // 4, h, w).permute(0, 2, 1, 3, 4).reshape(b, c, h, w)
        elif self.by == "transposed":
            y = x.flatten(1).view(b, c, w, h).transpose(2, 3).contiguous()
        elif self.by == "stack":
            y = torch.stack([x, x.tanh()], 2).sum(2)
        else:
            y = x.unfold(2, 4, 4).unfold(3, 4, 4).mean((4, 5))
        return self.last(y)


@kind("image", weighted=(False, True))
class Tower(nn.Module):
    """Branches at two resolutions that are added up, as in a pyramid of features."""

    def __init__(self, c: int, weighted: bool) -> None:
        super().__init__()
        self.out, self.a, self.b = 8, nn.Conv2d(c, 8, 3, padding=1), nn.Conv2d(c, 8, 3, stride=2, padding=1)
        self.weights = nn.Parameter(torch.ones(2)) if weighted else None

    def forward(self, x: Tensor) -> Tensor:
        high, low = self.a(x), F.interpolate(self.b(x), size=x.shape[-2:])
        if self.weights is not None:
            share = self.weights.softmax(0)
            return share[0] * high + share[1] * low
        return F.relu(high + low)


@kind("image", form=("min", "max", "norm", "softmax", "cosine"))
class AcrossChannels(nn.Module):
    def __init__(self, c: int, form: str) -> None:
        super().__init__()
        self.out, self.form, self.last = 8, form, nn.Conv2d(c, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "softmax":
            y = x.softmax(1)
        elif self.form == "norm":
            y = F.normalize(x, dim=1)
        elif self.form == "cosine":
            y = x * F.cosine_similarity(x, x.mean((2, 3), keepdim=True), dim=1)[:, None]
        else:
            y = x - (x.amin(1, keepdim=True) if self.form == "min" else x.amax(1, keepdim=True))
        return self.last(y)


def _enter_wirings() -> None:
    """The pieces of `tests/wirings.py`, which have sizes written into their code."""
    for piece in wirings.PIECES:
        kind("image")(piece)


_enter_wirings()
