"""How long work tells where it stands: a function of the stage's name, what is done and what there is to do."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called often; `total` is None where it is not known beforehand."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None:
        """Show that `done` of `total` steps of `stage` are behind us."""
        ...


def silent(stage: str, done: int, total: int | None, /) -> None:
    """Progress that nobody watches."""
