from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import recoup
from recoup.algebra.gauss_newton import total
from recoup.recovery import joint as refits
from recoup.recovery.joint import JointRefits, refit_jointly, segment_batches
from recoup.recovery.residual import _spread
from recoup.recovery.segment_problem import SegmentProblem
from recoup.recovery.sequential import recover_in_sequence
from recoup.recovery.twin_run import TwinRun
from tests.recovery.bench import Judged, Shaped, Windows, bench, zoo_bench
from tests.zoo import seeded


def two_layers(activation, rank=None, samples=400, kept=3, scale=1.0):
    """A layer that makes eight channels and one that reads them, of which three are left."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 5)).double().eval()
        if rank is not None:
            model[2].weight.data = torch.randn(5, rank).double() @ torch.randn(rank, 8).double() / 3
        model[0].weight.data *= scale
        images = torch.randn(samples, 6).double()
    return bench(model, images, {"0": torch.arange(8) < kept}, joint_steps=1)


def opened(found, number=0):
    """A twin run, a segment of it, and its tensors as parameters."""
    written = dict(found.start.weights)
    joints = JointRefits(found.calibration, found.split, found.keep, found.schedule, written, found.joint_steps)
    segments = tuple(joints.segments.values())
    twin, segment = found.twin(segments=segments), segments[number]
    return twin, segment, joints.problem(twin, segment, written)


def held_out(found, twin, segment, work, changes):
    judging = [work.residual(batch) for batch in segment_batches(twin, segment, found.split.held, 10_000)]
    return total(judging, changes)


def test_the_loss_of_a_segment_is_the_relative_error_of_what_leaves_it():
    found = two_layers(nn.Tanh())
    twin, segment, work = opened(found)
    (held,) = (found.split.batches[place].args[0] for place in found.split.held)
    with torch.no_grad():
        (actual,), expected = found.whole(found.start, found.split.batches[found.split.held[0]]), found.model(held)
    relative = float((actual - expected).square().sum() / expected.var(dim=0, correction=0).sum())
    assert held_out(found, twin, segment, work, work.start()) == pytest.approx(relative, rel=1e-6)
    twin.close()


def test_no_change_is_the_segment_as_it_is():
    found = zoo_bench("residual", seed=5, joint_steps=1)
    twin, _, work = opened(found)
    for name, value in work.tensors(work.start()).items():
        before = found.start.weights.get(name, found.calibration.parameters.get(name))
        assert torch.equal(value, before)
    twin.close()


def test_the_shortened_float32_of_a_gpu_does_not_decide_whether_a_segment_is_sound(monkeypatch):
    found = two_layers(nn.Tanh())
    twin, segment, work = opened(found)
    (batch,) = segment_batches(twin, segment, found.split.held, 10_000)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    seen = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.tanh.default:
                seen.append(torch.backends.cudnn.conv.fp32_precision)
            return function(*args, **(kwargs or {}))

    with Watched():
        assert work.is_sound(batch)
    assert seen == ["ieee", "ieee"]
    assert torch.backends.cudnn.allow_tf32
    twin.close()


def test_changes_reach_what_is_left_and_nothing_else():
    found = two_layers(nn.ReLU())
    twin, _, work = opened(found)
    changed = work.tensors(tuple(part + 1 for part in work.start()))
    torch.testing.assert_close(changed["0.weight"][:3], found.model[0].weight.detach()[:3] + 1, rtol=1e-12, atol=1e-12)
    assert torch.equal(changed["0.weight"][3:], found.model[0].weight.detach()[3:])
    assert torch.equal(changed["2.weight"][:, 3:], torch.zeros(5, 5).double())
    twin.close()


def test_two_linear_layers_of_low_rank_are_recovered_by_turning_the_channels_that_are_left():
    """Any three channels can carry a product of rank two, though none of those that are left does."""
    found = two_layers(nn.Identity(), rank=2)
    twin, segment, work = opened(found)
    before = held_out(found, twin, segment, work, work.start())
    changes = refit_jointly(work, twin, segment, found.split, steps=20)
    after = held_out(found, twin, segment, work, changes)
    twin.close()
    assert before > 1
    assert after < 1e-3 * before


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.SiLU()], ids=["relu", "tanh", "silu"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_held_out_loss_falls_or_nothing_changes(activation, steps):
    found = two_layers(activation, scale=2.0)
    twin, segment, work = opened(found)
    before = held_out(found, twin, segment, work, work.start())
    changes = refit_jointly(work, twin, segment, found.split, steps)
    assert changes is not None
    assert held_out(found, twin, segment, work, changes) < before
    twin.close()


def test_more_steps_are_never_worse_on_held_out_images():
    found = two_layers(nn.ReLU(), samples=60)
    twin, segment, work = opened(found)
    losses = []
    for steps in (1, 2, 4, 8):
        changes = refit_jointly(work, twin, segment, found.split, steps)
        losses.append(held_out(found, twin, segment, work, changes or work.start()))
    twin.close()
    assert losses == sorted(losses, reverse=True)


def test_an_exact_segment_stays_as_it_is():
    with seeded(0):
        mask = torch.arange(8) < 4
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double().eval()
        model[0].weight.data[4:], model[0].bias.data[4:] = model[0].weight.data[:4], model[0].bias.data[:4]
        found = bench(model, torch.randn(400, 6).double(), {"0": mask}, ridge=0.0, joint_steps=1)
    twin, segment, work = opened(found)
    assert held_out(found, twin, segment, work, work.start()) < 1e-15
    changes = refit_jointly(work, twin, segment, found.split, 3)
    assert held_out(found, twin, segment, work, changes or work.start()) < 1e-15
    twin.close()


@pytest.mark.parametrize("seed", range(3))
def test_what_only_fits_its_own_images_better_is_not_taken(seed):
    """Eight images to learn by heart; on the two that are held out that is worse than what a thousand had found."""
    found = two_layers(nn.ReLU(), samples=1000, scale=2.0)
    with seeded(seed):
        found = replace(found, split=recoup.split(found.model, [torch.randn(10, 6).double()]))
    twin, segment, work = opened(found)
    before = held_out(found, twin, segment, work, work.start())
    changes = refit_jointly(work, twin, segment, found.split, 5)
    assert changes is None or held_out(found, twin, segment, work, changes) < before
    twin.close()


@pytest.mark.parametrize("images", [0, 1, 100, 10_000])
def test_no_more_images_take_part_than_were_asked_for(images):
    found = two_layers(nn.Tanh())
    twin, segment, _ = opened(found)
    parts = list(segment_batches(twin, segment, found.split.fit, images))
    twin.close()
    assert sum(part.size for part in parts) == min(images, 320)


def test_images_that_take_part_whole_are_not_copied():
    found = two_layers(nn.Tanh())
    twin, segment, _ = opened(found)
    once, again = (
        [
            value.data_ptr()
            for part in segment_batches(twin, segment, found.split.fit, 10_000)
            for value in part.exits.values()
        ]
        for _ in range(2)
    )
    twin.close()
    assert once and once == again


def test_little_memory_costs_time_but_no_images(monkeypatch):
    """What enters and leaves the two layers, 11 values of a sample, fits twice; all 27 do not, with derivatives."""
    found = two_layers(nn.Tanh())
    results = []
    for memory in (1 << 30, 2 * 320 * 2 * 11 * 8):
        monkeypatch.setattr(refits, "memory_of", lambda device, memory=memory: memory)
        twin, segment, work = opened(found)
        assert sum(part.size for part in segment_batches(twin, segment, found.split.fit, 10_000)) == 320
        results.append((refits._room(twin, segment), refit_jointly(work, twin, segment, found.split, 2)))
        twin.close()
    (much, expected), (little, actual) = results
    assert little < much
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))


def test_recovery_with_joint_refits_has_less_output_error():
    found = two_layers(nn.Tanh(), scale=2.0)
    images = torch.cat([b.args[0] for b in found.split.batches])
    errors = []
    for steps in (0, 3):
        other = bench(found.model, images, found.keep, joint_steps=steps)
        errors.append(other.reference.error(recovered(other).weights))
    assert errors[1] < 0.8 * errors[0]


def recovered(found):
    """With as many joint steps as the method has."""
    return recover_in_sequence(found.calibration, found.split, found.keep, found.start, joint_steps=found.joint_steps)


def test_a_segment_through_something_without_a_derivative_stays_as_it_is():
    class Hard(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x):
            return self.b(torch.sign(self.a(x)))

    with seeded(0):
        found = bench(Hard().double().eval(), torch.randn(100, 6).double(), {"a": torch.arange(8) < 4}, joint_steps=2)
    plan = recovered(found)
    assert all(bool(value.isfinite().all()) for value in plan.weights.values())


def refitted(found):
    plan = recovered(found)
    assert all(bool(value.isfinite().all()) for value in plan.weights.values())
    return plan


def test_a_segment_through_something_that_autograd_refuses_stays_as_it_is():
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x):
            x = self.a(x)
            return self.b(torch.heaviside(x, torch.zeros_like(x)))

    with seeded(0):
        found = bench(Step().double().eval(), torch.randn(100, 6).double(), {"a": torch.arange(8) < 4}, joint_steps=2)
    twin, _, work = opened(found)
    assert work is None
    twin.close()
    refitted(found)


@pytest.mark.parametrize("samples", [5, 10, 40])
def test_a_segment_that_does_not_leave_one_row_per_sample_stays_as_it_is(samples, monkeypatch):
    """What leaves the first segment, and enters the second, cannot be cut to a few samples."""
    with seeded(0):
        model, images = Windows().double().eval(), torch.randn(samples, 3, 8, 8).double()
        found = bench(model, images, {"a": torch.arange(16) < 8, "c": torch.arange(12) < 6}, joint_steps=1)
    for number in range(2):
        twin, _, work = opened(found, number)
        assert work is None
        twin.close()
    monkeypatch.setattr(refits, "work_of", lambda device: 1)  # one sample at a time
    refitted(found)


class ChosenPlaces(nn.Module):
    """Picks the best places of every sample by a list that names all samples, made before the segment."""

    def __init__(self):
        super().__init__()
        self.score, self.a, self.b = nn.Linear(6, 1), nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        places = self.score(x)[:, :, 0].topk(2, 1).indices
        samples = torch.arange(len(x)).unsqueeze(-1).repeat(1, 2).view(-1)
        found = self.a(x).relu()[samples, places.view(-1)]
        return self.b(found).view(len(x), 2, 5)


def test_a_segment_that_is_told_samples_by_their_number_stays_as_it_is(monkeypatch):
    with seeded(0):
        model, tokens = ChosenPlaces().double().eval(), torch.randn(40, 7, 6).double()
        found = bench(model, tokens, {"a": torch.arange(8) < 4}, joint_steps=1)

    def forbidden(work, batch):
        raise AssertionError("on a GPU, places out of bounds end the process")

    with monkeypatch.context() as patched:
        patched.setattr(SegmentProblem, "is_sound", forbidden)
        twin, _, work = opened(found)
        assert work is None
    refitted(found)
    # Without the rule the segment is tried, and places out of bounds are no error of ours.
    monkeypatch.setattr(TwinRun, "can_be_parted", lambda twin, batch: True)
    again, _, work = opened(found)
    assert work is None
    for each in (twin, again):
        each.close()
    refitted(found)


def test_a_number_for_the_whole_batch_and_a_mask_take_no_part():
    with seeded(0):
        model, images = Judged().double().eval(), torch.randn(400, 8).double()
        found = bench(model, images, {"b": torch.arange(16) < 8}, joint_steps=2)
    twin, _, work = opened(found)
    assert work is not None
    twin.close()
    assert not torch.equal(refitted(found).weights["b.weight"], found.calibration.parameters["b.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_refits_as_float32_does(dtype):
    falls = []
    for kind in (torch.float32, dtype):
        with seeded(0):
            layers = nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 8, 3, padding=1)
            model, images = nn.Sequential(*layers).to(kind).eval(), torch.randn(50, 3, 16, 16).to(kind)
            found = bench(model, images, {"0": torch.arange(12) < 6}, joint_steps=2)
        twin, segment, work = opened(found)
        changes = refit_jointly(work, twin, segment, found.split, 2)
        assert all(part.dtype == torch.float32 for part in changes)
        losses = [held_out(found, twin, segment, work, at) for at in (work.start(), changes)]
        assert {value.dtype for value in work.tensors(changes).values()} == {kind}
        falls.append(losses[1] / losses[0])
        twin.close()
    assert falls[0] < 0.9
    assert falls[1] == pytest.approx(falls[0], abs=0.03)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_spread_of_many_values_is_finite_in_low_precision(dtype):
    with seeded(0):
        value = torch.randn(200, 16, 16, 16)
    assert _spread(value.to(dtype)) == pytest.approx(_spread(value), rel=1e-2)


@pytest.mark.parametrize(("way", "is_last"), [("none", True), ("reshape", True), ("view_as", False)])
def test_maps_lie_with_their_channels_last_unless_an_operation_goes_by_their_order(way, is_last):
    with seeded(0):
        found = bench(Shaped(way).eval(), torch.randn(60, 3, 8, 8), {"a": torch.arange(8) < 5}, joint_steps=1)
    twin, segment, work = opened(found)
    layouts = []

    def watch(node, args, kwargs, result):
        if "conv2d" in node.name:
            layouts.append(args[0].is_contiguous(memory_format=torch.channels_last))

    (batch,) = segment_batches(twin, segment, found.split.held, 10_000)
    with torch.no_grad():
        work.residual(batch)(work.start(), watch)
    assert layouts[0] == is_last
    assert refit_jointly(work, twin, segment, found.split, 2) is not None
    twin.close()


class Widening(nn.Module):
    """Layers in few bits, whose values meet some with more before the next layer reads them."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.a, self.b = nn.Conv2d(3, 8, 3).bfloat16(), nn.Conv2d(8, 8, 3, padding=1).bfloat16()
        self.position, self.c, self.head = nn.Parameter(torch.rand(8, 6, 6) + 1), nn.Conv2d(8, 6, 3), nn.Linear(6, 4)

    def forward(self, x):
        x = torch.relu(self.b(torch.relu(self.a(x.bfloat16()))))
        return self.head(torch.relu(self.c(self.operation(x, self.position))).mean((2, 3)))


@pytest.mark.parametrize("operation", [torch.add, torch.div, torch.mul, torch.sub])
def test_layers_on_both_sides_of_a_change_of_precision_are_refitted_together(operation):
    with seeded(0):
        found = bench(Widening(operation).eval(), torch.randn(60, 3, 8, 8), {"b": torch.arange(8) < 5}, joint_steps=1)
    twin, segment, work = opened(found)
    seen = list(segment_batches(twin, segment, found.split.fit, 20))
    work.whiten(seen)
    pushed = work.residual(seen[0]).about(work.start()).push(tuple(torch.ones_like(part) for part in work.start()))
    assert pushed.dtype == torch.float32 and bool(pushed.any())
    twin.close()
