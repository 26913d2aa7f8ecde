"""Normalisations: those of single channels follow them, those of several tie or hold them."""

from __future__ import annotations

from recoup.structure.labels import along
from recoup.structure.ledger import Ledger, TensorRef
from recoup.structure.rules.table import Call, Value, lock_operands, rule


@rule("batch_norm", "_native_batch_norm_legit_no_training", "instance_norm")
def per_channel(call: Call, ledger: Ledger) -> Value:
    """Scale, shift and running statistics follow dim 1."""
    labels = ledger.labels_of(call.args[0])
    followers = [value for value in call.args[1:5] if value is not None]
    if not all(isinstance(value, TensorRef) for value in followers):
        return lock_operands(call, ledger, f"{call.site} has parameters that depend on the input")
    channels = ledger.channels_along(labels, 1, call.site)
    for tensor in followers:
        ledger.site(tensor, 0, channels)
    return labels if call.name != "_native_batch_norm_legit_no_training" else [labels, None, None]


@rule("group_norm")
def group_norm(call: Call, ledger: Ledger) -> Value:
    """The channels of one group are normalised together, so they go together."""
    labels, groups = ledger.labels_of(call.args[0]), call.args[1]
    followers = [call.argument(place, name) for place, name in ((2, "weight"), (3, "bias"))]
    followers = [value for value in followers if value is not None]
    if not all(isinstance(value, TensorRef) for value in followers):
        return lock_operands(call, ledger, f"{call.site} has parameters that depend on the input")
    channels = ledger.channels_along(labels, 1, call.site)
    if groups == 1:
        ledger.lock(channels, f"{call.site} normalises over all channels")
    elif groups < len(channels):
        tied = ledger.tie(channels.view(groups, -1), f"{call.site} normalises it beside channels of fixed number")
        channels = tied.repeat_interleave(len(channels) // groups)
    for tensor in followers:
        ledger.site(tensor, 0, channels)
    return along(channels, 1, call.shape)


@rule("layer_norm", "rms_norm", "native_layer_norm")
def layer_norm(call: Call, ledger: Ledger) -> Value:
    """Over the last dims; exact only where all that is normalised together stays together."""
    labels = ledger.labels_of(call.args[0])
    dims = range(labels.dim() - len(call.args[1]), labels.dim())
    mixed = ledger.mix(labels, dims, f"{call.site} normalises over channels")
    result = labels if mixed is None else mixed
    return result if call.name != "native_layer_norm" else [result, None, None]
