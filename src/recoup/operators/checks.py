"""Checks that export writes down: they return nothing and move nothing."""

from __future__ import annotations

from recoup.labels.constraints import Constraints
from recoup.operators.call import LabelCall, Value
from recoup.operators.record import operator


@operator("_assert_tensor_metadata", "_assert_async", "_assert_scalar", is_check=True)
def check(call: LabelCall, constraints: Constraints) -> Value:
    """Nothing enters and nothing leaves."""
