"""Reductions: over positions the channel stays, over channels they mix."""

from __future__ import annotations

from recoup.structure.labels import collapse
from recoup.structure.ledger import Ledger
from recoup.structure.rules.table import Call, Value, lock_operands, rule, spread_over

# Where the reduced dims are among the arguments, if not in the second place.
_PLACE = {"linalg_vector_norm": 2, "norm": 2}


@rule(
    "mean", "sum", "amax", "amin", "var", "std", "prod", "logsumexp", "max", "min", "nansum", "var_mean", "std_mean",
    "linalg_vector_norm", "norm", "argmax", "argmin", "any", "all",
)  # fmt: skip
def reduce(call: Call, ledger: Ledger) -> Value:
    """Labels collapse along the reduced dims; what they mix is tied, or stays if it is all there is."""
    labels = ledger.labels_of(call.args[0])
    dims = _dims(call, labels.dim())
    mixed = ledger.mix(labels, dims, f"{call.site} mixes channels")
    if mixed is None:
        return lock_operands(call, ledger, f"{call.site} mixes channels")
    shape = call.shape[0] if isinstance(call.shape, list) else call.shape
    return spread_over(collapse(mixed, dims, keepdim=len(shape) == labels.dim()), call.shape)


def _dims(call: Call, count: int) -> list[int]:
    given = call.argument(_PLACE.get(call.name, 1), "dim")
    if isinstance(given, bool):  # var(unbiased=...) has a flag in that place
        given = None
    dims = range(count) if given is None or given == [] else [given] if isinstance(given, int) else given
    return [dim % count for dim in dims]
