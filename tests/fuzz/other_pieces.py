"""Pieces that read signals, volumes and vectors, and those that lead from one form to another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.kinds import kind


@kind("signal", kernel=(3, 1, 5), stride=(1, 2), dilation=(1, 2), bias=(True, False), groups=(1, 2))
class Conv1d(nn.Module):
    def __init__(self, c: int, kernel: int, stride: int, dilation: int, bias: bool, groups: int) -> None:
        super().__init__()
        padding = dilation * (kernel // 2)
        self.out = 8
        self.conv = nn.Conv1d(c, 8, kernel, stride, padding, dilation, groups, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@kind("signal", norm=("batch", "group", "instance", "none"), act=("relu", "tanh", "glu"))
class SignalBlock(nn.Module):
    def __init__(self, c: int, norm: str, act: str) -> None:
        super().__init__()
        self.out, self.act = 8, act
        width = 16 if act == "glu" else 8
        made = {"batch": nn.BatchNorm1d(width), "group": nn.GroupNorm(2, width), "instance": nn.InstanceNorm1d(width)}
        self.body = nn.Sequential(nn.Conv1d(c, width, 3, padding=1), made.get(norm, nn.Identity()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return F.glu(y, 1) if self.act == "glu" else getattr(torch, self.act)(y)


@kind("signal", by=("transposed", "interpolate", "wavenet", "causal"))
class SignalShape(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by = 8, by
        self.conv = (
            nn.ConvTranspose1d(c, 8, 4, 2, 1)
            if by == "transposed"
            else nn.Conv1d(c, 8, 3, padding=0 if by == "causal" else 1)
        )
        self.gate = nn.Conv1d(c, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "transposed":
            return self.conv(x)
        if self.by == "interpolate":
            return F.interpolate(self.conv(F.avg_pool1d(x, 2)), size=x.shape[-1])
        if self.by == "causal":
            return self.conv(F.pad(x, (2, 0)))
        return self.conv(x).tanh() * self.gate(x).sigmoid()


@kind("volume", stride=(1, 2), norm=("none", "batch", "instance", "group"), bias=(True, False), groups=(1, 2))
class Conv3d(nn.Module):
    def __init__(self, c: int, stride: int, norm: str, bias: bool, groups: int) -> None:
        super().__init__()
        self.out, self.conv = 8, nn.Conv3d(c, 8, 3, stride, 1, bias=bias, groups=groups)
        made = {"batch": nn.BatchNorm3d(8), "group": nn.GroupNorm(2, 8), "instance": nn.InstanceNorm3d(8, affine=True)}
        self.norm = made.get(norm, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


@kind("volume", by=("transposed", "factored", "pool", "interpolate"))
class VolumeShape(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by = 8, by
        self.space, self.time = (
            nn.Conv3d(c, 8, (1, 3, 3), padding=(0, 1, 1)),
            nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0)),
        )
        self.up = nn.ConvTranspose3d(8, 8, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.space(x))
        if self.by == "factored":
            return self.time(y)
        if self.by == "transposed":
            return self.up(F.max_pool3d(y, 2))
        return F.avg_pool3d(y, 2) if self.by == "pool" else F.interpolate(F.avg_pool3d(y, 2), size=x.shape[2:])


@kind("vector", act=("relu", "gelu", "tanh", "none"), bias=(True, False))
class Dense(nn.Module):
    def __init__(self, c: int, act: str, bias: bool) -> None:
        super().__init__()
        self.out, self.act, self.layer = 12, act, nn.Linear(c, 12, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return {"relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh, "none": lambda y: y}[self.act](y)


@kind("vector", norm=("batch", "layer", "rms", "softmax", "unit"))
class VectorNorm(nn.Module):
    def __init__(self, c: int, norm: str) -> None:
        super().__init__()
        self.out, self.by, self.last = 8, norm, nn.Linear(c, 8)
        self.norm = {"batch": nn.BatchNorm1d(c), "layer": nn.LayerNorm(c), "rms": nn.RMSNorm(c)}.get(
            norm, nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y.softmax(-1) if self.by == "softmax" else F.normalize(y, dim=-1) if self.by == "unit" else y
        return self.last(y)


@kind("vector", by=("addmm", "tied", "low_rank", "bilinear", "outer", "autoencoder"))
class Products(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.by, self.a, self.b = by, nn.Linear(c, 8), nn.Linear(8, 8)
        self.out = c if by == "autoencoder" else 8
        self.left, self.right = nn.Parameter(torch.randn(c, 4) / 2), nn.Parameter(torch.randn(4, 8) / 2)
        self.join, self.wide, self.again = nn.Bilinear(8, 8, 8), nn.Linear(64, 8), nn.Linear(c, 8)
        if by == "tied":
            self.again.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "addmm":
            return torch.addmm(self.a.bias, x, self.a.weight.t())
        if self.by == "low_rank":
            return F.linear(x, (self.left @ self.right).t(), self.b.bias)
        y = F.relu(self.a(x))
        if self.by == "tied":
            return y + torch.tanh(self.again(x))
        if self.by == "autoencoder":
            return F.linear(y, self.a.weight.t())
        if self.by == "bilinear":
            return self.join(y, self.b(y))
        return self.wide((y[:, :, None] * self.b(y)[:, None]).flatten(1))


@kind("vector", by=("stack", "highway", "heads", "index", "in_place"))
class VectorWiring(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.a, self.b = 8, by, nn.Linear(c, 8), nn.Linear(c, 8)
        self.last = nn.Linear(8, 8)
        self.register_buffer("order", torch.tensor([3, 1, 0, 2, 7, 6, 5, 4]))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        if self.by == "stack":
            y = torch.stack([a, b], 1).amax(1)
        elif self.by == "highway":
            y = b.sigmoid() * a + (1 - b.sigmoid()) * b
        elif self.by == "heads":
            y = (a.view(-1, 4, 2) * b.view(-1, 4, 2).softmax(1)).flatten(1)
        elif self.by == "index":
            y = a[:, self.order] + b
        else:
            y = a.clone()
            y[:, :4] *= b[:, 4:]
        return self.last(y)


# Bridges


@kind("image", "tokens", by=("flatten", "rows", "patches", "einops"))
class ToTokens(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.conv = (4 * c, by, None) if by == "einops" else (8, by, nn.Conv2d(c, 8, 2, stride=2))

    def forward(self, x: Tensor) -> Tensor:
        if self.conv is None:
            b, c, h, w = x.shape
            return x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(b, h * w // 4, 4 * c)
        y = self.conv(x)
        if self.by == "rows":
            return y.mean(2).transpose(1, 2)
        return y.permute(0, 2, 3, 1).flatten(1, 2) if self.by == "patches" else y.flatten(2).transpose(1, 2)


@kind("image", "vector", by=("mean", "sum", "flatten", "max", "both", "adaptive", "last"))
class ImageToVector(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.by, self.out = by, {"flatten": 4 * c, "both": 2 * c, "adaptive": 4 * c}.get(by, c)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[2:]
        if self.by == "sum":
            return x.sum((2, 3)) / (h * w)
        if self.by == "flatten":
            return F.avg_pool2d(x, (h // 2, w // 2)).flatten(1)
        if self.by == "adaptive":
            return F.adaptive_avg_pool2d(x, 2).reshape(len(x), -1)
        if self.by == "both":
            return torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1)
        if self.by == "last":
            return x[:, :, -1, -1]
        return x.amax((2, 3)) if self.by == "max" else x.mean((2, 3))


@kind("tokens", "vector", by=("mean", "first", "last", "max", "attention"))
class TokensToVector(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.query = c, by, nn.Linear(c, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "attention":
            return (self.query(x).softmax(1) * x).sum(1)
        if self.by == "max":
            return x.amax(1)
        return x.mean(1) if self.by == "mean" else x[:, 0 if self.by == "first" else -1]


@kind("tokens", "image", by=("square",))
class ToImage(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out = c

    def forward(self, x: Tensor) -> Tensor:
        side = int(x.shape[1] ** 0.5)
        return x[:, : side * side].transpose(1, 2).reshape(len(x), -1, side, side)


@kind("tokens", "signal")
class ToSignal(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.out = c

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@kind("signal", "tokens")
class SignalToTokens(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.out = c

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 1)


@kind("signal", "vector", by=("mean", "max", "last", "std"))
class SignalToVector(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by = c, by

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "std":
            return x.std(-1)
        return x.mean(-1) if self.by == "mean" else x.amax(-1) if self.by == "max" else x[..., -1]


@kind("volume", "vector", by=("mean", "pool"))
class VolumeToVector(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by = c, by

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3, 4)) if self.by == "mean" else F.adaptive_max_pool3d(x, 1).flatten(1)


@kind("volume", "image", by=("mean", "fold", "last"))
class VolumeToImage(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by = c, by

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "fold":
            return x.transpose(1, 2).flatten(1, 2).unflatten(1, (-1, x.shape[1])).sum(1)
        return x.mean(2) if self.by == "mean" else x[:, :, -1]


@kind("vector", "tokens", by=("repeat", "view"))
class VectorToTokens(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.wide = 8, by, nn.Linear(c, 8 if by == "repeat" else 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(x)
        return y[:, None].repeat(1, 4, 1) if self.by == "repeat" else y.view(len(x), 4, -1)
