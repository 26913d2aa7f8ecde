"""Pieces that read tokens, (b, t, c), and give them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.kinds import kind

MASKS = ("none", "causal", "buffer", "additive")
LONGEST = 32


class _Attention(nn.Module):
    """What the spellings of attention have in common: sizes, and a mask of one kind."""

    def __init__(self, c: int, heads: int, mask: str) -> None:
        super().__init__()
        self.out, self.heads, self.mask = c, heads, mask
        self.register_buffer("tril", torch.ones(LONGEST, LONGEST).tril().bool())

    def masked(self, scores: Tensor) -> Tensor:
        """Scores (..., t, t), with what must not be seen far below the rest."""
        t = scores.shape[-1]
        if self.mask == "causal":
            return scores.masked_fill(torch.ones(t, t, device=scores.device).triu(1).bool(), -math.inf)
        if self.mask == "buffer":
            return scores.masked_fill(~self.tril[:t, :t], torch.finfo(scores.dtype).min)
        if self.mask == "additive":
            return scores + torch.zeros(t, t, dtype=scores.dtype).masked_fill(~self.tril[:t, :t], -1e9)
        return scores

    def split(self, x: Tensor) -> Tensor:
        """(b, t, c) to (b, heads, t, c / heads)."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


@kind("tokens", heads=(2, 4), mask=("none", "causal", "padding"), weights=(True, False), bias=(True, False))
class MultiheadModule(nn.Module):
    def __init__(self, c: int, heads: int, mask: str, weights: bool, bias: bool) -> None:
        super().__init__()
        self.out, self.mask, self.weights = c, mask, weights
        self.attention = nn.MultiheadAttention(c, heads, batch_first=True, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        attn = torch.ones(t, t, device=x.device).triu(1).bool() if self.mask == "causal" else None
        padding = (x.mean(-1) > 3) if self.mask == "padding" else None
        return self.attention(x, x, x, key_padding_mask=padding, attn_mask=attn, need_weights=self.weights)[0]


@kind("tokens", heads=(2, 4), packed=(True, False), mask=("none", "is_causal", "buffer", "float"))
class FusedAttention(_Attention):
    def __init__(self, c: int, heads: int, packed: bool, mask: str) -> None:
        super().__init__(c, heads, mask)
        self.packed, self.proj = packed, nn.Linear(c, c)
        if packed:
            self.qkv = nn.Linear(c, 3 * c)
        else:
            self.q, self.k, self.v = nn.Linear(c, c), nn.Linear(c, c, bias=False), nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        if self.packed:
            q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        mask = self.tril[:t, :t] if self.mask in ("buffer", "float") else None
        if self.mask == "float":
            mask = torch.where(mask, 0.0, -1e4).to(x.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.mask == "is_causal")
        return self.proj(y.transpose(1, 2).reshape(b, t, -1))


@kind("tokens", heads=(2, 4), spelling=("matmul", "einsum", "baddbmm", "bmm", "chunk"), mask=MASKS)
class HandAttention(_Attention):
    def __init__(self, c: int, heads: int, spelling: str, mask: str) -> None:
        super().__init__(c, heads, mask)
        self.spelling, self.proj = spelling, nn.Linear(c, c)
        self.q, self.kv = nn.Linear(c, c), nn.Linear(c, 2 * c)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.split(self.q(x))
        k, v = (self.split(part) for part in self.kv(x).chunk(2, -1))
        scale = q.shape[-1] ** -0.5
        if self.spelling == "einsum":
            weights = self.masked(torch.einsum("bhqd,bhkd->bhqk", q, k) * scale).softmax(-1)
            y = torch.einsum("bhqk,bhkd->bqhd", weights, v).reshape(b, t, -1)
        elif self.spelling in ("baddbmm", "bmm"):
            q, k, v = (part.flatten(0, 1) for part in (q, k, v))
            if self.spelling == "bmm":
                scores = torch.bmm(q, k.transpose(1, 2)) * scale
            else:
                empty = torch.empty(q.shape[0], t, t, dtype=q.dtype, device=q.device)
                scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=scale)
            y = torch.bmm(self.masked(scores).softmax(-1), v).view(b, self.heads, t, -1).transpose(1, 2).flatten(2)
        elif self.spelling == "chunk":
            parts = [self.masked(a @ c.transpose(-1, -2) * scale).softmax(-1) @ d for a, c, d in
                     zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)]  # fmt: skip
            y = torch.cat(parts, -1)
        else:
            y = self.masked(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v
            y = y.transpose(1, 2).contiguous().view(b, t, -1)
        return self.proj(y)


@kind("tokens", over=("channels", "tokens"))
class LinearAttention(nn.Module):
    """Keys and values meet first; the softmax is over the channels or over the tokens."""

    def __init__(self, c: int, over: str) -> None:
        super().__init__()
        self.out, self.over, self.q, self.k, self.v = c, over, nn.Linear(c, 8), nn.Linear(c, 8), nn.Linear(c, 8)
        self.proj = nn.Linear(8, c)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.over == "channels":
            return self.proj(v @ (q.transpose(1, 2) @ k / q.shape[1]).softmax(-1).transpose(1, 2))
        return self.proj(F.elu(q) @ (k.softmax(1).transpose(1, 2) @ v))


@kind("tokens", by=("learned", "rotary", "sine", "relative"))
class Positions(nn.Module):
    """Tells tokens where they are: `pos[:t]`, rotated halves, waves, or a bias on scores."""

    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.last = c, by, nn.Linear(c, c)
        self.pos = nn.Parameter(torch.randn(LONGEST, c) / 4)
        self.table = nn.Embedding(2 * LONGEST, 1)

    def forward(self, x: Tensor) -> Tensor:
        t, c = x.shape[1:]
        if self.by == "learned":
            return self.last(x + self.pos[:t])
        steps = torch.arange(t, device=x.device)
        if self.by == "relative":
            mix = self.table(steps[:, None] - steps[None] + LONGEST).squeeze(-1).softmax(-1)
            return self.last(mix @ x)
        angle = steps[:, None].to(x.dtype) / 10 ** (torch.arange(c // 2, device=x.device).to(x.dtype) / c)
        if self.by == "sine":
            return self.last(x + torch.cat([angle.sin(), angle.cos()], -1))
        left, right = x.chunk(2, -1)
        turned = [left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()]
        return self.last(torch.cat(turned, -1))


@kind("tokens", act=("relu", "gelu", "swiglu", "glu", "none"), bias=(True, False))
class FeedForward(nn.Module):
    def __init__(self, c: int, act: str, bias: bool) -> None:
        super().__init__()
        self.out, self.act = c, act
        self.up = nn.Linear(c, 16 if act in ("swiglu", "glu") else 12, bias=bias)
        self.down = nn.Linear(8 if act in ("swiglu", "glu") else 12, c, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.act == "swiglu":
            gate, y = y.chunk(2, -1)
            y = F.silu(gate) * y
        elif self.act == "glu":
            y = F.glu(y, -1)
        elif self.act != "none":
            y = getattr(F, self.act)(y)
        return self.down(y)


@kind("tokens", norm=("layer", "rms", "hand_rms", "hand_layer", "batch", "instance", "no_affine"))
class TokenNorm(nn.Module):
    def __init__(self, c: int, norm: str) -> None:
        super().__init__()
        self.out, self.by = c, norm
        self.weight = nn.Parameter(torch.rand(c) + 0.5)
        self.norm = {
            "layer": lambda: nn.LayerNorm(c), "rms": lambda: nn.RMSNorm(c),
            "no_affine": lambda: nn.LayerNorm(c, elementwise_affine=False),
            "batch": lambda: nn.BatchNorm1d(c), "instance": lambda: nn.InstanceNorm1d(c),
        }.get(norm, nn.Identity)()  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "hand_rms":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        if self.by == "hand_layer":
            centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
            return centred / (centred.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5 + 1e-6) * self.weight
        if self.by in ("batch", "instance"):
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.norm(x)


@kind("tokens", cell=("gru", "lstm", "rnn"), two_ways=(False, True))
class Recurrent(nn.Module):
    def __init__(self, c: int, cell: str, two_ways: bool) -> None:
        super().__init__()
        made = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}[cell]
        self.out, self.cell = 8, made(c, 8, batch_first=True, bidirectional=two_ways)
        self.last = nn.Linear(16 if two_ways else 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cell(x)[0])


@kind("tokens", norm_first=(False, True), act=("relu", "gelu"))
class EncoderLayer(nn.Module):
    def __init__(self, c: int, norm_first: bool, act: str) -> None:
        super().__init__()
        self.out = c
        self.layer = nn.TransformerEncoderLayer(c, 2, 16, activation=act, batch_first=True, norm_first=norm_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@kind("tokens", by=("cumsum", "shift", "diff", "cummax", "mean"))
class OverTime(nn.Module):
    def __init__(self, c: int, by: str) -> None:
        super().__init__()
        self.out, self.by, self.last = 8, by, nn.Linear(c, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "cumsum":
            y = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).to(x.dtype)[:, None]
        elif self.by == "shift":
            y = x + F.pad(x, (0, 0, 1, 0))[:, :-1]
        elif self.by == "diff":
            y = torch.cat([x[:, :1], x[:, 1:] - x[:, :-1]], 1)
        elif self.by == "cummax":
            y = x.cummax(1).values
        else:
            y = x - x.mean(1, keepdim=True)
        return self.last(y)


@kind("tokens", experts=(2, 4))
class Experts(nn.Module):
    """All experts run, a router weighs them."""

    def __init__(self, c: int, experts: int) -> None:
        super().__init__()
        self.out, self.route = c, nn.Linear(c, experts)
        self.up, self.down = nn.Parameter(torch.randn(experts, c, 8) / 3), nn.Parameter(torch.randn(experts, 8, c) / 3)

    def forward(self, x: Tensor) -> Tensor:
        share = self.route(x).softmax(-1)
        y = torch.einsum("btc,ech->bteh", x, self.up).relu()
        return torch.einsum("bteh,ehc,bte->btc", y, self.down, share)


@kind("tokens", causal=(True, False))
class TokenConv(nn.Module):
    """A depthwise convolution along the tokens, gated."""

    def __init__(self, c: int, causal: bool) -> None:
        super().__init__()
        self.out, self.causal = c, causal
        self.conv, self.gate, self.last = nn.Conv1d(c, c, 3, groups=c), nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(F.pad(x.transpose(1, 2), (2, 0) if self.causal else (1, 1))).transpose(1, 2)
        return self.last(y * F.silu(self.gate(x)))


@kind("tokens", how=("learned", "mean"))
class ClassToken(nn.Module):
    """One token more, in front."""

    def __init__(self, c: int, how: str) -> None:
        super().__init__()
        self.out, self.how, self.token = c, how, nn.Parameter(torch.randn(1, 1, c) / 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.token.expand(len(x), -1, -1) if self.how == "learned" else x.mean(1, keepdim=True)
        return torch.cat([first, x], 1)


@kind("tokens", over=("sizes", "mean", "squares", "sum"), behind=("gelu", "nothing", "sigmoid"))
class OverUnits(nn.Module):
    """Hidden units weighed by what all of them are together, as a global response norm does."""

    def __init__(self, c: int, over: str, behind: str) -> None:
        super().__init__()
        self.out, self.over = c, over
        self.behind = {"gelu": F.gelu, "nothing": lambda y: y, "sigmoid": torch.sigmoid}[behind]
        self.up, self.down, self.gain = nn.Linear(c, 2 * c), nn.Linear(2 * c, c), nn.Parameter(torch.rand(2 * c) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.behind(self.up(x))
        if self.over == "sizes":
            size = y.norm(p=2, dim=1, keepdim=True)
            y = y + self.gain * y * (size / (size.mean(-1, keepdim=True) + 1e-3))
        elif self.over == "mean":
            y = y * torch.sigmoid(y.mean(-1, keepdim=True))
        elif self.over == "squares":
            y = self.gain * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-2)
        else:
            y = y / (1 + y.abs().sum(dim=-1, keepdim=True))
        return self.down(y)
