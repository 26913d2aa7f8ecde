"""Groups by name: `layer1.0.conv1`, `layer1` for all that it makes, `layer*.conv?` with wildcards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from recoup.channels.structure import Group, Structure
from recoup.config import require_names
from recoup.errors import UsageError, unknown_name

LEFT_ALONE = "left alone by request"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which groups may be pruned: those that `only` names, all of them if it is empty, but not those in `exclude`."""

    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(cls, only: Iterable[str], exclude: Iterable[str]) -> Choice:
        """The choice by lists of names; one text in the place of a list is refused."""
        return cls(require_names("only", only), require_names("exclude", exclude))

    def lock_others(self, structure: Structure) -> Structure:
        """The structure with every other group locked.

        Raises:
            UsageError: a pattern matches no group.
        """
        chosen = {name for pattern in self.only for name in matching(structure, pattern, "only")}
        spared = {name for pattern in self.exclude for name in matching(structure, pattern, "exclude")}
        spared |= {group.name for group in structure.groups if self.only and group.name not in chosen}
        return structure.lock({group.name: LEFT_ALONE for group in structure.prunable if group.name in spared})


def widths_by_group(structure: Structure, widths: Mapping[str, int]) -> dict[str, int]:
    """Widths by hand, by the names of the groups they are for.

    Raises:
        UsageError: a name matches no group, or the group cannot have that width.
    """
    found: dict[str, int] = {}
    for pattern, width in widths.items():
        for name in matching(structure, pattern, "widths"):
            _require_possible(structure.group(name), width)
            found[name] = width
    return {**{mate: width for name, width in found.items() for mate in _mates(structure, name)}, **found}


def _mates(structure: Structure, name: str) -> list[str]:
    """The other groups of a series: a width by hand is that of all."""
    series = next((names for names in structure.series if name in names), ())
    return [mate for mate in series if mate != name]


def matching(structure: Structure, pattern: str, what: str) -> list[str]:
    """Names of the groups that a pattern matches: by their own name, or by a module that makes some of them."""
    found = [group.name for group in structure.groups if any(_matches(pattern, name) for name in _names(group))]
    if not found:
        raise unknown_name(f"group or module in {what}", pattern, [group.name for group in structure.groups])
    return found


def _names(group: Group) -> Iterator[str]:
    yield group.name
    yield from group.producers


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _require_possible(group: Group, width: int) -> None:
    staying = group.width - group.free
    is_between = width == group.width or (staying <= width < group.width and group.free > 0)
    if is_between and group.rounded(width) == width:
        return
    if is_between:
        raise UsageError(
            f"{group.name} cannot have {width} channels: a grouped convolution takes them from its {group.step} parts "
            f"in turn; {group.rounded(width)} would do."
        )
    locked = f", of which {staying} are locked: {'; '.join(group.reasons)}" if staying else ""
    raise UsageError(f"{group.name} cannot have {width} channels: it has {group.width}{locked}.")
