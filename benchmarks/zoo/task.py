"""What is to be done: one network in one way."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.zoo.rows import Way

SAMPLES = 48  # random inputs, unless another number is asked for


@dataclass(frozen=True, slots=True)
class Task:
    """One network and the way in which it is to be pruned, with so many inputs, and of another size if asked for.

    `library` is the module that its constructor imports, `device` where the network runs.
    """

    suite: str
    name: str
    way: Way
    samples: int = SAMPLES
    size: int | None = None
    library: str = "torch"
    device: str = "cpu"
