"""Normalisations whose parameters go channel by channel."""

from __future__ import annotations

from recoup.structure.ledger import Ledger, TensorRef
from recoup.structure.rules.table import Call, Value, lock_operands, rule


@rule("batch_norm", "_native_batch_norm_legit_no_training", "instance_norm")
def per_channel(call: Call, ledger: Ledger) -> Value:
    """Scale, shift and running statistics follow dim 1."""
    labels = ledger.labels_of(call.args[0])
    followers = [value for value in call.args[1:5] if value is not None]
    if not all(isinstance(value, TensorRef) for value in followers):
        return lock_operands(call, ledger, f"{call.site} has parameters that are computed, not stored")
    channels = ledger.channels_along(labels, 1, call.site)
    for tensor in followers:
        ledger.site(tensor, 0, channels)
    return labels if call.name != "_native_batch_norm_legit_no_training" else [labels, None, None]
