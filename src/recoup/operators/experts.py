"""Experts of a mixture whose weights lie in one tensor: every row is multiplied by the weight of its own expert."""

from __future__ import annotations

from torch import fx

from recoup.labels.constraints import Constraints
from recoup.operators.call import LabelCall, Value, lock_operands
from recoup.operators.record import operator


def _macs(node: fx.Node) -> int:
    """Every row meets one expert's weight (inputs, outputs)."""
    rows, weight = (argument.meta["val"].shape for argument in node.args[:2])  # type: ignore[union-attr]  # tensors
    return int(rows[0] * weight[-2] * weight[-1])


@operator("_grouped_mm", "transformers::grouped_mm_fallback", macs=_macs)
def grouped(call: LabelCall, constraints: Constraints) -> Value:
    """What enters stays: experts see rows of their own, so each would have to be refitted by itself."""
    return lock_operands(call, constraints, f"{call.site} multiplies by experts that lie in one tensor")
