"""Numbers and switches that modules remember beside their tensors: in attributes, and in the `config` that they share.

A setting has a dotted name, such as `layers.0.attention.num_heads` or `config.use_cache`. Transformer libraries hand
one `config` to all modules; a copy of a model has copies of its configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import nn

Settings: TypeAlias = Mapping[str, "int | bool"]

CONFIG = "config"
_CACHE = "use_cache"


def without_cache(twin: nn.Module) -> nn.Module:
    """`twin`, a copy of ours, that returns no cache of keys and values, which no graph could hold."""
    for config in configs(twin).values():
        if getattr(config, _CACHE, None) is True:
            setattr(config, _CACHE, False)
    return twin


def caches(model: nn.Module) -> dict[str, bool]:
    """The settings that ask for a cache of keys and values."""
    found = {f"{name}.{_CACHE}".lstrip("."): config for name, config in configs(model).items()}
    return {name: True for name, config in found.items() if getattr(config, _CACHE, None) is True}


def configs(model: nn.Module) -> dict[str, Any]:
    """Every distinct config by the dotted name of the first module that has it."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        config = vars(module).get(CONFIG)
        if config is not None and hasattr(config, "__dict__"):
            found.setdefault(id(config), (f"{name}.{CONFIG}".lstrip("."), config))
    return dict(found.values())


def adjust(model: nn.Module, settings: Settings) -> None:
    """Give the model's own settings other values."""
    for name, value in settings.items():
        setattr(owner_of(model, name), name.rpartition(".")[2], value)


def is_setting(model: nn.Module, name: str) -> bool:
    """Whether a name is that of a number or a switch of a module's, or may be one of a config's."""
    try:
        owner = owner_of(model, name)
    except AttributeError:
        return False
    value = getattr(owner, name.rpartition(".")[2], None)
    return type(value) in (int, bool) or (value is None and not isinstance(owner, nn.Module))


def owner_of(model: nn.Module, name: str) -> object:
    """The module or the config that a setting belongs to."""
    *path, _ = name.split(".")
    config = path[-1:] == [CONFIG]
    module = model.get_submodule(".".join(path[:-1] if config else path))
    return getattr(module, CONFIG) if config else module
