"""Linear layers, embeddings and bilinear layers."""

from __future__ import annotations

from torch import Tensor, nn

from recoup.labels.arrays import along
from recoup.labels.constraints import Constraints, TensorRef
from recoup.operators.call import LabelCall, Value, lock_operands
from recoup.operators.differential import product
from recoup.operators.products import dense, is_stored, read_plainly
from recoup.operators.record import LayerCall, operator


def _refresh_linear(module: nn.Linear, _: Tensor | None) -> None:
    module.out_features, module.in_features = module.weight.shape


def _refresh_embedding(module: nn.Embedding, _: Tensor | None) -> None:
    module.num_embeddings, module.embedding_dim = module.weight.shape


@operator(
    "linear",
    differential=product,
    layer=LayerCall(("input", "weight", "bias"), read_plainly, adds_bias=True),
    weights=(1, 2),
    modules={nn.Linear: _refresh_linear},
)
def linear(call: LabelCall, constraints: Constraints) -> Value:
    """Reads the last dim."""
    weight, bias = call.args[1], call.argument(2, "bias")
    if not is_stored(weight, bias):
        return lock_operands(call, constraints, f"{call.site} has a weight that depends on the input")
    return dense(call, constraints, weight, bias, dim=len(call.shape) - 1, input_dim=1)


@operator("addmm", layer=LayerCall(("bias", "input", "weight"), read_plainly), weights=(0, 2))
def addmm(call: LabelCall, constraints: Constraints) -> Value:
    """A linear layer written as bias + x @ weight."""
    bias, _, weight = call.args[:3]
    plain = call.argument(3, "beta", 1) == 1 and call.argument(4, "alpha", 1) == 1
    if not is_stored(weight, bias) or not plain or len(bias.shape) != 1:
        return lock_operands(call, constraints, f"{call.site} has a weight that depends on the input")
    return dense(call, constraints, weight, bias, dim=1, input_dim=0, read=call.args[1])


@operator("embedding", weights=(0,), modules={nn.Embedding: _refresh_embedding})
def embedding(call: LabelCall, constraints: Constraints) -> Value:
    """Looks rows up: its channels are the columns of the table."""
    weight = call.args[0]
    if not isinstance(weight, TensorRef):
        return lock_operands(call, constraints, f"{call.site} has a weight that depends on the input")
    return along(constraints.outputs(weight, 1), len(call.shape) - 1, call.shape)


@operator("bilinear")
def bilinear(call: LabelCall, constraints: Constraints) -> Value:
    """Makes channels; what it reads stays, as it is multiplied in pairs."""
    weight, bias = call.args[2], call.argument(3, "bias")
    if not is_stored(weight, bias):
        return lock_operands(call, constraints, f"{call.site} has a weight that depends on the input")
    for value in call.args[:2]:
        constraints.lock(constraints.labels_of(value), f"{call.site} multiplies its inputs in pairs")
    outputs = constraints.outputs(weight, 0)
    if bias is not None:
        constraints.site(bias, 0, outputs)
    return along(outputs, len(call.shape) - 1, call.shape)
