"""Small language models of our own, as transformer libraries make them: with a config, and a cache of their past."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 32


class Cache:
    """Keys and values that a graph cannot hold."""

    def __init__(self):
        self.held = []


class Attention(nn.Module):
    """Heads of a width of their own; `split_size` is the number that GPT-2's code has."""

    def __init__(self, config):
        super().__init__()
        self.config, self.heads = config, config.num_attention_heads
        self.head_dim = config.head_dim
        self.split_size = self.heads * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, 3 * self.split_size)
        self.out = nn.Linear(self.split_size, config.hidden_size)

    def forward(self, x, cache):
        parts = self.qkv(x).split(self.split_size, dim=2)
        q, k, v = (part.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for part in parts)
        if cache is not None:
            cache.held.append((k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.before, self.between = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x, cache):
        x = x + self.attention(self.before(x), cache)
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """Scores of the next token, and a cache if the config asks for one."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.table = nn.Embedding(VOCABULARY, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)

    def forward(self, input_ids, attention_mask=None, labels=None):
        assert labels is None, "labels are no input of the network"
        cache = Cache() if self.config.use_cache else None
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x, cache)
        return SimpleNamespace(logits=self.head(x), cache=cache) if cache else self.head(x)


def config(**changes):
    numbers = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "head_dim": 4, "layers": 2}
    return SimpleNamespace(**numbers | {"use_cache": True} | changes)


def build(seed=0, **changes):
    torch.manual_seed(seed)
    return Model(config(**changes)).eval()


def batches(count=4, samples=8, length=12, seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(VOCABULARY, (samples, length), generator=generator) for _ in range(count)]
    return [{"input_ids": part, "attention_mask": torch.ones_like(part), **more} for part in ids]


def padded(given, places):
    """The same batch with other tokens, which do not count, after the first `places`."""
    other = copy.deepcopy(given)
    other["attention_mask"][:, places:] = 0
    other["input_ids"][:, places:] = 0
    return other
