import functools

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import recoup
from recoup.operators.names import writes
from recoup.recovery.schedule import drifting, make_schedule
from tests.zoo import ZOO


def conv(inputs, outputs, **options):
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


class Body(nn.Module):
    """A function of three layers, and the input of the head, between a first layer and a last one."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.first, self.a, self.b, self.c = conv(3, 6), conv(6, 6), conv(6, 6), nn.Conv2d(6, 6, 1)
        self.norm, self.scale, self.head = nn.BatchNorm2d(6), nn.Parameter(torch.rand(6, 1, 1)), nn.Linear(6, 4)
        nn.init.uniform_(self.norm.weight, 0.5, 2.0)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x):
        return self.head(self.body(self, torch.tanh(self.first(x))).mean((2, 3)))


def scheduled(model, x):
    traced = recoup.trace(model, x)
    return make_schedule(traced.standalone.host.graph, traced.structure), traced


def through(body):
    model = Body(body).double().eval()
    schedule, _ = scheduled(model, images())
    return model, schedule


def images(samples=4):
    return torch.randn(samples, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()


@functools.cache
def through_zoo(name):
    entry = ZOO[name]
    return scheduled(entry.build(5), entry.batch(4))


def point_of(schedule, layer):
    return next(point for point in schedule.points if point.consumer.name == layer)


def run(schedule, host, inputs):
    """All operations in the order of the schedule; the flat outputs."""
    values, waiting = {}, iter(inputs)
    for node in schedule.nodes:
        if node.op == "placeholder":
            values[node] = next(waiting)
        elif node.op == "get_attr":
            values[node] = functools.reduce(getattr, str(node.target).split("."), host)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg(node.args, values.get), fx.node.map_arg(node.kwargs, values.get)
            values[node] = node.target(*args, **kwargs)
    return fx.node.map_arg(schedule.nodes[-1].args[0], values.get)


@pytest.mark.parametrize("name", ZOO)
def test_the_schedule_in_its_order_is_the_network(name):
    schedule, traced = through_zoo(name)
    batch = ZOO[name].batch(4)
    inputs = batch if isinstance(batch, tuple) else (batch,)
    with torch.no_grad():
        expected = ZOO[name].build(5)(*inputs)
        found = run(schedule, traced.standalone.host, inputs)
    expected = list(expected.values()) if isinstance(expected, dict) else [expected]
    assert schedule.is_pure
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ZOO)
def test_refit_points_are_in_order_and_skips_come_before_them(name):
    schedule, _ = through_zoo(name)
    places = [schedule.place(point.node) for point in schedule.points]
    assert places == sorted(places)
    for point in schedule.points:
        assert point.skip is None or schedule.place(point.skip) < schedule.place(point.node)
    for number, node in enumerate(schedule.nodes):
        assert schedule.place(node.name) == number
        assert all(schedule.place(value.name) < number for value in node.all_input_nodes)


@pytest.mark.parametrize("name", ZOO)
def test_there_is_a_refit_point_for_every_layer_called_once(name):
    schedule, traced = through_zoo(name)
    calls = [product.weight for product in traced.structure.products]
    once = {consumer.name for consumer in traced.structure.consumers if calls.count(consumer.weight) == 1}
    assert {point.consumer.name for point in schedule.points} == once


def test_a_layer_called_twice_is_no_refit_point():
    schedule, _ = through_zoo("shared")
    assert [point.consumer.name for point in schedule.points] == ["head"]


def test_skips_of_residual_blocks_are_found_through_batch_norm():
    schedule, _ = through_zoo("residual")
    skips = {point.consumer.name: point.skip for point in schedule.points}
    assert skips["a.1.0"] == "relu"  # the stream itself
    assert skips["b.1.0"] == "batch_norm_3"  # behind the convolution of the shortcut
    assert [skips[name] for name in ("a.0.0", "b.0.0", "skip.0", "head")] == [None] * 4
    assert [node.target for node in point_of(schedule, "a.1.0").between.nodes] == [torch.ops.aten.batch_norm.default]


def test_of_two_layers_that_are_added_the_one_with_more_inputs_corrects():
    """Whichever of them is written first; the other one comes before it."""
    for body in (lambda m, x: m.a(x) + m.c(x), lambda m, x: m.c(x) + m.a(x)):
        _, schedule = through(body)
        large, small = point_of(schedule, "a"), point_of(schedule, "c")
        assert (large.skip, small.skip) == (small.node, None)
        assert schedule.place(small.node) < schedule.place(large.node)
        assert not small.between.nodes


def test_a_skip_that_is_computed_later_is_moved_before_its_refit_point():
    model, schedule = through(lambda m, x: m.a(m.b(x).relu()) + torch.tanh(m.c(x)))
    point = point_of(schedule, "a")
    assert point.skip == "tanh_1"
    assert schedule.place("tanh_1") < schedule.place(point.node)
    with torch.no_grad():
        host = recoup.trace(model, images()).standalone.host
        torch.testing.assert_close(run(schedule, host, [images()])[0], model(images()), rtol=1e-12, atol=1e-12)


AFFINE = {
    "nothing": (lambda m, y: y, lambda m: torch.ones(6)),
    "batch norm": (lambda m, y: m.norm(y), lambda m: m.norm.weight / (m.norm.running_var + m.norm.eps).sqrt()),
    "stored scale": (lambda m, y: m.scale * y, lambda m: m.scale.flatten()),
    "number": (lambda m, y: y * 3 + 1, lambda m: 3 * torch.ones(6)),
    "division": (lambda m, y: (y - 2) / m.scale, lambda m: 1 / m.scale.flatten()),
    "dropout": (lambda m, y: F.dropout(m.norm(y), training=m.training) * 2, lambda m: 2 * AFFINE["batch norm"][1](m)),
}


@pytest.mark.parametrize("kind", AFFINE)
def test_what_lies_between_a_layer_and_its_addition_is_its_scale(kind):
    between, expected = AFFINE[kind]
    model, schedule = through(lambda m, x: x + between(m, m.a(x)))
    point = point_of(schedule, "a")
    assert point.skip == "tanh"
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    scale = point.scale(tensors, torch.randn(5, 6, 8, 8).double())
    torch.testing.assert_close(scale.detach(), expected(model).double().view(1, 6, 1, 1), rtol=1e-9, atol=1e-9)


def test_the_scale_of_a_linear_layer_lies_along_its_last_dim():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.scale = nn.Linear(5, 6), nn.Linear(6, 6), nn.Parameter(torch.rand(6))
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            x = torch.tanh(self.a(x))
            return self.head(torch.tanh(x + self.scale * self.b(x)))

    model = Tokens().double().eval()
    schedule, _ = scheduled(model, torch.randn(2, 7, 5).double())
    scale = point_of(schedule, "b").scale(dict(model.named_parameters()), torch.randn(2, 7, 6).double())
    torch.testing.assert_close(scale.detach(), model.scale.detach().view(1, 1, 6), rtol=1e-12, atol=1e-12)


def test_a_scale_that_differs_from_place_to_place_is_none():
    model = Body(lambda m, x: x + m.a(x) * m.map).double()
    model.register_buffer("map", torch.rand(8, 8).double())
    schedule, _ = scheduled(model.eval(), images())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert point_of(schedule, "a").scale(tensors, torch.randn(5, 6, 8, 8).double()) is None


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: x + m.a(x).relu(),
        lambda m, x: x - m.a(x),
        lambda m, x: torch.add(x, m.a(x), alpha=2),
        lambda m, x: x * m.a(x),
        lambda m, x: x + 1 / (m.a(x) + 9),
        lambda m, x: x + x * m.a(x),
        lambda m, x: x.mean((2, 3), keepdim=True) + m.a(x),
        lambda m, x: m.a(x) + m.scale,
        lambda m, x: (y := m.a(x)) + x + y.relu(),
    ],
    ids=["activation", "subtraction", "alpha", "product", "divisor", "gate", "broadcast", "stored", "read twice"],
)
def test_what_cannot_make_up_for_the_rest_has_no_skip(body):
    _, schedule = through(body)
    assert point_of(schedule, "a").skip is None


def test_in_place_operations_are_made_plain():
    def body(m, x):
        y = m.norm(m.a(x))
        y += x
        return F.relu_(y)

    model, schedule = through(body)
    traced = recoup.trace(model, images())
    assert schedule.is_pure
    assert not any(writes(node) for node in schedule.nodes if node.op == "call_function")
    assert point_of(schedule, "a").skip == "tanh"
    with torch.no_grad():
        torch.testing.assert_close(
            run(schedule, traced.standalone.host, [images()])[0], model(images()), rtol=1e-12, atol=1e-12
        )


def test_the_graph_that_was_given_stays_as_it_is():
    model = Body(lambda m, x: F.relu_(m.a(x))).double().eval()
    traced = recoup.trace(model, images())
    before = str(traced.standalone.host.graph)
    make_schedule(traced.standalone.host.graph, traced.structure)
    assert str(traced.standalone.host.graph) == before


def written_where_others_read(m, x):
    y = m.a(x)
    twice = 2 * y
    y.diagonal(dim1=2, dim2=3).relu_()
    return twice + y


def written_through_a_view(m, x):
    y = m.a(x)
    y.transpose(2, 3).diagonal(dim1=2, dim2=3).relu_()
    return y + x


def written_in_part(m, x):
    y = m.a(x)
    y.diagonal(dim1=2, dim2=3)[..., 0] = 0.0
    return y + x


@pytest.mark.parametrize("body", [written_where_others_read, written_through_a_view, written_in_part])
def test_a_graph_that_writes_into_what_others_read_is_not_pure(body):
    model, schedule = through(body)
    assert not schedule.is_pure
    host = recoup.trace(model, images()).standalone.host
    assert [node.name for node in schedule.nodes] == [node.name for node in host.graph.nodes]  # nothing moves
    with torch.no_grad():
        torch.testing.assert_close(run(schedule, host, [images()])[0], model(images()), rtol=1e-12, atol=1e-12)


def test_where_nothing_moves_a_skip_that_comes_too_late_is_none():
    def body(m, x):
        y = m.a(x) + torch.tanh(m.c(x))
        z = y.clone()
        z.diagonal(dim1=2, dim2=3).zero_()
        return z + m.b(z)

    _, schedule = through(body)
    assert not schedule.is_pure
    assert point_of(schedule, "a").skip is None
    assert all(
        point.skip is None or schedule.place(point.skip) < schedule.place(point.node) for point in schedule.points
    )


def test_all_that_comes_after_a_written_tensor_drifts():
    schedule, _ = through_zoo("residual")
    found = drifting(schedule, ["a.1.0.weight"])
    by_name = {node.name: node for node in schedule.nodes}
    assert {"conv2d_2", "batch_norm_2", "add", "relu_2", "conv2d_3", "conv2d_4", "linear", "output"} <= found
    assert not {"x", "conv2d", "relu", "conv2d_1", "relu_1"} & found
    assert [by_name[name].target for name in found if by_name[name].op == "get_attr"] == ["a.1.0.weight"]
    assert drifting(schedule, []) == frozenset()
