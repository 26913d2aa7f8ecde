"""What networks read: random batches in the forms in which their users give them, and how they are called with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_map_only

# Positional inputs, or keyword inputs.
Batch = tuple[Any, ...] | dict[str, Any]
Reads = Callable[[int, Generator], Batch]

PADDING = 0  # the token in the place of none


def call(model: nn.Module, batch: Batch) -> Any:
    """What a model returns for a batch, of which it gets a copy: some write into what they read."""
    own = tree_map_only(Tensor, Tensor.clone, batch)
    return model(**own) if isinstance(own, Mapping) else model(*own)


def tensors(*shapes: tuple[int, ...]) -> Reads:
    """Positional inputs of these shapes, the batch left out."""
    return lambda samples, generator: tuple(torch.randn(samples, *shape, generator=generator) for shape in shapes)


def images(size: int, channels: int = 3) -> Reads:
    """A square image."""
    return tensors((channels, size, size))


def numbers(limit: int, *shape: int) -> Reads:
    """Positional token numbers."""
    return lambda samples, generator: (_integers(limit, (samples, *shape), generator),)


def pixels(size: int, channels: int = 3) -> Reads:
    """What an image processor returns."""
    return lambda samples, generator: {"pixel_values": torch.randn(samples, channels, size, size, generator=generator)}


def tokens(limit: int, length: int, *, padded: bool = True) -> Reads:
    """What a tokenizer returns: numbers and a mask; texts are of several lengths, where they are `padded`."""

    def read(samples: int, generator: Generator) -> Batch:
        found = _integers(limit, (samples, length), generator, 1)
        lengths = length - (torch.arange(samples) % (length // 2) if padded else torch.zeros(samples))
        mask = (torch.arange(length) < lengths[:, None]).long()
        return {"input_ids": torch.where(mask > 0, found, PADDING), "attention_mask": mask}

    return read


def named(**by_name: Reads) -> Reads:
    """Keyword inputs, each the first input of what it is given."""

    def read(samples: int, generator: Generator) -> Batch:
        return {name: _first(reads(samples, generator)) for name, reads in by_name.items()}

    return read


def both(first: Reads, **more: Reads) -> Reads:
    """Keyword inputs of `first` and others by name, all for the same samples."""

    def read(samples: int, generator: Generator) -> Batch:
        found, rest = first(samples, generator), named(**more)(samples, generator)
        assert isinstance(found, dict) and isinstance(rest, dict)
        return found | rest

    return read


def _first(batch: Batch) -> Tensor:
    found: Tensor = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return found


def _integers(limit: int, shape: tuple[int, ...], generator: Generator, least: int = 0) -> Tensor:
    return torch.randint(least, limit, shape, generator=generator)
