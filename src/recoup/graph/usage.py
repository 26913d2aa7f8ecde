"""What a captured graph does with the model's tensors: which it reads in which role, writes into, leaves alone."""

from __future__ import annotations

from torch import fx, nn

from recoup.graph.capture import Captured
from recoup.graph.memory import memory_of
from recoup.operators.names import writes
from recoup.operators.record import biases_of, operator_of, weights_of


def idle_modules(model: nn.Module, captured: Captured) -> tuple[str, ...]:
    """Names of the outermost modules with parameters that did not run, nor anything in them, and that nobody reads."""
    read = {captured.tensors[n.name] for n in captured.graph.nodes if n.users and n.name in captured.tensors}
    # A tied parameter is read under one of its names.
    used = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in read}
    found: list[str] = []
    for name, module in model.named_modules():
        inside = f"{name}."
        is_used = any(id(parameter) in used for parameter in module.parameters())
        did_run = name in captured.ran or any(other.startswith(inside) for other in captured.ran)
        is_within = any(name.startswith(f"{other}.") for other in found)
        if name and next(module.parameters(), None) is not None and not (is_used or did_run or is_within):
            found.append(name)
    return tuple(found)


def written_tensors(captured: Captured) -> tuple[str, ...]:
    """Names of the parameters and buffers that the graph writes into, through whatever views."""
    writers = (node for node in captured.graph.nodes if node.op == "call_function" and writes(node) and node.args)
    roots = (memory_of(node.args[0]) for node in writers)
    names = (captured.tensors.get(root.name) for root in roots if root is not None)
    return tuple(dict.fromkeys(name for name in names if name is not None and name not in captured.constants))


def weights_of_layers(captured: Captured) -> list[tuple[fx.Node, fx.Node]]:
    """Calls of layers, each with the place of the stored weight that it multiplies by."""
    found = []
    for node in captured.graph.nodes:
        weights = weights_of(node) if node.op == "call_function" else ()
        found += [(node, each) for each in weights if isinstance(each, fx.Node) and each.name in captured.tensors]
    return found


def read_in_other_roles(captured: Captured) -> frozenset[str]:
    """Names of the weights of layers that are read in some other role too: by no layer, or transposed."""
    calls = weights_of_layers(captured)
    roles = {(weight, _is_transposed(node)) for node, weight in calls}
    plain = {weight for weight, transposed in roles if not transposed}
    double = {weight for weight, transposed in roles if transposed and weight in plain}
    for node, weight in calls:
        others = [user for user in weight.users if (user, weight) not in calls]
        if others or [*node.args, *node.kwargs.values()].count(weight) > 1:
            double.add(weight)
    return frozenset(captured.tensors[weight.name] for weight in double)


def _is_transposed(node: fx.Node) -> bool:
    layer = operator_of(node.target).layer
    return layer is not None and layer.transposed


def biases_read_elsewhere(captured: Captured) -> frozenset[str]:
    """Names of the biases of layers that something reads that adds them in no layer."""
    added: dict[fx.Node, set[fx.Node]] = {}
    for node in captured.graph.nodes:
        for bias in biases_of(node) if node.op == "call_function" else ():
            if isinstance(bias, fx.Node) and bias.name in captured.tensors:
                added.setdefault(bias, set()).add(node)
    return frozenset(captured.tensors[bias.name] for bias, layers in added.items() if set(bias.users) - layers)
