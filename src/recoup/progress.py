"""How long work tells where it stands: a function of the stage's name, what is done and what there is to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Called often; `total` is None where it is not known beforehand."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None:
        """Show that `done` of `total` steps of `stage` are behind us."""
        ...


def silent(stage: str, done: int, total: int | None, /) -> None:
    """Progress that nobody watches."""


class Clock:
    """Seconds by stage; a stage that is entered again adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the seconds of a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
