"""Train mode for models of any form, standalone graphs included.

A graph was captured in eval mode: its batch norms use their statistics, its dropout is off. To learn, it runs a twin in
which batch norms use those of the batch and update their own, and dropout drops, as in the model it was captured from.
What a capture leaves no trace of, such as dropout within attention or whole branches that are dropped, stays off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx, nn

from recoup.graph.copies import copied
from recoup.graph.standalone import Standalone
from recoup.operators.names import operation_name

# Where the flag for training stands among the arguments.
_DROPOUTS = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"})
_DROPS_AT, _NORM_TRAINS_AT, _MOMENTUM_AT = 2, 5, 6
# Torch's own, for a batch norm with a cumulative average. A capture writes 0.0 for it, as for a momentum of 0.0, and
# the two cannot be told apart; the first is the commoner, and without it statistics would never follow the weights.
USUAL_MOMENTUM = 0.1


@contextmanager
def learning(model: nn.Module) -> Iterator[None]:
    """Train mode for a model of ours, eval mode afterwards; what is standalone in it trains like its original."""
    hosts = [module for module in model.modules() if isinstance(module, Standalone)]
    model.train()
    for host in hosts:
        host.follow(training_graph(host))
    try:
        yield
    finally:
        model.eval()
        for host in hosts:
            host.follow(host.graph)


def training_graph(host: Standalone) -> fx.Graph:
    """The graph of a standalone module with batch norms and dropout in training."""
    graph, _ = copied(host.graph)
    trained = {name for name, _ in host.named_parameters(remove_duplicate=False)}
    for node in graph.nodes:
        name = operation_name(node.target) if node.op == "call_function" else ""
        if name == "batch_norm" and _has_statistics(node, trained):
            momentum = node.args[_MOMENTUM_AT] or USUAL_MOMENTUM
            node.args = (*node.args[:_NORM_TRAINS_AT], True, momentum, *node.args[_MOMENTUM_AT + 1 :])
        elif name in _DROPOUTS and len(node.args) > _DROPS_AT:
            node.args = (*node.args[:_DROPS_AT], True, *node.args[_DROPS_AT + 1 :])
    return graph


def _has_statistics(node: fx.Node, trained: set[str]) -> bool:
    """Whether a batch norm has buffers that it can update; statistics that are parameters are learnt by gradients."""
    held = node.args[3:5]
    return all(isinstance(v, fx.Node) and v.op == "get_attr" and str(v.target) not in trained for v in held)
