"""The letters of an einsum of two operands."""

from __future__ import annotations

import string
from collections.abc import Sequence


def words_of(equation: str, ranks: Sequence[int]) -> tuple[list[str], str] | None:
    """The letters of both operands and of the result, letters for dots too; None where there is more to it."""
    reads, arrow, result = equation.replace(" ", "").partition("->")
    words = reads.split(",")
    if not arrow or not result or not len(words) == len(ranks) == 2:
        return None
    free = [letter for letter in string.ascii_letters if letter not in equation]
    behind = max((rank + 3 - len(word) for word, rank in zip(words, ranks, strict=True) if "..." in word), default=0)
    *words, result = (word.replace("...", "".join(free[:behind])) for word in (*words, result))
    fits = [len(word) for word in words] == list(ranks)
    return (words, result) if fits and all(len(set(word)) == len(word) for word in words) else None
