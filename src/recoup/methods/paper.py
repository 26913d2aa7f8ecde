"""The paper's method, "Pruning with Compensation" (Xie et al., arXiv 2108.13728), and the code its authors released."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from recoup.algebra.selection import Selector
from recoup.allocation.binary import Constraint, Order, Unit
from recoup.config import Weighting, require_one_of
from recoup.methods.published import allocate_as_published, check_published, recover_as_published


@dataclass(frozen=True, slots=True)
class Paper:
    """As printed, with normalised weights and the tolerance split by layer that the paper's text describes.

    A tolerance is searched for layer by layer; a budget gets the same share of every group. Layers are refitted in one
    pass, from the statistics of the original network, unless another `recovery` is asked for.

    selector: ranks the channels of a group; a name or a function.
    weighting: "slope" weighs every position by the mean of g'(y)² over the outputs, g being the activation behind the
        layer; "outputs" has a weight for every output, or for a few that go together; "none" weighs all alike.
    recovery: what becomes of the weights that stay, by name: none, mean-shift, batch-norm, one-pass or rescale.
    ridge: added to the diagonal of a covariance, relative to its mean.
    positions: output positions per image and batch that enter the statistics; None for all.
    steps: bisections per unit of the search.
    constraint: "step" allows unit i of L the share i/L of the tolerance; "global" all of it from the start.
    order: in which the search visits units: bottom-up, top-down or random.
    unit: what it visits: all groups of a residual "block" together, or every "layer" (group of channels) alone. By
        "block", groups outside of all blocks stay whole; a network without blocks is visited by layer.
    classifier: whether what the classifier reads may be pruned: its last layer, and linear layers before it.
    multiple_of: every layer keeps a multiple of so many outputs, or as many as before; "device" for what suits it.
    seed: random seed.
    """

    selector: str | Selector = "forward"
    weighting: Weighting = "slope"
    recovery: str = "one-pass"
    ridge: float = 1e-6
    positions: int | None = 256
    steps: int = 3
    constraint: Constraint = "step"
    order: Order = "bottom-up"
    unit: Unit = "block"
    classifier: bool = False
    multiple_of: int | Literal["device"] = 1
    seed: int = 0

    holds_out: ClassVar[bool] = False
    confidence: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_published(self)
        require_one_of("weighting", self.weighting, get_args(Weighting))

    allocate = allocate_as_published
    recover = recover_as_published


@dataclass(frozen=True, slots=True)
class Released:
    """The authors' released code: no slope weights, and every refitted output is rescaled to its old variance.

    Its fields are those of `Paper`, without `weighting` and `recovery`.
    """

    selector: str | Selector = "forward"
    ridge: float = 1e-6
    positions: int | None = 256
    steps: int = 3
    constraint: Constraint = "step"
    order: Order = "bottom-up"
    unit: Unit = "block"
    classifier: bool = False
    multiple_of: int | Literal["device"] = 1
    seed: int = 0

    holds_out: ClassVar[bool] = False
    confidence: ClassVar[None] = None
    weighting: ClassVar[Weighting] = "none"
    recovery: ClassVar[str] = "rescale"

    def __post_init__(self) -> None:
        check_published(self)

    allocate = allocate_as_published
    recover = recover_as_published
