"""What has to hold for every network: the laws, each judged from outside."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import recoup
from recoup.channels.structure import named_tensors
from recoup.surgery.apply import masked
from tests.fuzz.comparison import COARSE, PRECISE, ROUNDING, SHAKE, compare, relative_error
from tests.fuzz.copies import install
from tests.fuzz.networks import Case, batch, build, call, changed

# Exact copies that go may cost this much, relative to the spread of the outputs; what the merged network may.
LOST, INSTALLED = 5e-2, 1e-5
# Refitted layers may err by so many times what they err untouched, and so much more: one pass sees each layer alone.
WORSE, LEAST = 2.0, 0.05
# Small, and every position seen, so that what is lost of exact copies is rounding. Smaller still, and the choice among
# inputs that are copies of each other would be rounding itself.
EXACT = {"ridge": 1e-8, "positions": None}
IMAGES, BATCHES = 40, 2
# Of the multiply-accumulates that torch counts, so much may be missing in a report.
COUNTED = 0.01
# A case may compute for so many seconds, and may last so many where it waits or the machine has other work.
SECONDS, LONGEST = 60, 600


class BrokenLawError(Exception):
    """A law that does not hold for a case: its name, and what was seen."""

    def __init__(self, law: str, what: str) -> None:
        super().__init__(f"{law}: {what}")
        self.law, self.what = law, what


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended: with broken laws (their names, and what was seen), refused by an error of ours, or well."""

    broken: dict[str, str] = field(default_factory=dict)
    refused: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def end(self) -> str:
        """In a word."""
        return "broken" if self.broken else "held" if self.refused is None else "refused"


def check(case: Case) -> Outcome:
    """Prune the network of a case, and judge the result by every law."""
    broken: dict[str, str] = {}
    notes: list[str] = []
    refused = None
    try:
        with _limited(SECONDS, LONGEST), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            for law in _laws(case, notes):
                with _noted(broken):
                    law()
    except recoup.RecoupError as error:
        refused = f"{type(error).__name__}: {error}"
    except BrokenLawError as error:
        broken.setdefault(error.law, error.what)
    return Outcome(broken, refused, tuple(notes))


def _laws(case: Case, notes: list[str]) -> Iterator[Callable[[], None]]:
    """The laws about one case, once it is pruned."""
    model = build(case)
    data = [batch(case, IMAGES, 1 + 2 * number) for number in range(BATCHES)]
    widths = None
    if case.cut == "copies":
        with _ours("trace"):
            widths = _install(case, model, data[0])
        notes.append("copies" if widths else "no copies")
    else:
        with _unchanged(model, data[:1]), _ours("inspect"):
            str(recoup.inspect(model, data[0], keep_class=case.keep_class))
    with _unchanged(model, data), _ours("prune"):
        result = _prune(case, model, data, widths)
    notes.append("standalone" if result.plan.graph is not None else "own class")
    trial = Trial(case, model, result, notes)
    if widths:
        yield lambda: _loses_nothing(trial, data, widths)
    for law in LAWS:
        yield functools.partial(law, trial)


def _install(case: Case, model: nn.Module, data: Any) -> dict[str, int] | None:
    seen = batch(case, 12, 21)

    def is_same(merged: nn.Module) -> bool:
        return relative_error(_run(model, seen), _run(merged, seen)) < INSTALLED

    return install(model, lambda model: recoup.trace(model, data, keep_class=case.keep_class), is_same)


def _prune(case: Case, model: nn.Module, data: list[Any], widths: dict[str, int] | None) -> recoup.Result:
    made = {"best": recoup.Best, "fast": recoup.Fast, "paper": recoup.Paper, "released": recoup.Released}[case.method]
    goal: dict[str, Any] = {"budget": recoup.Budget(width=0.5)}
    if widths:
        goal = {"widths": widths}
    elif case.cut in ("macs", "parameters"):
        goal = {"budget": recoup.Budget(**{case.cut: 0.85})}
    elif case.cut == "nothing":
        goal = {"budget": recoup.Budget(width=1.0)}
    elif case.cut == "tolerance":
        original = _run(model, data[0])
        goal = {"tolerance": 20.0, "evaluate": lambda m: -100 * min(relative_error(original, _run(m, data[0])), 9.0)}
    whole = {"classifier": True} if case.method in ("paper", "released") else {}
    method = made(**whole, **EXACT) if widths else made(**whole)
    return recoup.prune(model, data, method=method, keep_class=case.keep_class, **goal)


@dataclass(frozen=True)
class Trial:
    """A result beside what it was made from."""

    case: Case
    model: nn.Module
    result: recoup.Result
    notes: list[str]

    @functools.cached_property
    def expected(self) -> nn.Module:
        """The original with the plan's weights, at full size."""
        return masked(self.model, self.result.plan)

    @functools.cached_property
    def form(self) -> nn.Module:
        """The original as the library holds it, with its own weights."""
        return masked(self.model, dataclasses.replace(self.result.plan, weights={}))

    @functools.cached_property
    def in_double(self) -> tuple[nn.Module, nn.Module]:
        """What is expected and what came out in float64; as they are where the network's code fixes its precision."""
        pair = self.expected, self.result.model
        doubled = copy.deepcopy(self.expected).double()
        if _fails(doubled, _doubled(batch(self.case, 7, 5))):
            return pair
        return doubled, copy.deepcopy(self.result.model).double()

    def is_masked(self, law: str, data: Any) -> None:
        """The result computes what the original with the plan's weights does."""
        left, right = self.in_double
        is_precise = left is not self.expected
        same(law, _doubled(data) if is_precise else data, left, right, precise=is_precise)

    def is_model(self, law: str, data: Any) -> None:
        """What the result is compared with computes what the caller's model does."""
        same(law, data, self.model, self.form, precise=False)


def same(law: str, data: Any, left: nn.Module, right: nn.Module, *, precise: bool) -> None:
    """Two networks agree on a batch; `right` may not fail where `left` runs."""
    expected = _run(left, data)
    with _raises_nothing(law):
        actual = _run(right, data)
    dtype = torch.float64 if precise else torch.float32
    found = compare(expected, actual, PRECISE if precise else COARSE, lambda: _run(left, _shaken(data, dtype)))
    if found.what is not None:
        raise BrokenLawError(law, found.what)


def _loses_nothing(trial: Trial, data: list[Any], widths: dict[str, int]) -> None:
    """What goes were copies of what stays; a channel that few images wake may need more of them to be known."""
    if _lost(trial, trial.result, data[0]) < LOST:
        return
    more = [batch(trial.case, 4 * IMAGES, 11 + 2 * number) for number in range(BATCHES)]
    with _ours("prune"):
        again = _prune(trial.case, trial.model, more, widths)
    error = _lost(trial, again, more[0])
    if not error < LOST:
        raise BrokenLawError("copies", f"{error:.1e} of the spread of the outputs is lost with exact copies")


def _lost(trial: Trial, result: recoup.Result, seen: Any) -> float:
    # What was constant on all images is not known on others, and the report says so.
    is_known = not any(group.gone for group in result.report.constant.values())
    batches = (seen, batch(trial.case, 24, 5)) if is_known else (seen,)
    return max(relative_error(_run(trial.model, data), _run(result.model, data)) for data in batches)


def _masked(trial: Trial) -> None:
    for count in (7, 24):
        trial.is_masked("masked", batch(trial.case, count, 5))


def _form(trial: Trial) -> None:
    trial.is_model("form", batch(trial.case, 7, 5))


def _whole(trial: Trial) -> None:
    """Where all of every width is to be kept, nothing goes."""
    if trial.case.cut == "nothing":
        gone = {name: int((~kept).sum()) for name, kept in trial.result.plan.keep.items() if not bool(kept.all())}
        if gone:
            raise BrokenLawError(
                "nothing", f"every width was to stay, and of these groups so many channels went: {gone}"
            )
        same("nothing", batch(trial.case, 7, 5), trial.model, trial.result.model, precise=False)


def _refits(trial: Trial) -> None:
    """To refit what is left is no worse than to leave it alone; one pass, which nothing judges, may be."""
    if trial.result.report.method["name"] in ("Paper", "Released"):  # `fast` and `best` may have fallen back on it
        return
    seen, plan, tensors = batch(trial.case, IMAGES, 1), trial.result.plan, named_tensors(trial.form)
    alone = {n: tensors[n] * (w != 0) for n, w in plan.weights.items() if n in tensors and w.dim() > 1}
    original = _run(trial.model, seen)
    left = relative_error(original, _run(masked(trial.model, dataclasses.replace(plan, weights=alone)), seen))
    refitted = relative_error(original, _run(trial.result.model, seen))
    if not refitted <= WORSE * left + LEAST:
        raise BrokenLawError("refit", f"error {refitted:.2f} after refitting, {left:.2f} if nothing is refitted")


def _costs(trial: Trial) -> None:
    """The report says what torch counts while the networks run."""
    few, more, report = batch(trial.case, 2, 5), batch(trial.case, 3, 5), trial.result.report
    if any(isinstance(module, nn.LSTM) for module in trial.model.modules()):
        return  # on a CPU torch runs its cells by an operation that it does not count
    for name, model, said in (("model", trial.model, report.before), ("result", trial.result.model, report.after)):
        counted = _counted(model, more) - _counted(model, few)  # a weight that is computed is so once for all samples
        if not abs(said.macs - counted) <= COUNTED * counted:
            raise BrokenLawError("cost", f"the {name} makes {counted:,} MACs, and {said.macs:,} are reported")


def _counted(model: nn.Module, data: Any) -> int:
    """Multiply-accumulates of a call."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # fused attention hides its products from the counter
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            _run(model, data)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return counter.get_total_flops() // 2


def _batches(trial: Trial) -> None:
    for count in (1, 2, 7, 9):
        _at_another("batch", trial, batch(trial.case, count, 7), guarded=_branches(trial.case))


def _sizes(trial: Trial) -> None:
    for size in (1, -1):
        _at_another("size", trial, batch(trial.case, 3, 7, size), guarded=True)


def _numbers(trial: Trial) -> None:
    if trial.case.stem == "image_and_number":
        _at_another("number", trial, batch(trial.case, 3, 8), guarded=True)


def _at_another(law: str, trial: Trial, data: Any, *, guarded: bool) -> None:
    """Where the original runs, the result agrees; it may say, in an error of ours, that it cannot."""
    if _fails(trial.model, data):
        return
    if guarded:
        try:
            _run(trial.result.model, data)
        except recoup.RecoupError:
            trial.notes.append(f"{law} guarded")
            return
        except Exception as error:  # what is looked for
            raise BrokenLawError(law, _brief(error)) from error
    trial.is_model(law, data)
    trial.is_masked(law, data)


def _training(trial: Trial) -> None:
    """There and back changes nothing; a step in training mode runs where it does for the original."""
    data, twin = batch(trial.case, 7, 9), copy.deepcopy(trial.result.model)
    with _raises_nothing("train"):
        try:
            twin.train()
        except recoup.RecoupError:
            trial.notes.append("train guarded")
            return
        if not _fails(copy.deepcopy(trial.model), data, training=True):
            call(copy.deepcopy(twin), data)
        _equal("train", _run(trial.result.model, data), _run(twin.eval(), data))


def _copies(trial: Trial) -> None:
    data = batch(trial.case, 7, 9)
    with _raises_nothing("deepcopy"):
        _equal("deepcopy", _run(trial.result.model, data), _run(copy.deepcopy(trial.result.model), data))


def _saving(trial: Trial) -> None:
    """What is loaded is what was saved, but for rounding (memory may be laid out otherwise), and in its mode.

    Compared in float64 where that can be: of outputs that hardly vary, rounding is more than their spread allows.
    """
    data, (_, made) = batch(trial.case, 7, 9), trial.in_double
    is_double = made is not trial.result.model
    with tempfile.TemporaryDirectory() as folder, _raises_nothing("load"):
        trial.result.save(Path(folder) / "saved")
        loaded = recoup.load(Path(folder) / "saved", copy.deepcopy(trial.model))
        _equal("load", _state(trial.result.model), _state(loaded))
        if is_double:
            _equal("load", _run(made, _doubled(data)), _run(copy.deepcopy(loaded).double(), _doubled(data)), PRECISE)
        else:
            _equal("load", _run(made, data), _run(loaded, data), ROUNDING)
    if loaded.training != trial.result.model.training:
        raise BrokenLawError("load mode", f"saved with training={trial.result.model.training}, loaded otherwise")


LAWS: tuple[Callable[[Trial], None], ...] = (
    _masked, _form, _whole, _refits, _costs, _batches, _sizes, _numbers, _training, _copies, _saving,
)  # fmt: skip


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Tensors by name, in an order of their own: that of registering may differ."""
    return dict(sorted(model.state_dict().items()))


def _run(model: nn.Module, data: Any) -> Any:
    """What the model gives in eval mode; it is left as it was, whatever it remembers of what it has seen."""
    with torch.no_grad(), _restored(model):
        return call(model.eval(), data)


def _fails(model: nn.Module, data: Any, *, training: bool = False) -> bool:
    try:
        with torch.no_grad(), _restored(model):
            call(model.train(training), data)
    except Exception:  # the network's own
        return True
    return False


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Buffers and modes are put back; `copy.deepcopy` would take most of the time of all laws."""
    before = [(module, dict(module._buffers), module.training) for module in model.modules()]
    values = [(buffer, buffer.clone()) for _, held, _ in before for buffer in held.values() if buffer is not None]
    try:
        yield
    finally:
        for buffer, value in values:
            buffer.copy_(value)
        for module, held, training in before:
            module._buffers.update(held)
            module.training = training


def _doubled(data: Any) -> Any:
    return changed(data, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def _shaken(data: Any, dtype: torch.dtype) -> Any:
    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor * (1 + SHAKE[dtype] * torch.sin(torch.arange(tensor.numel()).view_as(tensor)).to(tensor))

    return changed(data, moved)


def _equal(law: str, expected: Any, actual: Any, allowed: float = 0.0) -> None:
    found = compare(expected, actual, allowed, lambda: expected)
    if found.what is not None:
        raise BrokenLawError(law, found.what)


def _branches(case: Case) -> bool:
    """Whether the code asks for the size of the batch: the library may refuse to guess."""
    return any(step.kind == "BatchBranch" for step in case.steps)


@contextlib.contextmanager
def _noted(broken: dict[str, str]) -> Iterator[None]:
    """A broken law is written down, and the next one judged."""
    try:
        yield
    except BrokenLawError as error:
        if error.law == "hang":
            raise
        broken.setdefault(error.law, error.what)


@contextlib.contextmanager
def _ours(stage: str) -> Iterator[None]:
    """Whatever is raised in here is an error of ours."""
    try:
        yield
    except (recoup.RecoupError, BrokenLawError, TimeoutError):
        raise
    except Exception as error:  # what is looked for
        raise BrokenLawError(f"raw {type(error).__name__} in {stage}", f"{_brief(error)}\n{_where(error)}") from error


@contextlib.contextmanager
def _raises_nothing(law: str) -> Iterator[None]:
    try:
        yield
    except (BrokenLawError, TimeoutError):
        raise
    except Exception as error:  # what is looked for
        raise BrokenLawError(law, _brief(error)) from error


@contextlib.contextmanager
def _unchanged(model: nn.Module, data: list[Any]) -> Iterator[None]:
    """The caller's model, data and random numbers are the same bits afterwards, whatever happens."""
    before = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    modes, numbers = [module.training for module in model.modules()], torch.get_rng_state()
    batches = [changed(part, Tensor.clone) for part in data]
    try:
        yield
    finally:
        after = model.state_dict(keep_vars=True)
        moved = [n for n, (i, v) in before.items() if id(after.get(n)) != i or not _same_bits(after[n], v)]
        if moved or after.keys() != before.keys():
            raise BrokenLawError("caller", f"the caller's {', '.join(moved) or 'names'} changed")
        if modes != [module.training for module in model.modules()]:
            raise BrokenLawError("caller", "modes of the caller's modules changed")
        for old, new in zip(batches, data, strict=True):
            _equal("caller", old, new)
        if not torch.equal(numbers, torch.get_rng_state()):
            raise BrokenLawError("caller", "the state of the random numbers changed")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def _where(error: BaseException) -> str:
    """The last frames of ours that an error came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "recoup" in f.filename]
    return " <- ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames[-4:]))


@contextlib.contextmanager
def _limited(computing: int, waiting: int) -> Iterator[None]:
    """A case that computes for longer than this, in seconds of the processor, hangs; so does one that lasts longer."""

    def stop(number: int, _: Any) -> None:
        what = f"{computing} s of computing" if number == signal.SIGPROF else f"{waiting} s"
        raise BrokenLawError("hang", f"more than {what}")

    clocks = {signal.SIGPROF: (signal.ITIMER_PROF, computing), signal.SIGALRM: (signal.ITIMER_REAL, waiting)}
    before = {number: signal.signal(number, stop) for number in clocks}
    for clock, seconds in clocks.values():
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        for number, (clock, _) in clocks.items():
            signal.setitimer(clock, 0)
            signal.signal(number, before[number])
