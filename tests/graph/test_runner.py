import gc
import weakref
from operator import attrgetter

import pytest
import torch
from torch import fx, nn

import recoup
from recoup.graph.runner import arguments, grouped, last_uses, lookup, run
from recoup.graph.standalone import entering
from tests.zoo import ZOO, seeded

aten = torch.ops.aten


def of_zoo(name):
    """The model, its standalone form and its inputs."""
    model, batch = ZOO[name].build(5), ZOO[name].batch(4)
    inputs = batch if isinstance(batch, tuple) else (batch,)
    return model, recoup.trace(model, batch).standalone.host, inputs


def chain():
    with seeded(0):
        model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
        inputs = (torch.randn(4, 5).double(),)
    return model, recoup.trace(model, inputs[0]).standalone.host, inputs


def run_all(host, inputs, watch=None, **options):
    with torch.no_grad():
        return run(host.graph.nodes, entering(host, inputs, {}), stored_in(host), watch, **options)


def stored_in(host):
    return lambda name: attrgetter(name)(host)


def calls(graph):
    return [node.name for node in graph.nodes if node.op == "call_function"]


def returned(host, values):
    *_, output = host.graph.nodes
    return fx.node.map_arg(output.args[0], lookup(values, stored_in(host)))


@pytest.mark.parametrize("name", ZOO)
def test_a_run_gives_what_the_module_gives(name):
    model, host, inputs = of_zoo(name)
    with torch.no_grad():
        expected = model(*inputs)
    expected = list(expected.values()) if isinstance(expected, dict) else [expected]
    found = returned(host, run_all(host, inputs))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ZOO)
def test_a_run_that_releases_what_is_not_needed_gives_the_same(name):
    _, host, inputs = of_zoo(name)
    *_, output = host.graph.nodes
    inner = {value: reader for value, reader in last_uses(host.graph.nodes).items() if reader != output.name}
    whole, lean = run_all(host, inputs), run_all(host, inputs, release=grouped(inner))
    assert set(lean) < set(whole)
    pairs = zip(returned(host, lean), returned(host, whole), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_every_value_is_there_after_a_run_and_what_was_given_stays_as_it_is():
    _, host, inputs = chain()
    given = entering(host, inputs, {})
    before = dict(given)
    values = run(host.graph.nodes, given, stored_in(host))
    assert list(values) == [*before, *calls(host.graph)]
    assert given == before


@pytest.mark.parametrize("name", ZOO)
def test_the_watcher_sees_every_call_in_order(name):
    _, host, inputs = of_zoo(name)
    seen = []
    values = run_all(host, inputs, lambda *call: seen.append(call))
    assert [node.name for node, *_ in seen] == calls(host.graph)
    look = lookup(values, stored_in(host))
    for node, args, kwargs, result in seen:
        assert result is values[node.name]
        expected = arguments(node, look)
        assert len(args) == len(expected[0]) and kwargs.keys() == expected[1].keys()
        assert all(a is b for a, b in zip(args, expected[0], strict=True) if isinstance(a, torch.Tensor))


def test_a_value_is_gone_once_nobody_needs_it():
    _, host, inputs = chain()
    places = {name: number for number, name in enumerate(node.name for node in host.graph.nodes)}
    last, alive, most = last_uses(host.graph.nodes), {}, []

    def watch(node, args, kwargs, result):
        del args, kwargs
        gc.collect()
        held = {name for name, value in alive.items() if value() is not None}
        assert held == {name for name in alive if places[last[name]] >= places[node.name]}
        most.append(len(held))
        alive[node.name] = weakref.ref(result)

    values = run_all(host, inputs, watch, release=grouped(last))
    assert max(most) == 1
    assert not values


def test_without_a_release_nothing_goes():
    _, host, inputs = chain()
    alive = {}
    values = run_all(host, inputs, lambda node, args, kwargs, result: alive.update({node.name: weakref.ref(result)}))
    gc.collect()
    assert all(value() is values[name] for name, value in alive.items())


def test_releasing_what_is_not_there_is_no_error():
    _, host, inputs = chain()
    first = calls(host.graph)[0]
    values = run_all(host, inputs, release={first: ["nobody"]})
    assert calls(host.graph) == [name for name in values if name in calls(host.graph)]


def test_only_operations_are_run_and_others_may_be_among_the_nodes():
    _, host, inputs = chain()
    operations = [node for node in host.graph.nodes if node.op == "call_function"]
    given = entering(host, inputs, {})
    some, every = (run(nodes, given, stored_in(host)) for nodes in (operations, host.graph.nodes))
    assert some.keys() == every.keys()
    assert all(torch.equal(some[name], every[name]) for name in some)


def test_a_part_of_a_graph_runs_on_what_enters_it():
    _, host, inputs = chain()
    values = run_all(host, inputs)
    operations = [node for node in host.graph.nodes if node.op == "call_function"]
    found = run(operations[2:], {operations[1].name: values[operations[1].name]}, stored_in(host))
    assert torch.equal(found[operations[-1].name], values[operations[-1].name])


def test_a_tensor_that_is_not_stored_is_missed_by_name():
    _, host, inputs = chain()
    tensors = dict(host.named_parameters())
    del tensors["2.weight"]
    with pytest.raises(KeyError, match=r"2\.weight"):
        run(host.graph.nodes, entering(host, inputs, {}), tensors.__getitem__)


def test_a_value_that_nobody_has_given_is_missed_by_name():
    _, host, _ = chain()
    with pytest.raises(KeyError, match="input"):
        run(host.graph.nodes, {}, stored_in(host))


def built():
    """A graph of operations with lists, names and stored tensors among their arguments."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("some.weight")
    both = graph.call_function(aten.cat.default, ([x, weight, x], 1))
    total = graph.call_function(aten.add.Tensor, (both, 1.0), {"alpha": 3})
    graph.output((total, both))
    return graph


def test_values_are_put_into_lists_and_named_arguments():
    graph = built()
    x, weight = torch.ones(2, 1), torch.zeros(2, 2)
    seen = []
    values = run(graph.nodes, {"x": x}, {"some.weight": weight}.__getitem__, lambda *call: seen.append(call[1:3]))
    (parts, dim), kwargs = seen[0]
    assert [part is value for part, value in zip(parts, (x, weight, x), strict=True)] == [True] * 3
    assert (dim, kwargs, seen[1][1]) == (1, {}, {"alpha": 3})
    assert values["add_tensor"].tolist() == [[4.0, 3.0, 3.0, 4.0]] * 2


def test_the_last_use_of_a_value_is_its_last_reader():
    graph = built()
    assert last_uses(graph.nodes) == {
        "x": "cat_default",
        "some_weight": "cat_default",
        "cat_default": "output",
        "add_tensor": "output",
    }


def test_values_are_grouped_by_who_uses_them_last():
    assert grouped({"a": "x", "b": "y", "c": "x"}) == {"x": ["a", "c"], "y": ["b"]}
    assert grouped({}) == {}
