"""Reductions: over positions the channel stays, over channels they mix."""

from __future__ import annotations

from torch import Tensor

from recoup.labels.arrays import collapse, core, varying_dims
from recoup.labels.constraints import Constraints
from recoup.operators.call import LabelCall, Value, lock_operands, spread_over, unlabelled
from recoup.operators.differential import linear_in_first
from recoup.operators.record import operator

# Where the reduced dims are among the arguments, if not in the second place.
_PLACE = {"linalg_vector_norm": 2, "norm": 2}


def reduce(call: LabelCall, constraints: Constraints) -> Value:
    """Labels collapse along the reduced dims; what they mix is tied, or stays if it is all there is.

    A sum or a mean over channels may be noted instead: it can become a layer.
    """
    labels = constraints.labels_of(call.args[0])
    dims = _dims(call, labels.dim())
    if constraints.notes_sums and call.name in ("sum", "mean") and _is_of_channels(labels, dims):
        constraints.sums.append((call.node, core(labels)[0].flatten()))
        return unlabelled(call.shape)
    mixed = constraints.mix(labels, dims, f"{call.site} mixes channels")
    if mixed is None:
        return lock_operands(call, constraints, f"{call.site} mixes channels")
    shape = call.shape[0] if isinstance(call.shape, list) else call.shape
    return spread_over(collapse(mixed, dims, keepdim=len(shape) == labels.dim()), call.shape)


def _is_of_channels(labels: Tensor, dims: list[int]) -> bool:
    """Whether what is summed are channels, one for each index of a dim."""
    varying = varying_dims(labels)
    return len(varying) == 1 and varying[0] in dims and bool((core(labels)[0] >= 0).all())


operator("mean", "sum", is_pooling=True, differential=linear_in_first)(reduce)
operator("amax", is_pooling=True)(reduce)
operator(
    "amin", "var", "std", "prod", "logsumexp", "max", "min", "nansum", "var_mean", "std_mean",
    "linalg_vector_norm", "norm", "argmax", "argmin", "any", "all",
)(reduce)  # fmt: skip


def _dims(call: LabelCall, count: int) -> list[int]:
    given = call.argument(_PLACE.get(call.name, 1), "dim")
    if isinstance(given, bool):  # var(unbiased=...) has a flag in that place
        given = None
    dims = range(count) if given is None or given == [] else [given] if isinstance(given, int) else given
    return [dim % count for dim in dims]
