import pytest
import torch
from torch import fx

from recoup.graph.purity import make_pure
from recoup.graph.runner import run
from recoup.operators.names import writes

aten = torch.ops.aten


def made(body):
    """A graph that `body` fills, given the graph and its input, and returns the value of."""
    graph = fx.Graph()
    graph.output(body(graph.call_function, graph.placeholder("x")))
    return graph


def result(graph, x):
    *_, output = graph.nodes
    return run(graph.nodes, {"x": x.clone()}, {}.__getitem__)[output.args[0].name]


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


PLAIN = {
    "relu": (lambda op, x: op(aten.relu_.default, (op(aten.neg.default, (x,)),)), aten.relu.default),
    "addition": (lambda op, x: op(aten.add_.Tensor, (op(aten.neg.default, (x,)), x)), aten.add.Tensor),
    "number": (lambda op, x: op(aten.mul_.Scalar, (op(aten.neg.default, (x,)), 3.0)), aten.mul.Scalar),
    "keyword": (
        lambda op, x: op(aten.add_.Tensor, (op(aten.neg.default, (x,)), x), {"alpha": 2}),
        aten.add.Tensor,
    ),
    "filled": (lambda op, x: op(aten.fill_.Scalar, (op(aten.neg.default, (x,)), 2.0)), aten.fill.Scalar),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_an_operation_that_writes_into_a_value_of_its_own_is_made_plain(kind):
    body, expected = PLAIN[kind]
    graph, x = made(body), torch.randn(3, 4)
    before = result(graph, x)
    assert make_pure(graph)
    assert targets(graph) == [aten.neg.default, expected]
    assert not any(writes(node) for node in graph.nodes if node.op == "call_function")
    assert torch.equal(result(graph, x), before)


def test_a_chain_of_them_is_made_plain_one_by_one():
    graph = made(lambda op, x: op(aten.tanh_.default, (op(aten.relu_.default, (op(aten.neg.default, (x,)),)),)))
    x = torch.randn(3, 4)
    before = result(graph, x)
    assert make_pure(graph)
    assert targets(graph) == [aten.neg.default, aten.relu.default, aten.tanh.default]
    assert torch.equal(result(graph, x), before)


def test_a_graph_without_any_is_left_as_it_is():
    graph = made(lambda op, x: op(aten.relu.default, (x,)))
    before = str(graph)
    assert make_pure(graph)
    assert str(graph) == before


def read_twice(op, x):
    y = op(aten.neg.default, (x,))
    return op(aten.add.Tensor, (op(aten.exp.default, (y,)), op(aten.relu_.default, (y,))))


IMPURE = {
    "an input": lambda op, x: op(aten.relu_.default, (x,)),
    "read twice": read_twice,
    "through a view": lambda op, x: op(
        aten.relu_.default, (op(aten.view.default, (op(aten.neg.default, (x,)), [-1])),)
    ),
    "what returns its input": lambda op, x: op(
        aten.relu_.default, (op(aten.dropout.default, (op(aten.neg.default, (x,)), 0.5, False)),)
    ),
}


@pytest.mark.parametrize("kind", IMPURE)
def test_what_writes_into_a_value_that_others_may_see_stays(kind):
    graph = made(IMPURE[kind])
    assert not make_pure(graph)
    assert aten.relu_.default in targets(graph)


@torch.library.custom_op("recoup_purity::spin_", mutates_args={"x"})
def spin_(x: torch.Tensor) -> None:
    x.copy_(x.flip(0))


def test_an_operation_without_a_plain_twin_stays():
    graph = made(lambda op, x: op(torch.ops.recoup_purity.spin_.default, (op(aten.neg.default, (x,)),)))
    assert not make_pure(graph)
    assert targets(graph) == [aten.neg.default, torch.ops.recoup_purity.spin_.default]


LIBRARY = torch.library.Library("recoup_purity", "FRAGMENT")
LIBRARY.define("relu_(Tensor(a!) x) -> Tensor(a!)")
LIBRARY.impl("relu_", lambda x: x.copy_(x.flip(0)), "CompositeExplicitAutograd")


def test_an_operation_of_another_library_is_no_twin_of_torchs():
    """It has the name of one of torch's, but flips what it is given."""
    graph = made(lambda op, x: op(torch.ops.recoup_purity.relu_.default, (op(aten.neg.default, (x,)),)))
    x = torch.randn(3, 4)
    before = result(graph, x)
    make_pure(graph)
    assert torch.equal(result(graph, x), before)
