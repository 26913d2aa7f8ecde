"""Operators without a tensor: checks that export writes down, sizes and arithmetic on them."""

from __future__ import annotations

from recoup.labels.constraints import Constraints
from recoup.operators.call import LabelCall, Value
from recoup.operators.record import operator, unknown


@operator("_assert_tensor_metadata", "_assert_async", "_assert_scalar", is_check=True)
def check(call: LabelCall, constraints: Constraints) -> Value:
    """Nothing enters and nothing leaves."""


# Sizes are followed by the graph itself: what reads them gets its numbers from there.
operator("sym_size", "sym_numel", gives_number=True)(unknown)
