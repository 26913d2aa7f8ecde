"""The default method, and the same without what takes most of its time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from recoup.algebra.selection import Selector
from recoup.config import Outputs, Weighting
from recoup.methods.measured import allocate_by_error, check_measured, recover_and_choose

# Strengths of the pull towards the one-pass weights that held-out images choose from; infinity stays there.
RIDGES = (1e-4, 1e-2, 1e-1, 1.0, math.inf)


@dataclass(frozen=True, slots=True)
class Best:
    """The default: widths by measured output error, layers refitted in sequence and jointly, judged on held-out images.

    selector: ranks the channels of a group; a name or a function.
    ridge: added to the diagonal of a covariance, relative to its mean.
    positions: output positions per image and batch that enter the statistics; None for all.
    multiple_of: every layer keeps a multiple of so many outputs, or as many as before; "device" for what suits it.
    confidence: probability that the tolerance also holds on unseen images; None checks the validation images only.
    outputs: "classes" are compared by their divergence, "values" by their squared error; "auto" takes a single output
        of shape (samples, n) for classes.
    refine: seconds of gradient steps towards the original's outputs at the end, without labels.
    seed: random seed.
    """

    selector: str | Selector = "backward"
    ridge: float = 1e-6
    positions: int | None = 64
    multiple_of: int | Literal["device"] = 1
    confidence: float | None = 0.95
    outputs: Outputs = "auto"
    refine: float = 0.0
    seed: int = 0

    # What the method is; no options. benchmarks/ablation.py tells what each is worth.
    holds_out: ClassVar[bool] = True
    weighting: ClassVar[Weighting] = "none"
    ridges: ClassVar[tuple[float, ...]] = RIDGES
    rounds: ClassVar[int] = 2
    joint_steps: ClassVar[int] = 4
    span: ClassVar[int] = 3

    def __post_init__(self) -> None:
        check_measured(self)

    allocate = allocate_by_error
    recover = recover_and_choose


@dataclass(frozen=True, slots=True)
class Fast:
    """`Best` without the second round of measuring and the joint refits, which take most of its time.

    Its fields are those of `Best`.
    """

    selector: str | Selector = "backward"
    ridge: float = 1e-6
    positions: int | None = 64
    multiple_of: int | Literal["device"] = 1
    confidence: float | None = 0.95
    outputs: Outputs = "auto"
    refine: float = 0.0
    seed: int = 0

    holds_out: ClassVar[bool] = True
    weighting: ClassVar[Weighting] = "none"
    ridges: ClassVar[tuple[float, ...]] = RIDGES
    rounds: ClassVar[int] = 1
    joint_steps: ClassVar[int] = 0
    span: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_measured(self)

    allocate = allocate_by_error
    recover = recover_and_choose
