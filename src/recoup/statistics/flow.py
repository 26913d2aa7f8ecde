"""What passes the network of absolute weights when its inputs are ones: layer by layer, in any depth without overflow.

    |W|       takes the place of every weight; biases and other summands that are no activations are left out
    γ / σ     absolute, takes the place of a batch norm; of other norms only |γ| stays
    g         activations, softmax and dropout are passed as they are
    E         of a table of embeddings that an input looks up, the mean of its absolute rows: no row is the first

A value is carried as m · exp(l), with one number l for the whole tensor and the largest m at most 1. Values are brought
to the larger l before they are added. With R = Σ outputs = r · exp(L), a layer that reads a = m · exp(l) has
∂R/∂a = ∂r/∂m · exp(L - l), and a ∂R/∂a = m ∂r/∂m · exp(L): autograd on the m's has no overflow either.

The graph is run as it was captured, on one sample. Slow twin: `flow_by_definition` in tests/oracles.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_map

from recoup.errors import UsageError
from recoup.graph.capture import Captured, module_path
from recoup.graph.runner import perform, run
from recoup.operators.names import operation_name
from recoup.operators.record import Operator, operator_of

# Products of two activations: the position of both operands is 0 and 1.
_PRODUCTS = ("mul", "matmul", "bmm", "mm", "multiply", "__mul__")
_SUMS = ("add", "sub", "rsub", "add_relu", "__add__", "__sub__")
# Norms, and where their factors stand.
_NORMS = {"batch_norm": 1, "instance_norm": 1, "layer_norm": 2, "group_norm": 2, "rms_norm": 2}
_PASSED = ("softmax", "log_softmax", "_softmax", "_log_softmax", "prelu", "cumsum")


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """A value of the absolute network, `mantissa` · exp(`log`)."""

    mantissa: Tensor
    log: Tensor

    def normalised(self) -> Carried:
        """The same value with 1 as its largest mantissa; one that is zero stays."""
        peak = self.mantissa.detach().abs().amax() if self.mantissa.numel() else self.log.new_zeros(())
        peak = torch.where(peak > 0, peak, 1.0)
        return Carried(self.mantissa / peak, self.log + peak.log())


@dataclass(frozen=True, slots=True, eq=False)
class LayerFlow:
    """What one call of a layer reads, (1, inputs, *positions), as mantissa and log, and the derivative ∂r/∂mantissa."""

    mantissa: Tensor
    log: Tensor
    derivative: Tensor


def flows(captured: Captured, weights: Sequence[str]) -> dict[str, list[LayerFlow]]:
    """What passes every call of the layers with these weights, by the name of the weight.

    Raises:
        UsageError: an operation has no counterpart in the absolute network.
    """
    watching = _Watch(captured.tensors, frozenset(weights), _computed_from_inputs(captured))
    device = next(iter(captured.values.values())).device
    with torch.enable_grad():
        stored = {name: value.detach() for name, value in captured.values.items()}
        given = {node.name: _ones(node, device) for node in captured.graph.nodes if node.op == "placeholder"}
        values = run(captured.graph.nodes, {**given, **stored}, stored.__getitem__, perform=watching.perform)
        (output,) = [node for node in captured.graph.nodes if node.op == "output"]
        returned = tree_flatten(fx.node.map_arg(output.args, lambda node: values[node.name]))[0]
        ends = _aligned([value for value in returned if isinstance(value, Carried)])[0]
        total = torch.stack([end.sum() for end in ends]).sum()
        every = [(name, call) for name, calls in watching.read.items() for call in calls]
        slopes = torch.autograd.grad(
            total, [call.mantissa for _, (call, _) in every], allow_unused=True, materialize_grads=True
        )
    found: dict[str, list[LayerFlow]] = {}
    for (name, (call, has_window)), slope in zip(every, slopes, strict=True):
        m, d = (t.detach() if has_window else t.detach().movedim(-1, 1) for t in (call.mantissa, slope))
        found.setdefault(name, []).append(LayerFlow(m, call.log, d))
    return found


class _Watch:
    """Runs operations of the absolute network, and notes what the watched layers read."""

    def __init__(self, tensors: Mapping[str, str], weights: frozenset[str], computed: frozenset[str]) -> None:
        """`computed` are the nodes that depend on an input."""
        self._tensors, self._weights, self._computed = tensors, weights, computed
        self.read: dict[str, list[tuple[Carried, bool]]] = {}

    def perform(self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What an operation returns in the absolute network."""
        record, name = operator_of(node.target), operation_name(node.target)
        if record.layer is not None:
            return self._layer(node, record, args, kwargs)
        if not any(isinstance(leaf, Carried) for leaf in tree_flatten((args, dict(kwargs)))[0]):
            is_looked_up = name == "embedding" and node.name in self._computed
            return _embedded(node, args[0]) if is_looked_up else perform(node, args, kwargs)
        rule = _rule(name, record, node)
        return rule(node, args, dict(kwargs))

    def _layer(self, node: fx.Node, record: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert record.layer is not None
        names = record.layer.arguments
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        weight, given = call["weight"], _carried(call["input"])
        if isinstance(weight, Carried):  # computed from activations
            raise _no_counterpart(node)
        read = Carried(given.mantissa.clone(), given.log)
        if not read.mantissa.requires_grad:  # computed from integers or stored tensors alone
            read.mantissa.requires_grad_()
        stored = record.layer.argument(node, "weight")
        name = self._tensors.get(stored.name) if isinstance(stored, fx.Node) else None
        if name in self._weights:
            self.read.setdefault(name, []).append((read, record.layer.has_window))
        call |= {"input": read.mantissa, "weight": weight.double().abs()}
        if isinstance(call.get("bias"), (Tensor, Carried)):
            call["bias"] = None if names[0] != "bias" else weight.new_zeros((), dtype=torch.float64)
        in_order = [call.pop(argument) for argument in names[: len(args)]]
        result = node.target(*in_order, **call)  # type: ignore[operator]  # the target of a call_function is one
        return Carried(result, given.log).normalised()


def _computed_from_inputs(captured: Captured) -> frozenset[str]:
    """Names of the nodes that depend on what the network is given."""
    found: set[str] = set()
    for node in captured.graph.nodes:
        is_input = node.op == "placeholder" and node.name not in captured.values
        if is_input or any(each.name in found for each in node.all_input_nodes):
            found.add(node.name)
    return frozenset(found)


def _embedded(node: fx.Node, table: Tensor) -> Carried:
    """The mean absolute row of a table, wherever one is looked up."""
    mean = table.double().abs().mean(dim=0)
    value = mean.expand(node.meta["val"].shape).clone()
    return Carried(value, torch.zeros((), dtype=torch.float64, device=value.device)).normalised()


def _rule(name: str, record: Operator, node: fx.Node) -> Callable[[fx.Node, Any, dict[str, Any]], Any]:
    """How the absolute network computes an operation on activations."""
    if record.recurrent is not None or record.macs is not None:  # weights that are no layer's own
        raise _no_counterpart(node)
    if name in _NORMS:
        return _norm
    if name in _SUMS or record.is_addition:
        return _sum
    if name in _PRODUCTS:
        return _product
    if name in ("div", "true_divide"):
        return _quotient
    if name == "scaled_dot_product_attention":
        return _attention
    if name == "glu":
        return _gated
    if name in _PASSED or ((record.is_pointwise or record.is_channelwise) and _has_same_shape(node)):
        return _passed
    return _moved


def _norm(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Carried:
    name, value = operation_name(node.target), args[0]
    place = _NORMS[name]
    weight = args[place] if len(args) > place else kwargs.get("weight")
    factor = value.mantissa.new_ones(()) if weight is None else weight.double().abs()
    if name == "batch_norm":
        factor = factor * (args[4].double() + args[7]).rsqrt()
    if name in ("batch_norm", "instance_norm", "group_norm") and factor.dim():
        factor = factor.reshape(-1, *[1] * (value.mantissa.dim() - 2))
    return Carried(value.mantissa * factor, value.log).normalised()


def _sum(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Carried:  # noqa: ARG001 - every rule takes them
    """The activations among the operands: what else is added is a bias."""
    mantissas, log = _aligned([value for value in args[:2] if isinstance(value, Carried)])
    total = mantissas[0] if len(mantissas) == 1 else mantissas[0] + mantissas[1]
    return Carried(total.expand(node.meta["val"].shape), log).normalised()


def _product(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Carried:
    left, right = (_carried(value) for value in args[:2])
    result = node.target if operation_name(node.target) != "mul" else torch.mul
    return Carried(result(left.mantissa, right.mantissa, **kwargs), left.log + right.log).normalised()  # type: ignore[operator]


def _quotient(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Carried:  # noqa: ARG001
    """By a number or a stored tensor; a quotient of two activations is a norm, of which the numerator stays."""
    above, below = args[:2]
    if isinstance(below, Carried):
        above = _carried(above)
        return Carried(above.mantissa.expand(node.meta["val"].shape), above.log)
    factor = below.double().abs() if isinstance(below, Tensor) else abs(below)
    return Carried(above.mantissa / factor, above.log).normalised()


def _attention(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Carried:  # noqa: ARG001
    """Products of queries, keys and values."""
    queries, keys, values = (_carried(value) for value in args[:3])
    pairs = queries.mantissa @ keys.mantissa.mT
    return Carried(pairs @ values.mantissa, queries.log + keys.log + values.log).normalised()


def _gated(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Carried:  # noqa: ARG001
    left, right = args[0].mantissa.chunk(2, args[1] if len(args) > 1 else -1)
    return Carried(left * right, 2 * args[0].log).normalised()


def _passed(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
    """An activation acts on each value by itself: it is passed."""
    found = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Carried)]
    if len(found) > 1:
        raise _no_counterpart(node)
    return found[0]


def _moved(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
    """Movement, reductions and pooling: the operation itself, on values of one scale."""
    leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Carried)]
    mantissas, log = _aligned(leaves)
    found = iter(mantissas)

    def plain(value: Any) -> Any:
        if isinstance(value, Carried):
            return next(found)
        return value.double().abs() if isinstance(value, Tensor) and value.is_floating_point() else value

    try:
        result = node.target(*tree_map(plain, args), **tree_map(plain, kwargs))  # type: ignore[operator]
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise _no_counterpart(node) from error
    return tree_map(lambda value: Carried(value, log) if _is_real(value) else value, result)


def _aligned(values: Sequence[Carried]) -> tuple[list[Tensor], Tensor]:
    """Mantissas for one common log, the largest."""
    log = torch.stack([value.log for value in values]).amax()
    return [value.mantissa * (value.log - log).exp() for value in values], log


def _carried(value: Any) -> Carried:
    """An activation as it is; a stored tensor or a number by its absolute value."""
    if isinstance(value, Carried):
        return value
    mantissa = value.double().abs() if isinstance(value, Tensor) else torch.tensor(abs(value), dtype=torch.float64)
    return Carried(mantissa, torch.zeros((), dtype=torch.float64, device=mantissa.device))


def _ones(node: fx.Node, device: torch.device) -> Any:
    """The input of the absolute network: ones for real values, the first of everything else."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return node.meta.get("plain")
    shape = tuple(value.shape)
    if not value.is_floating_point():
        return torch.zeros(shape, dtype=value.dtype, device=device)
    ones = torch.ones(shape, dtype=torch.float64, device=device, requires_grad=True)
    return Carried(ones, torch.zeros((), dtype=torch.float64, device=device))


def _has_same_shape(node: fx.Node) -> bool:
    value = node.meta.get("val")
    shapes = [each.meta["val"].shape for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]
    return isinstance(value, Tensor) and value.shape in shapes and math.prod(value.shape) > 0


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _no_counterpart(node: fx.Node) -> UsageError:
    where = module_path(node) or "forward"
    return UsageError(
        f"{operation_name(node.target)} in {where} has no counterpart in the network of absolute weights. Choose a "
        "selector that does not look at it, such as 'backward' or 'l2'."
    )
