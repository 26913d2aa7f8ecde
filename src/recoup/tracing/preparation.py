"""The copy of the caller's model that all work is done on: what of it is shared, and what is different."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from recoup.errors import CaptureError, warn
from recoup.graph.copies import hooked, light_copy, strip_hooks, untie, working_copy
from recoup.graph.norms_by_hand import norms_by_hand, with_own_norms
from recoup.graph.settings import caches, without_cache
from recoup.inputs.batches import Inputs, leaves_in

_LAYERS = (nn.Linear, _ConvNd)
_TABLES = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A copy that shares the caller's parameters and has buffers of its own.

    It has the caller's hooks only if they change what it returns (`keeps_hooks`). Weights in `untied` are a table and
    a layer at once in the caller's model, and the layer's own here, as no weight could be right for both. `caches` are
    the settings that ask for a cache of keys and values: it has none. In the place of `norms`, RMSNorms written out by
    hand, it has torch's own.
    """

    model: nn.Module
    untied: tuple[str, ...]
    keeps_hooks: bool
    caches: Mapping[str, bool]
    norms: tuple[str, ...] = ()


def prepared(model: nn.Module, sample: Inputs, *, may_untie: bool, streams: bool = False) -> Prepared:
    """The copy to work on; the model itself is not touched. With `streams` norms are to be seen as such."""
    twin = light_copy(model, own_buffers=True)
    twin.train(model.training)
    for mine, theirs in zip(twin.modules(), model.modules(), strict=True):
        mine.training = theirs.training
    caching = caches(twin)
    without_cache(twin)
    keeps_hooks = bool(hooked(twin)) and _hooks_matter(twin, sample)
    if keeps_hooks:
        warn(
            f"the hooks of {', '.join(name or 'the model' for name in hooked(twin)[:5])} change what the model "
            "returns, so they are kept and taken for a part of it. Remove them before pruning if they are not."
        )
    else:
        strip_hooks(twin)
    names = _double_roles(twin) if may_untie else ()
    norms = norms_by_hand(twin) if streams else ()
    return Prepared(with_own_norms(untie(twin, names), norms), names, keeps_hooks, caching, norms)


def require_idle(model: nn.Module, names: Iterable[str], call: Inputs) -> None:
    """Refuse a model that runs modules for all samples of a batch which it does not run for a few, as it was captured.

    Raises:
        CaptureError: one of these modules runs.
    """
    twin, ran = working_copy(model), []
    for name in names:
        twin.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    try:
        with torch.no_grad():
            call.copy().call(twin)
    except Exception:  # user code; calibration will say which batch it fails on
        return
    if ran:
        raise CaptureError(
            f"{type(model).__name__} runs {ran[0]} for {call.size} samples and not for a few, so there is no one "
            "network to prune. Make it compute the same for any number of samples."
        )


def _hooks_matter(twin: nn.Module, sample: Inputs) -> bool:
    """Whether the model returns something else without its hooks."""
    try:
        with torch.no_grad():
            hooked_up = leaves_in(sample.copy().call(working_copy(twin)))
            bare = leaves_in(sample.copy().call(strip_hooks(working_copy(twin))))
    except Exception:  # user code; whether the model runs at all is found out, and told, by the capture
        return True
    return len(hooked_up) != len(bare) or not all(_same(a, b) for a, b in zip(hooked_up, bare, strict=True))


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, equal_nan=True)
    return type(a) is type(b) and bool(a == b)


def _double_roles(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers' weights that are tables of embeddings too."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, _TABLES)}
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, _LAYERS))
    return tuple(f"{name}.weight" for name, module in layers if id(module._parameters.get("weight")) in tables)
