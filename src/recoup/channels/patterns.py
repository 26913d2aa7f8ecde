"""Groups by name: `layer1.0.conv1`, `layer1` for all that it makes, `layer*.conv?` with wildcards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from recoup.channels.groups import Group, Structure
from recoup.errors import UsageError, unknown_name

LEFT_ALONE = "left alone by request"


def lock_others(structure: Structure, only: Iterable[str], exclude: Iterable[str]) -> Structure:
    """The structure with every group locked that `only` does not name or `exclude` does.

    Raises:
        UsageError: a pattern matches no group.
    """
    only, exclude = _listed(only, "only"), _listed(exclude, "exclude")
    chosen = {name for pattern in only for name in matching(structure, pattern, "only")}
    spared = {name for pattern in exclude for name in matching(structure, pattern, "exclude")}
    others = {group.name for group in structure.groups if only and group.name not in chosen}
    return structure.lock(dict.fromkeys(spared | others, LEFT_ALONE))


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
    return found


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


def _listed(patterns: Iterable[str], what: str) -> list[str]:
    if isinstance(patterns, str):
        raise UsageError(f"{what} must be a list of names, got the text {patterns!r}. Write [{patterns!r}].")
    return list(patterns)


def _require_possible(group: Group, width: int) -> None:
    staying = group.width - group.free
    if width == group.width or (staying <= width < group.width and group.free):
        return
    locked = f", of which {staying} are locked: {'; '.join(group.reasons)}" if staying else ""
    raise UsageError(f"{group.name} cannot have {width} channels: it has {group.width}{locked}.")
