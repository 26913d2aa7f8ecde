"""How networks of other libraries are made: by name, so that a library is imported when its network is built."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import nn

from benchmarks.zoo.reading import Reads
from benchmarks.zoo.spec import Spec

# Weights of the usual size for narrow layers: with those for wide ones nearly nothing of the input comes through.
LIVELY: dict[str, Any] = {"initializer_range": 0.2, "init_std": 0.2}


def of(where: str, reads: Reads, *args: Any, size: int | None = None, **options: Any) -> Spec:
    """The network that `library.module:Class` makes of these arguments."""
    factory = functools.partial(_made, where, args, options)
    return Spec(factory, reads, classes=0, size=size, library=where.partition(":")[0])


def hugging_face(name: str, reads: Reads, *, size: int | None = None, **configuration: Any) -> Spec:
    """The transformers network of that class with this configuration."""
    factory = functools.partial(_from_transformers, name, {**LIVELY, **configuration})
    return Spec(factory, reads, classes=0, size=size, library="transformers.modeling_utils")


def _made(where: str, args: tuple[Any, ...], options: dict[str, Any]) -> nn.Module:
    module, _, name = where.partition(":")
    made: nn.Module = getattr(importlib.import_module(module), name)(*args, **options)
    return made


def _from_transformers(name: str, configuration: dict[str, Any]) -> nn.Module:
    kind = getattr(importlib.import_module("transformers"), name)
    made: nn.Module = kind(kind.config_class(**configuration))
    return made
