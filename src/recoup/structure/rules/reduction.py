"""Reductions: over positions the channel stays, over channels they mix."""

from __future__ import annotations

from recoup.structure.labels import collapse, varies
from recoup.structure.ledger import Ledger
from recoup.structure.rules.table import Call, Value, lock_operands, rule


@rule("mean", "sum", "amax", "amin", "var", "std", "prod", "logsumexp")
def reduce(call: Call, ledger: Ledger) -> Value:
    """Labels collapse along the reduced dims if they do not change along them."""
    labels = ledger.labels_of(call.args[0])
    dims = call.argument(1, "dim")
    dims = None if isinstance(dims, bool) else dims  # var(unbiased=...) has a flag in that place
    dims = range(labels.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    dims = [dim % labels.dim() for dim in dims]
    if any(varies(labels, dim) for dim in dims):
        return lock_operands(call, ledger, f"{call.site} mixes channels")
    return collapse(labels, dims, keepdim=len(call.shape) == labels.dim())
