import itertools
import operator

import pytest
import torch
from torch import fx, nn
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from recoup.recovery import tape as taping
from recoup.recovery.joint import JointRefits, segment_batches
from recoup.recovery.tape import Tape
from tests.recovery.bench import bench, zoo_bench
from tests.zoo import ZOO, seeded

aten = torch.ops.aten


def values(*sizes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def norm(*sizes):
    x, weight, bias, mean, variance = values((3, 4, *sizes), (4,), (4,), (4,), (4,))
    return [x, weight, bias, mean, variance.abs() + 0.1, False, 0.1, 1e-5, False]


# Operations with operands, keyword arguments, and which of the operands can move.
KNOWN = {
    "conv1d": (aten.conv1d.default, [*values((2, 3, 7), (4, 3, 3), (4,)), [2], [1]], {}, (0, 1, 2)),
    "conv2d": (aten.conv2d.default, [*values((2, 3, 5, 5), (4, 3, 3, 3), (4,)), [1, 1], [1, 1]], {}, (0, 1, 2)),
    "grouped": (aten.conv2d.default, [*values((2, 4, 5, 5), (4, 2, 3, 3), (4,)), [1], [0], [1], 2], {}, (0, 1, 2)),
    "conv2d, no bias": (aten.conv2d.default, values((2, 3, 5, 5), (4, 3, 3, 3)), {}, (0, 1)),
    "conv2d, same": (aten.conv2d.padding, [*values((2, 3, 5, 5), (4, 3, 3, 3), (4,)), [1, 1], "same"], {}, (0, 1, 2)),
    "conv3d": (aten.conv3d.default, values((2, 2, 4, 4, 4), (3, 2, 3, 3, 3), (3,)), {}, (0, 1, 2)),
    "transposed": (aten.conv_transpose2d.input, [*values((2, 3, 5, 5), (3, 4, 3, 3), (4,)), [2, 2]], {}, (0, 1, 2)),
    "linear": (aten.linear.default, values((2, 5, 3), (4, 3), (4,)), {}, (0, 1, 2)),
    "linear, no bias": (aten.linear.default, values((5, 3), (4, 3)), {}, (0, 1)),
    "matmul": (aten.matmul.default, values((2, 5, 3), (3, 4)), {}, (0, 1)),
    "mul": (aten.mul.Tensor, values((2, 5, 3), (5, 1)), {}, (0, 1)),
    "mul by a number": (aten.mul.Tensor, [*values((2, 5, 3)), 0.3], {}, (0,)),
    "mul, widened": (aten.mul.Tensor, [values((2, 3), dtype=torch.float32)[0], *values((2, 3))], {}, (0, 1)),
    "add": (aten.add.Tensor, values((2, 5, 3), (5, 1)), {}, (0, 1)),
    "add, scaled": (aten.add.Tensor, values((5, 1), (2, 5, 3)), {"alpha": 3}, (0, 1)),
    "add, widened": (aten.add.Tensor, [values((2, 3), dtype=torch.float32)[0], *values((2, 3))], {}, (0, 1)),
    "add, in few bits": (aten.add.Tensor, [values((2, 3), dtype=torch.bfloat16)[0], 0.3], {}, (0,)),
    "add to complex": (aten.add.Tensor, [*values((2, 3)), values((2, 3))[0] * 1j], {}, (0, 1)),
    "div, widened": (aten.div.Tensor, [values((2, 3), dtype=torch.float32)[0], *values((2, 3))], {}, (0,)),
    "add a number": (aten.add.Tensor, [*values((2, 5, 3)), 0.3], {}, (0,)),
    "batch norm": (aten.batch_norm.default, norm(5, 5), {}, (0,)),
    "batch norm of rows": (aten.batch_norm.default, norm(), {}, (0,)),
    "batch norm, plain": (aten.batch_norm.default, [*norm(3)[:1], None, None, *norm(3)[3:]], {}, (0,)),
    "relu": (aten.relu.default, values((2, 3, 4)), {}, (0,)),
    "relu6": (aten.hardtanh.default, [3 * values((2, 3, 4))[0], 0.0, 6.0], {}, (0,)),
    "gelu": (aten.gelu.default, values((2, 3, 4)), {}, (0,)),
    "gelu, by tanh": (aten.gelu.default, values((2, 3, 4)), {"approximate": "tanh"}, (0,)),
    "silu": (aten.silu.default, values((2, 3, 4)), {}, (0,)),
    "where": (aten.where.self, [values((2, 3))[0] > 0, *values((2, 3), (2, 3))], {}, (1,)),
    "flatten": (aten.flatten.using_ints, [*values((2, 3, 4)), 1], {}, (0,)),
    "permute": (aten.permute.default, [*values((2, 3, 4)), [2, 0, 1]], {}, (0,)),
    "mean": (aten.mean.dim, [*values((2, 3, 4)), [2], True], {}, (0,)),
    "sum": (aten.sum.dim_IntList, [*values((2, 3, 4)), [0, 2]], {"dtype": torch.float64}, (0,)),
    "average": (aten.avg_pool2d.default, [*values((2, 3, 4, 4)), [2, 2]], {}, (0,)),
    "adaptive": (aten.adaptive_avg_pool2d.default, [*values((2, 3, 4, 4)), [1, 1]], {}, (0,)),
    "slice": (aten.slice.Tensor, [*values((2, 6, 4)), 1, 2, 5], {}, (0,)),
    "pad": (aten.pad.default, [*values((2, 3, 4)), [1, 2], "constant", 7.0], {}, (0,)),
    "dropout": (aten.dropout.default, [*values((2, 3, 4)), 0.5, False], {}, (0,)),
    "cat": (aten.cat.default, [values((2, 3), (2, 5), (2, 1)), 1], {}, (0,)),
}  # fmt: skip
OTHERS = {
    "batch norm whose weight moves": (aten.batch_norm.default, norm(5), {}, (0, 1, 2)),
    "batch norm by the batch": (aten.batch_norm.default, [*norm(5)[:3], None, None, True, *norm(5)[6:]], {}, (0,)),
    "conv2d, bias alone": (aten.conv2d.default, values((2, 3, 5, 5), (4, 3, 3, 3), (4,)), {}, (2,)),
    "pad, circular": (aten.pad.default, [*values((2, 3, 4)), [1, 2], "circular"], {}, (0,)),
    "prelu": (aten.prelu.default, values((2, 3, 4), (3,)), {}, (0, 1)),
    "div": (aten.div.Tensor, values((2, 3), (2, 3)), {}, (0, 1)),
    "where, both": (aten.where.self, [values((2, 3))[0] > 0, *values((2, 3), (2, 3))], {}, (1, 2)),
    "addmm": (aten.addmm.default, values((4,), (2, 3), (3, 4)), {}, (0, 1, 2)),
    "softmax": (aten.softmax.int, [*values((2, 3, 4)), -1], {}, (0,)),
    "layer norm": (aten.layer_norm.default, [*values((2, 3, 4)), [4], *values((4,), (4,))], {}, (0, 2, 3)),
    "attention": (aten.scaled_dot_product_attention.default, values(*[(2, 3, 5, 4)] * 3), {}, (0, 1, 2)),
    "by name": (aten.linear.default, values((5, 3)), {"weight": values((4, 3))[0]}, (0, 1)),
}


def recorded(target, operands, kwargs, moving):
    """A graph with one operation, its operands stored tensors, run and recorded; and the names of those that move."""
    graph, stored = fx.Graph(), {}

    def node(value, place):
        if isinstance(value, list) and all(isinstance(part, torch.Tensor) for part in value):
            return [node(part, f"{place}_{number}") for number, part in enumerate(value)]
        if not isinstance(value, torch.Tensor):
            return value
        stored[f"t{place}"] = value
        return graph.get_attr(f"t{place}")

    named = {name: node(value, len(operands) + number) for number, (name, value) in enumerate(kwargs.items())}
    call = graph.call_function(target, tuple(node(value, n) for n, value in enumerate(operands)), named)
    names = [name for name in stored if int(name[1:].split("_")[0]) in moving]
    tape = Tape(names)
    args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda read: stored[read.target])
    tape(call, args, kwargs, target(*args, **kwargs))
    return tape, call, stored, names


def expected_move(call, stored, moves):
    def run(tensors):
        known = {**stored, **tensors}
        args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda read: known[read.target])
        return call.target(*args, **kwargs)

    with sdpa_kernel(SDPBackend.MATH):
        return jvp(run, ({name: stored[name] for name in moves},), (moves,))[1]


def check(case, is_wanted=lambda some: True):
    """Every set of operands that can move."""
    target, operands, kwargs, moving = case
    sets = [some for count in range(len(moving)) for some in itertools.combinations(moving, count + 1)]
    for some in filter(is_wanted, sets):
        tape, call, stored, names = recorded(target, operands, kwargs, some)
        moves = {name: torch.randn_like(stored[name]) for name in names}
        torch.testing.assert_close(tape.push(moves)[call.name], expected_move(call, stored, moves))


def moves_a_bias_alone(some):
    """Or with the input: a bias that is refitted without its weight, which nearly never is."""
    return 2 in some and 1 not in some


@pytest.mark.parametrize("name", KNOWN)
def test_a_move_goes_through_a_known_operation_without_forward_mode(name, monkeypatch):
    check(KNOWN[name])
    monkeypatch.setattr(taping, "in_forward_mode", None)
    check(KNOWN[name], lambda some: not moves_a_bias_alone(some))


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_go_through_forward_mode(name, monkeypatch):
    used = []
    before = taping.in_forward_mode
    monkeypatch.setattr(taping, "in_forward_mode", lambda call: used.append(call) or before(call))
    check(OTHERS[name])
    assert used


def test_one_of_several_results_moves_as_it_does_among_them():
    graph, stored = fx.Graph(), {"x": values((2, 6))[0]}
    x = graph.get_attr("x")
    parts = graph.call_function(aten.split.Tensor, (x, 2, 1))
    second = graph.call_function(operator.getitem, (parts, 1))
    most = graph.call_function(aten.max.dim, (second, 1))
    which = graph.call_function(operator.getitem, (most, 1))
    tape = Tape(["x"])
    results = {}
    for node in (parts, second, most, which):
        args = fx.node.map_arg(node.args, lambda read: results.get(read.name, stored["x"]))
        results[node.name] = node.target(*args)
        tape(node, args, {}, results[node.name])
    move = torch.randn(2, 6).double()
    found = tape.push({"x": move})
    assert torch.equal(found[second.name], move[:, 2:4])
    assert torch.equal(found[most.name][0], move[:, 2:4].gather(1, results[which.name][:, None])[:, 0])
    assert which.name not in found


def test_what_no_tensor_moves_is_not_recorded():
    tape, *_ = recorded(*KNOWN["conv2d"][:3], ())
    assert tape.push({}) == {}
    assert not tape._steps


def in_place():
    """Activations that write into what they read."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(inplace=True), nn.Conv2d(8, 6, 3), nn.ReLU(inplace=True)]
    with seeded(0):
        model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 4)).eval()
        return bench(model, torch.randn(40, 3, 8, 8), joint_steps=1)


@pytest.mark.parametrize("name", [*ZOO, "in place"])
def test_a_segment_moves_as_forward_mode_and_autograd_say(name):
    found = in_place() if name == "in place" else zoo_bench(name, joint_steps=1, span=3)
    written = dict(found.start.weights)
    joints = JointRefits(found.calibration, found.split, found.keep, found.schedule, written, found.joint_steps)
    twin = found.twin(segments=tuple(joints.segments.values()))
    for point in found.schedule.points:
        segment = joints.segments.get(point.node)
        work = None if segment is None else joints.problem(twin, segment, written)
        if work is None:
            continue
        seen = list(segment_batches(twin, segment, found.split.fit, 20))
        work.whiten(seen)
        piece = work.residual(seen[0])
        at = tuple(0.01 * torch.randn_like(part) for part in work.start())
        direction = tuple(torch.randn_like(part) for part in at)
        about = piece.about(at)
        torch.testing.assert_close(about.residual, piece(at))
        pushed = jvp(piece, (at,), (direction,))[1]
        torch.testing.assert_close(about.push(direction), pushed, rtol=1e-4, atol=1e-5 * float(pushed.abs().max()))
        vector = torch.randn_like(about.residual)
        left = float((about.push(direction) * vector).double().sum())
        right = float(sum((a * b).double().sum() for a, b in zip(about.pull(vector), direction, strict=True)))
        assert left == pytest.approx(right, rel=1e-3, abs=1e-3 * float(pushed.norm() * vector.norm()))
    twin.close()
