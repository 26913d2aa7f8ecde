"""Series of groups that one number of a model's config counts, so that the class can be built again from its config.

A config, as transformer libraries have it, holds one number for all layers: `intermediate_size`, or a number of heads.
Which groups a number counts is asked of the class itself: it is built from a config with twice that number, on the meta
device, where nothing is computed. The sizes that double are those of the series.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from recoup.channels.numbers import Number
from recoup.channels.structure import Group, Structure
from recoup.errors import UsageError, VerificationError, told
from recoup.graph.modes import quiet
from recoup.graph.settings import CONFIG, configs
from recoup.operators.record import refresh_of

# What configs call the hidden channels of a layer, its heads, and its heads for keys and values.
HIDDEN = (
    "intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_hidden_size",
    "hidden_dim",
)  # fmt: skip
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
KEYS = "num_key_value_heads"
# The width of a head, which has to stay where a class would otherwise make it wider as heads go.
HEAD_WIDTH = "head_dim"
UNCOUNTED = "no number of the model's config counts it in all layers at once"

_Sizes: TypeAlias = dict[tuple[str, int], int]


@dataclass(frozen=True, slots=True)
class _Count:
    """Fields of a config that are doubled together, and what else has to be said for that."""

    fields: Mapping[str, int]
    fixed: Mapping[str, int]


def with_series(structure: Structure, model: nn.Module, added: frozenset[str]) -> Structure:
    """The structure in which a config can tell every width: groups in series, what no number counts locked.

    No layer gets a bias (`added`) that its class would not make.

    Raises:
        UsageError: the model has no config that its class can be built from.
    """
    own = _sizes(_built(model, getattr(model, CONFIG, None)))
    series, numbers, taken = list(structure.series), list[Number](), set[str]()
    for count in _counts(model, structure):
        twice = _doubled(model, count)
        groups = [] if twice is None else _counted(structure, own, _sizes(twice))
        if twice is not None and groups and not taken & {group.name for group in groups}:
            series.append(tuple(group.name for group in groups))
            numbers += _numbers(model, twice, count, groups[0])
            taken |= {group.name for group in groups}
    consumers = tuple(replace(c, biases=() if set(c.biases) & added else c.biases) for c in structure.consumers)
    counted = replace(structure, series=tuple(series), numbers=tuple(numbers), consumers=consumers)
    return counted.lock({group.name: UNCOUNTED for group in structure.prunable if group.name not in taken})


def rebuilt(model: nn.Module) -> nn.Module:
    """A model that its class makes of its config alone, with the same tensors in it.

    Raises:
        VerificationError: the config does not tell the sizes that the model has.
    """
    config = getattr(model, CONFIG, None)
    try:
        with quiet():
            twin = _class_of(model)(copy.deepcopy(config))
            twin.load_state_dict(model.state_dict())
    except Exception as error:  # user code
        raise VerificationError(
            f"{type(model).__name__}, built again from its config, does not take the smaller weights "
            f"({told(error)[:300]}). Prune without keep_config, and save the result by result.save."
        ) from error
    like = next(model.parameters())
    return twin.to(device=like.device, dtype=like.dtype).eval()


def _class_of(model: nn.Module) -> Callable[[Any], nn.Module]:
    return type(model)


def _built(model: nn.Module, config: Any) -> nn.Module:
    """The class made of a config, without numbers in it."""
    if config is None:
        raise UsageError(f"keep_config: {type(model).__name__} has no config. Leave it out, or use keep_class.")
    try:
        with quiet(), torch.device("meta"):
            return _class_of(model)(copy.deepcopy(config))
    except Exception as error:  # user code
        raise UsageError(
            f"keep_config: {type(model).__name__} cannot be built from its config ({told(error)[:200]}). Leave it out, "
            "or use keep_class."
        ) from error


def _doubled(model: nn.Module, count: _Count) -> nn.Module | None:
    """The class made of a config with twice these numbers; None if it refuses."""
    config = copy.deepcopy(getattr(model, CONFIG))
    try:
        for field, value in count.fields.items():
            setattr(config, field, 2 * value)
        for field, value in count.fixed.items():
            setattr(config, field, value)
        return _built(model, config)
    except Exception:  # the config's own checks, or the class's
        return None


def _sizes(model: nn.Module) -> _Sizes:
    tensors = model.named_parameters(remove_duplicate=False)
    return {(name, dim): size for name, tensor in tensors for dim, size in enumerate(tensor.shape)}


def _counts(model: nn.Module, structure: Structure) -> Iterator[_Count]:
    """What may count a group: a number of hidden channels, or one of heads together with those for keys and values."""
    config = getattr(model, CONFIG)
    widths = dict.fromkeys(group.width for group in structure.prunable)
    for field in HIDDEN:
        if hasattr(config, field):
            value = getattr(config, field)
            yield from (_Count({field: n}, {}) for n in ([value] if type(value) is int else widths))
    keys = {KEYS: config.num_key_value_heads} if type(getattr(config, KEYS, None)) is int else {}
    for field in HEADS:
        if type(value := getattr(config, field, None)) is int:
            yield _Count({field: value, **keys}, {})
            yield _Count({field: value, **keys}, _head_width(model, config))


def _head_width(model: nn.Module, config: Any) -> dict[str, int]:
    """The width of heads as modules know it, where the config leaves it to the class."""
    known = {vars(module)[HEAD_WIDTH] for module in model.modules() if type(vars(module).get(HEAD_WIDTH)) is int}
    return {HEAD_WIDTH: known.pop()} if getattr(config, HEAD_WIDTH, None) is None and len(known) == 1 else {}


def _counted(structure: Structure, own: _Sizes, twice: _Sizes) -> list[Group]:
    """The groups all of whose sizes double, if nothing else does and they are equally wide; otherwise none."""
    double = {place for place, size in own.items() if twice.get(place) == 2 * size}
    if own.keys() != twice.keys() or double != {place for place in own if twice[place] != own[place]}:
        return []
    groups, places = list[Group](), set[tuple[str, int]]()
    for group in structure.prunable:
        sites = _places(structure, group) & own.keys()
        if sites and sites <= double:
            groups.append(group)
            places |= sites
    whole = all(group.free == group.width == groups[0].width for group in groups)
    return groups if whole and places == double else []


def _places(structure: Structure, group: Group) -> set[tuple[str, int]]:
    low, high = group.start, group.start + group.width
    of = ((site, site.channel_of) for site in structure.sites)
    return {(site.tensor, site.dim) for site, channels in of if bool(((channels >= low) & (channels < high)).any())}


def _numbers(model: nn.Module, twice: nn.Module, count: _Count, group: Group) -> Iterable[Number]:
    """The settings that change with a series: in every config, and in modules, as the class sets them."""
    for name, config in configs(model).items():
        for field, value in count.fields.items():
            if name == CONFIG or getattr(config, field, None) == value:
                yield Number(f"{name}.{field}", value, group.name)
        yield from (Number(f"{name}.{field}", value, group.name, fixed=True) for field, value in count.fixed.items())
    for name, module in twice.named_modules():
        if refresh_of(module) is None:
            before = vars(model.get_submodule(name))
            yield from (
                Number(f"{name}.{field}".lstrip("."), value // 2, group.name)
                for field, value in vars(module).items()
                if type(value) is int and type(before.get(field)) is int and value == 2 * before[field] != 0
            )
