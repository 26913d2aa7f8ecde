"""One product with the Jacobian of a real segment, J v, in four ways: why joint refits record differentials.

    python -m benchmarks.jacobian --device cuda
    python -m benchmarks.jacobian --device cpu --threads 1

The segment is one that `recoup.Best` refits jointly: three blocks of `recoup:resnet56`, fresh weights, a random half of
every group's channels, what leaves the segment as a function of all its weights. Ways:

- recorded differentials: `recovery.tape.Tape`, a run that is recorded once and followed in any direction.
- torch.func.jvp: forward mode over the whole segment, which is run again for every product.
- double backward: the gradient of the vector-Jacobian product with respect to its vector.
- torch.func.linearize: forward mode, traced once and folded.

Milliseconds: of the first product with all that has to be made for it, and the median of later ones. A refit takes some
twenty products about each point, and then goes to another point: both count. All ways must agree: the table has the
largest difference from the recorded differentials, relative to the largest value.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

import recoup
from benchmarks.machine import device_name
from recoup.algebra.gauss_newton import Parameters
from recoup.cli.models import open_model
from recoup.recovery.joint import JointRefits
from recoup.recovery.one_pass import one_pass_weights
from recoup.recovery.residual import Residual
from recoup.recovery.schedule import make_schedule
from recoup.recovery.segment_problem import SegmentProblem
from recoup.recovery.segments import Segment
from recoup.recovery.twin_run import TwinRun

Push: TypeAlias = Callable[[Parameters], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A segment with some images on their way through it: its residual, no change at all, and some direction."""

    segment: Segment
    residual: Residual
    start: Parameters
    direction: Parameters
    images: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of the first product and of later ones, and how far it is from the first way's; or why not."""

    way: str
    first: float | None = None
    later: float | None = None
    difference: float | None = None
    note: str = ""


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    opened = open_model(options.model, options.weights)
    piece = make_piece(opened.model.to(options.device), opened.input.shape, options.images)
    device = torch.device(options.device)
    print(table(piece, measure(piece, device, options.repeats), place(options.device)))


def make_piece(model: nn.Module, shape: Sequence[int], images: int, seed: int = 0) -> Piece:
    """The middle one of the longest segments, at half the width, with so many random images."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(images + images // 4, *shape, generator=generator).to(device)  # a fifth is held out
    data, method = recoup.split(model, [batch]), recoup.Best(selector="random", seed=seed)
    seen = recoup.calibrate(recoup.trace(model, batch), data, method)
    keep = recoup.allocate(seen, recoup.rank(seen), recoup.Goal(budget=recoup.Budget(width=0.5))).keep
    host = seen.traced.standalone.host
    schedule = make_schedule(host.graph, seen.structure)
    written = one_pass_weights(seen, keep)
    joints = JointRefits(seen, data, keep, schedule, written, method.joint_steps)
    segment = longest(list(joints.segments.values()))
    twin = TwinRun(host, schedule, data.batches, written, device, segments=(segment,))
    try:
        problem = joints.problem(twin, segment, written)
        assert problem is not None, "the segment cannot be run at the size that is left"
        return _piece(problem, twin, segment, data, generator)
    finally:
        twin.close()


def longest(segments: Sequence[Segment]) -> Segment:
    """The middle one of the segments with the most tensors."""
    most = max(len(segment.tensors) for segment in segments)
    found = [segment for segment in segments if len(segment.tensors) == most]
    return found[len(found) // 2]


def measure(piece: Piece, device: torch.device, repeats: int) -> list[Timing]:
    """All ways, the recorded differentials first. Later products take turns, so that all meet the same load."""
    ready = [_prepared(name, make, piece, device) for name, make in WAYS.items()]
    for _ in range(repeats):
        for one in ready:
            if one.push is not None:
                one.later.append(_seconds(device, one.push, piece.direction))
    expected = next(one.made for one in ready if one.made is not None)
    return [_timing(one, expected) for one in ready]


def recorded(piece: Piece) -> Push:
    """Our own: one run, every operation of which keeps its differential."""
    return piece.residual.about(piece.start).push


def by_jvp(piece: Piece) -> Push:
    """Forward mode, from the start for every direction."""

    def push(direction: Parameters) -> Tensor:
        result: Tensor = torch.func.jvp(lambda *changes: piece.residual(changes), piece.start, direction)[1]
        return result

    return push


def by_double_backward(piece: Piece) -> Push:
    """J^T w is linear in w, and its derivative along v is J v."""
    at = tuple(part.detach().requires_grad_() for part in piece.start)
    residual = piece.residual(at)
    cotangent = torch.zeros_like(residual, requires_grad=True)
    pulled = torch.autograd.grad(residual, at, cotangent, create_graph=True)

    def push(direction: Parameters) -> Tensor:
        (moved,) = torch.autograd.grad(pulled, cotangent, direction, retain_graph=True)
        return moved

    return push


def by_linearize(piece: Piece) -> Push:
    """Forward mode, traced at this point."""
    _, linear = torch.func.linearize(lambda *changes: piece.residual(changes), *piece.start)

    def push(direction: Parameters) -> Tensor:
        result: Tensor = linear(*direction)
        return result

    return push


WAYS: dict[str, Callable[[Piece], Push]] = {
    "recorded differentials": recorded,
    "torch.func.jvp": by_jvp,
    "double backward": by_double_backward,
    "torch.func.linearize": by_linearize,
}


def table(piece: Piece, timings: Sequence[Timing], where: str) -> str:
    """What was measured, as Markdown."""
    base = next(timing.later for timing in timings if timing.later is not None)
    lines = [
        f"{len(piece.segment.nodes)} operations, {sum(part.numel() for part in piece.start):,} parameters in "
        f"{len(piece.start)} matrices, {piece.images} images, {where}, torch {torch.__version__}",
        "",
        "| J v by | first product, ms | later ones, ms | later, relative | difference |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(line(timing, base) for timing in timings)])


def line(timing: Timing, base: float) -> str:
    if timing.first is None or timing.later is None:
        return f"| {timing.way} | - | - | - | {timing.note} |"
    return (
        f"| {timing.way} | {timing.first:.1f} | {timing.later:.2f} | {timing.later / base:.2f} | "
        f"{timing.difference:.0e} |"
    )


def place(device: str) -> str:
    """The machine, and how many threads it may use where that matters."""
    threads = torch.get_num_threads()
    return device_name(device) + (f" with {threads} thread{'s' * (threads > 1)}" if device == "cpu" else "")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="recoup:resnet56")
    parser.add_argument("--weights", help="fresh ones if not said; they hardly matter for the time")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20, help="later products, of which the median is shown")
    parser.add_argument("--threads", type=int, help="of a CPU; torch's own choice if not said")
    return parser.parse_args(words)


def _piece(
    problem: SegmentProblem, twin: TwinRun, segment: Segment, data: recoup.Split, generator: torch.Generator
) -> Piece:
    batch = next(twin.segment_batches(segment, data.fit))
    problem.whiten([batch])
    start = problem.start()
    direction = tuple(torch.randn(part.shape, generator=generator).to(part) for part in start)
    return Piece(segment, problem.residual(batch), start, direction, batch.size)


@dataclass(slots=True, eq=False)
class _Ready:
    """One way after its first product, which was `made` in so many seconds; `note` says why there is none."""

    way: str
    first: float = 0.0
    push: Push | None = None
    made: Tensor | None = None
    note: str = ""
    later: list[float] = field(default_factory=list)


def _prepared(name: str, make: Callable[[Piece], Push], piece: Piece, device: torch.device) -> _Ready:
    """A way with one untimed turn before, since whatever a library makes at first use is not the product's."""
    try:
        made = make(piece)(piece.direction).detach()
        with _stopwatch(device) as first:
            push = make(piece)
            push(piece.direction)
    except (RuntimeError, NotImplementedError) as error:  # an operation that torch cannot do in this way
        return _Ready(name, note=f"{type(error).__name__}: {str(error).splitlines()[0][:100]}")
    return _Ready(name, first[0], push, made)


def _timing(one: _Ready, expected: Tensor) -> Timing:
    if one.made is None:
        return Timing(one.way, note=one.note)
    difference = float((one.made - expected).abs().max() / expected.abs().max())
    return Timing(one.way, 1000 * one.first, 1000 * statistics.median(one.later), difference)


def _seconds(device: torch.device, push: Push, direction: Parameters) -> float:
    with _stopwatch(device) as seconds:
        push(direction)
    return seconds[0]


@contextmanager
def _stopwatch(device: torch.device) -> Iterator[list[float]]:
    """The seconds of what is done inside, in a list that has them at the end."""
    seconds: list[float] = []
    _wait(device)
    start = time.perf_counter()
    yield seconds
    _wait(device)
    seconds.append(time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
