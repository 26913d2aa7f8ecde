"""Which numbers that modules remember follow a cut, as `split_size` in an attention does.

A whole number of a module is a candidate where it equals the number of a group's channels, or a size that the module's
own tensors, or its children's, lose along with that group. Another size, one that stays, may be the same number: it
cannot be told apart by looking. So nothing is believed: candidates are tried, and those stay under which the code,
captured again, runs the graph that the cut ought to give. Where it does without any, none follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from torch import nn

from recoup.channels.numbers import Number
from recoup.channels.structure import Site, Structure
from recoup.operators.record import refresh_of


class Doubt(IntEnum):
    """What else a number may be: nothing known; a size that stays; how wide a channel is; a size of the layer's own."""

    NONE = 0
    SIZE = 1
    EXTENT = 2
    LAYER = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A number that may follow."""

    number: Number
    doubt: Doubt

    @property
    def name(self) -> str:
        """What modules call it."""
        return self.number.setting.rpartition(".")[2]


def with_followers(structure: Structure, model: nn.Module) -> list[Structure]:
    """The structure without numbers that follow, then with more and more of them, in the order in which to try them.

    A number that need not follow must not: it may be another one, of layers or of tokens, that is the same by chance.
    """
    found = _candidates(structure, model)
    most = max(map(len, found.values()), default=0)
    # A number may be in proportion to one group or to another, as `d_model` is in a layer from one stream to another.
    choices = [[several[min(place, len(several) - 1)] for several in found.values()] for place in range(most)]
    tried = {tuple(c.number for c in some): None for choice in choices for some in _subsets(choice)}
    return [replace(structure, numbers=numbers) for numbers in dict.fromkeys([(), *tried])]


def _subsets(candidates: list[Candidate]) -> Iterator[list[Candidate]]:
    """Those without doubt first, then some that are in doubt, then all."""
    names = dict.fromkeys(candidate.name for candidate in candidates if candidate.doubt is Doubt.EXTENT)
    upto = [[c for c in candidates if c.doubt <= doubt] for doubt in Doubt]
    counts = [[c for c in candidates if c.doubt <= Doubt.SIZE or c.name == name] for name in names]
    yield from (*upto[:2], *counts, *upto[2:])


def _candidates(structure: Structure, model: nn.Module) -> dict[str, list[Candidate]]:
    """By setting, one for each group that it may follow."""
    found: dict[str, list[Candidate]] = {}
    for group in structure.prunable:
        low, high = group.start, group.start + group.width
        sites = [site for site in structure.sites if bool(((site.channel_of >= low) & (site.channel_of < high)).any())]
        for owner in dict.fromkeys(name for site in sites for name in _owners(site)):
            for candidate in _of_module(structure, model, owner, sites, group.name, group.width):
                found.setdefault(candidate.number.setting, []).append(candidate)
    return found


def _owners(site: Site) -> tuple[str, ...]:
    """The layer that has a tensor, and the module around it."""
    layer = site.tensor.rpartition(".")[0]
    return (layer, layer.rpartition(".")[0])


def _of_module(
    structure: Structure, model: nn.Module, owner: str, sites: list[Site], group: str, width: int
) -> Iterator[Candidate]:
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return
    if refresh_of(module) is not None:  # torch's own layers are known
        return
    tensors = _tensors_near(structure, owner)
    own = {(site.tensor, site.dim) for site in sites}
    lost = {width} | {structure.shapes[tensor][dim] for tensor, dim in own if tensor in tensors}
    stays = {
        size for tensor in tensors for dim, size in enumerate(structure.shapes[tensor]) if (tensor, dim) not in own
    }
    extents = {structure.shapes[tensor][dim] // width for tensor, dim in own if tensor in tensors}
    is_leaf = not any(True for _ in module.children())
    for name, value in vars(module).items():
        if type(value) is int and value > 1 and value in lost and value % width == 0 and not name.startswith("_"):
            doubt = Doubt.SIZE if value in stays else Doubt.EXTENT if value in extents else Doubt.NONE
            doubt = Doubt.LAYER if doubt and is_leaf else doubt
            yield Candidate(Number(f"{owner}.{name}".lstrip("."), value, group), doubt)


def _tensors_near(structure: Structure, owner: str) -> list[str]:
    """The tensors of a module and of its children."""
    start = f"{owner}." if owner else ""
    return [name for name in structure.shapes if name.startswith(start) and name[len(start) :].count(".") <= 1]
