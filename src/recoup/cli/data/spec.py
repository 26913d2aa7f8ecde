"""The text that names a data set, taken apart: `kind`, `kind:place`, `kind@split` or `kind:place@split`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from recoup.errors import UsageError

SPLIT_KINDS = frozenset({"cifar10", "cifar100", "digits", "imagenet", "voc"})
"""Kinds whose text may end in `@split`; elsewhere an @ belongs to the folder's name."""


@dataclass(frozen=True, slots=True)
class DataSpec:
    """A parsed text: the kind of data, where it is, and which part of it is meant (empty where not said)."""

    text: str
    kind: str
    place: str
    split: str


def parse_spec(text: str) -> DataSpec:
    """The parts of a text such as `cifar10:DIR@train`.

    >>> parse_spec("cifar10:data@home/cifar@train").place
    'data@home/cifar'
    """
    head, _, place = text.partition(":")
    kind, _, split = head.partition("@")
    if kind not in SPLIT_KINDS:
        return DataSpec(text, head, place, "")
    if split:
        return DataSpec(text, kind, place, split)
    before, at, last = place.rpartition("@")
    # An @ with a separator after it belongs to a folder further up.
    if not at or "/" in last or "\\" in last:
        return DataSpec(text, kind, place, "")
    return DataSpec(text, kind, before, last)


def unknown_split(spec: DataSpec, known: Iterable[str]) -> UsageError:
    """The error for a split that `spec` asks for and its kind of data does not have."""
    names = list(known)
    close = difflib.get_close_matches(spec.split, names, n=1)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    return UsageError(f"'{spec.text}': {spec.kind} has no split '{spec.split}'. {hint}Use one of {', '.join(names)}.")
