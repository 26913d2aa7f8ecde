import functools

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import recoup
from recoup.structure.operations import writes
from recoup.structure.route import drifting, route, stretch_before, whole_stretch
from tests.zoo import ZOO, conv_bn


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


def routed(model, x):
    traced = recoup.trace(model, x)
    return route(traced.standalone.host.graph, traced.structure), traced


def through(body):
    model = Body(body).double().eval()
    path, _ = routed(model, images())
    return model, path


def images(samples=4):
    return torch.randn(samples, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()


@functools.cache
def through_zoo(name):
    entry = ZOO[name]
    return routed(entry.build(5), entry.batch(4))


def stop_of(path, layer):
    return next(stop for stop in path.stops if stop.consumer.name == layer)


def run(path, host, inputs):
    """All operations in the order of the route; the flat outputs."""
    values, waiting = {}, iter(inputs)
    for node in path.nodes:
        if node.op == "placeholder":
            values[node] = next(waiting)
        elif node.op == "get_attr":
            values[node] = functools.reduce(getattr, str(node.target).split("."), host)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg(node.args, values.get), fx.node.map_arg(node.kwargs, values.get)
            values[node] = node.target(*args, **kwargs)
    return fx.node.map_arg(path.nodes[-1].args[0], values.get)


@pytest.mark.parametrize("name", ZOO)
def test_the_route_in_its_order_is_the_network(name):
    path, traced = through_zoo(name)
    batch = ZOO[name].batch(4)
    inputs = batch if isinstance(batch, tuple) else (batch,)
    with torch.no_grad():
        expected = ZOO[name].build(5)(*inputs)
        found = run(path, traced.standalone.host, inputs)
    expected = list(expected.values()) if isinstance(expected, dict) else [expected]
    assert path.is_pure
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ZOO)
def test_stops_are_in_order_and_skips_come_before_them(name):
    path, _ = through_zoo(name)
    places = [path.place(stop.node) for stop in path.stops]
    assert places == sorted(places)
    for stop in path.stops:
        assert stop.skip is None or path.place(stop.skip) < path.place(stop.node)
    for number, node in enumerate(path.nodes):
        assert path.place(node.name) == number
        assert all(path.place(value.name) < number for value in node.all_input_nodes)


@pytest.mark.parametrize("name", ZOO)
def test_there_is_a_stop_for_every_layer_called_once(name):
    path, traced = through_zoo(name)
    calls = [product.weight for product in traced.structure.products]
    once = {consumer.name for consumer in traced.structure.consumers if calls.count(consumer.weight) == 1}
    assert {stop.consumer.name for stop in path.stops} == once


def test_a_layer_called_twice_is_no_stop():
    path, _ = through_zoo("shared")
    assert [stop.consumer.name for stop in path.stops] == ["head"]


def test_the_last_use_of_a_value_is_the_last_reader():
    path, _ = through_zoo("residual")
    last = path.last_uses()
    for node in path.nodes:
        readers = [user.name for user in path.nodes if node in user.all_input_nodes]
        readers += [stop.node for stop in path.stops if stop.skip == node.name]
        assert last.get(node.name) == (max(readers, key=path.place) if readers else None)


def test_what_enters_a_stretch_is_needed_until_its_end():
    path, traced = through_zoo("residual")
    stretch = stretch_before(path, traced.structure, stop_of(path, "a.1.0"))
    end = path.nodes[stretch.end].name
    assert stretch.entries == ("relu",)
    assert path.last_uses()["relu"] == "add"
    assert path.last_uses([stretch])["relu"] == end
    assert path.place("add") < stretch.end


def test_skips_of_residual_blocks_are_found_through_batch_norm():
    path, _ = through_zoo("residual")
    skips = {stop.consumer.name: stop.skip for stop in path.stops}
    assert skips["a.1.0"] == "relu"  # the stream itself
    assert skips["b.1.0"] == "batch_norm_3"  # behind the convolution of the shortcut
    assert [skips[name] for name in ("a.0.0", "b.0.0", "skip.0", "head")] == [None] * 4
    assert [step[0] for step in stop_of(path, "a.1.0").between.steps] == [torch.ops.aten.batch_norm.default]


def test_of_two_layers_that_are_added_the_one_with_more_inputs_corrects():
    """Whichever of them is written first; the other one comes before it."""
    for body in (lambda m, x: m.a(x) + m.c(x), lambda m, x: m.c(x) + m.a(x)):
        _, path = through(body)
        large, small = stop_of(path, "a"), stop_of(path, "c")
        assert (large.skip, small.skip) == (small.node, None)
        assert path.place(small.node) < path.place(large.node)
        assert not small.between.steps


def test_a_skip_that_is_computed_later_is_moved_before_its_stop():
    model, path = through(lambda m, x: m.a(m.b(x).relu()) + torch.tanh(m.c(x)))
    stop = stop_of(path, "a")
    assert stop.skip == "tanh_1"
    assert path.place("tanh_1") < path.place(stop.node)
    with torch.no_grad():
        host = recoup.trace(model, images()).standalone.host
        torch.testing.assert_close(run(path, host, [images()])[0], model(images()), rtol=1e-12, atol=1e-12)


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
    model, path = through(lambda m, x: x + between(m, m.a(x)))
    stop = stop_of(path, "a")
    assert stop.skip == "tanh"
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    scale = stop.scale(tensors, torch.randn(5, 6, 8, 8).double())
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
    path, _ = routed(model, torch.randn(2, 7, 5).double())
    scale = stop_of(path, "b").scale(dict(model.named_parameters()), torch.randn(2, 7, 6).double())
    torch.testing.assert_close(scale.detach(), model.scale.detach().view(1, 1, 6), rtol=1e-12, atol=1e-12)


def test_a_scale_that_differs_from_place_to_place_is_none():
    model = Body(lambda m, x: x + m.a(x) * m.map).double()
    model.register_buffer("map", torch.rand(8, 8).double())
    path, _ = routed(model.eval(), images())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert stop_of(path, "a").scale(tensors, torch.randn(5, 6, 8, 8).double()) is None


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
    _, path = through(body)
    assert stop_of(path, "a").skip is None


def test_in_place_operations_are_made_plain():
    def body(m, x):
        y = m.norm(m.a(x))
        y += x
        return F.relu_(y)

    model, path = through(body)
    traced = recoup.trace(model, images())
    assert any(writes(node) for node in traced.standalone.host.graph.nodes if node.op == "call_function")
    assert path.is_pure
    assert not any(writes(node) for node in path.nodes if node.op == "call_function")
    assert stop_of(path, "a").skip == "tanh"
    with torch.no_grad():
        torch.testing.assert_close(
            run(path, traced.standalone.host, [images()])[0], model(images()), rtol=1e-12, atol=1e-12
        )


def test_the_graph_that_was_given_stays_as_it_is():
    model = Body(lambda m, x: F.relu_(m.a(x))).double().eval()
    traced = recoup.trace(model, images())
    before = str(traced.standalone.host.graph)
    route(traced.standalone.host.graph, traced.structure)
    assert str(traced.standalone.host.graph) == before


def written_where_others_read(m, x):
    y = m.a(x)
    twice = 2 * y
    y.relu_()
    return twice + y


def written_through_a_view(m, x):
    y = m.a(x)
    y.view(len(y), -1).relu_()
    return y + x


def written_in_part(m, x):
    y = m.a(x)
    y[:, :, 0] = 0.0
    return y + x


@pytest.mark.parametrize("body", [written_where_others_read, written_through_a_view, written_in_part])
def test_a_graph_that_writes_into_what_others_read_is_not_pure(body):
    model, path = through(body)
    assert not path.is_pure
    host = recoup.trace(model, images()).standalone.host
    assert [node.name for node in path.nodes] == [node.name for node in host.graph.nodes]  # nothing moves
    with torch.no_grad():
        torch.testing.assert_close(run(path, host, [images()])[0], model(images()), rtol=1e-12, atol=1e-12)


def test_where_nothing_moves_a_skip_that_comes_too_late_is_none():
    def body(m, x):
        y = m.a(x) + torch.tanh(m.c(x))
        z = y.clone()
        z[:, :, 0] = 0.0
        return z + m.b(z)

    _, path = through(body)
    assert not path.is_pure
    assert stop_of(path, "a").skip is None
    assert all(stop.skip is None or path.place(stop.skip) < path.place(stop.node) for stop in path.stops)


def test_all_that_comes_after_a_written_tensor_drifts():
    path, _ = through_zoo("residual")
    found = drifting(path, ["a.1.0.weight"])
    by_name = {node.name: node for node in path.nodes}
    assert {"conv2d_2", "batch_norm_2", "add", "relu_2", "conv2d_3", "conv2d_4", "linear", "output"} <= found
    assert not {"x", "conv2d", "relu", "conv2d_1", "relu_1"} & found
    assert [by_name[name].target for name in found if by_name[name].op == "get_attr"] == ["a.1.0.weight"]
    assert drifting(path, []) == frozenset()


class Block(nn.Module):
    """conv - bn - relu - conv - add, as in a residual network."""

    def __init__(self):
        super().__init__()
        self.stem, self.one, self.two = conv_bn(3, 6), conv_bn(6, 5), conv_bn(5, 6, act=False)
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(x + self.two(self.one(x))))


def test_the_stretch_of_a_block_goes_from_its_first_layer_to_the_next_one_behind_it():
    path, traced = routed(Block().eval(), torch.randn(2, 3, 8, 8))
    stretch = stretch_before(path, traced.structure, stop_of(path, "two.0"))
    inside = [node.name for node in path.nodes[stretch.start : stretch.end] if node.op == "call_function"]
    assert inside == ["conv2d_1", "batch_norm_1", "relu_1", "conv2d_2", "batch_norm_2", "add", "relu_2"]
    assert path.nodes[stretch.end].name == "conv2d_3"
    assert stretch.entries == ("relu",)
    assert stretch.exits == ("relu_2",)
    assert stretch.tensors == ("one.0.weight", "one.0.bias", "two.0.weight", "two.0.bias")


def test_a_stretch_may_start_earlier():
    path, traced = routed(Block().eval(), torch.randn(2, 3, 8, 8))
    stretch = stretch_before(path, traced.structure, stop_of(path, "two.0"), path.place("conv2d"))
    assert stretch.entries == ("x",)
    assert stretch.exits == ("relu_2",)
    assert stretch.tensors[0] == "stem.0.weight"


def test_the_last_stretch_ends_at_the_output():
    path, traced = routed(Block().eval(), torch.randn(2, 3, 8, 8))
    stretch = stretch_before(path, traced.structure, stop_of(path, "head"))
    assert path.nodes[stretch.end].op == "output"
    assert stretch.exits == ("conv2d_3",)
    assert stretch.entries == ("relu", "relu_1")  # the stream, and what the last maker reads
    assert stretch.tensors == ("two.0.weight", "two.0.bias", "head.weight", "head.bias")


def test_values_that_leave_a_stretch_twice_are_exits_once():
    path, traced = through_zoo("residual")
    stretch = stretch_before(path, traced.structure, stop_of(path, "a.0.0"))
    assert stretch.exits == ("relu", "relu_1")


def test_what_leaves_the_whole_network_is_in_the_order_it_is_returned_in():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 4)

        def forward(self, x):
            features = F.relu(self.a(x))
            return self.b(features), features

    traced = recoup.trace(Two(), torch.randn(3, 5))
    stretch = whole_stretch(route(traced.standalone.host.graph, traced.structure), traced.structure)
    by_name = {node.name: node for node in stretch.nodes}
    assert [tuple(by_name[name].meta["val"].shape)[1] for name in stretch.exits] == [4, 8]
