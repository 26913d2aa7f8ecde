"""Data files changed at random: each is read right or refused by our own error, whatever its bytes.

    python -m tests.hostile.data --count 1000 --seed 0

The law: no crash, no other exception, no more than 5 s or 1 GB, no file written, no module imported, no program
started. Every case is a seed of its own, so one that breaks it can be run again with `--count 1 --seed SEED`.
"""

import argparse
import multiprocessing
import os
import pickle
import random
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image

from recoup.cli.data import open_data
from recoup.cli.input_spec import unnormalised
from recoup.errors import RecoupError

SECONDS, MEGABYTES = 5, 1024
FORBIDDEN = ("import", "exec", "compile", "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen")
FORBIDDEN += ("socket.connect", "socket.bind", "ctypes.dlopen", "os.remove", "os.rename", "os.mkdir", "os.chmod")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# Opcodes and names that change what a pickle does, and numbers at which sizes overflow.
PIECES = [b"c", b"R", b"b", b"0", b"2", b"(", b"t", b".", b"\x81", b"\x93", b"i", b"o", b"\x8f", b"q", b"r", b"h", b"j"]
PIECES += [b"cos\nsystem\n", b"cbuiltins\neval\n", b"O8", b"V8", b"f4", b"\xff" * 4, b"\xff" * 8, b"\x00" * 4, b"\x7f"]
PIECES += [b"\x80\x04", b"\x95", b"\x8e\xff\xff\xff\x7f\x00\x00\x00\x00", b"T\xff\xff\xff\x7f", b"numpy", b"ndarray"]
PIECES += [b"IHDR", b"IDAT", b"PLTE", b"zTXt", b"iCCP", b"acTL", b"RIFF", b"VP8X", b"ANIM", b"\xff\xd8", b"\xff\xc0"]


@dataclass(frozen=True)
class Case:
    """A file of a format, changed under a seed."""

    seed: int
    spec: str
    name: str
    content: bytes


@dataclass(frozen=True)
class Outcome:
    """What came of a case: `what` is "read", "refused", or how the law was broken."""

    seed: int
    what: str
    message: str = ""

    @property
    def is_lawful(self) -> bool:
        return self.what in ("read", "refused")


def run(count: int, seed: int) -> list[Outcome]:
    """What came of `count` cases, from the one of `seed` on."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        return list(outcomes_of([make_case(number) for number in range(seed, seed + count)], Path(folder)))


def make_case(seed: int) -> Case:
    """A file that is right, or was before up to eight changes."""
    draw = random.Random(seed)
    form = draw.choice(list(_FORMS))
    content = bytearray(_FORMS[form]())
    for _ in range(draw.choice([0, 1, 1, 1, 2, 4, 8])):
        draw.choice(_CHANGES)(content, draw)
    if form.startswith("cifar"):
        return Case(seed, "cifar10:{folder}", "cifar-10-batches-py/test_batch", bytes(content))
    return Case(seed, "folder:{folder}", f"image.{draw.choice(['png', 'jpg', 'bmp', 'webp'])}", bytes(content))


def _cifar(protocol: int) -> bytes:
    rows = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    content = {b"batch_label": b"one", b"labels": [1, 2, 3, 4], b"data": rows, b"filenames": [b"a.png"] * 4}
    return pickle.dumps(content, protocol=protocol)


def _image(kind: str, mode: str, **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


_FORMS = {
    **{f"cifar {protocol}": lambda protocol=protocol: _cifar(protocol) for protocol in range(6)},
    "png": lambda: _image("PNG", "RGB"),
    "png with a palette": lambda: _image("PNG", "P"),
    "grey png": lambda: _image("PNG", "LA"),
    "jpeg": lambda: _image("JPEG", "RGB"),
    "progressive jpeg": lambda: _image("JPEG", "CMYK", progressive=True),
    "bmp": lambda: _image("BMP", "RGB"),
    "webp": lambda: _image("WEBP", "RGBA"),
    "lossless webp": lambda: _image("WEBP", "RGB", lossless=True),
}


def _place(content: bytearray, draw: random.Random) -> int:
    """Mostly near one of the ends, where headers and instructions are."""
    size = len(content)
    near = min(size, 300)
    return draw.choice([draw.randrange(near + 1), size - draw.randrange(near + 1), draw.randrange(size + 1)])


def _flip(content: bytearray, draw: random.Random) -> None:
    if content:
        content[min(_place(content, draw), len(content) - 1)] ^= 1 << draw.randrange(8)


def _overwrite(content: bytearray, draw: random.Random) -> None:
    place, piece = _place(content, draw), draw.choice([*PIECES, draw.randbytes(draw.randrange(1, 9))])
    content[place : place + len(piece)] = piece


def _insert(content: bytearray, draw: random.Random) -> None:
    place = _place(content, draw)
    content[place:place] = draw.choice([*PIECES, draw.randbytes(draw.randrange(1, 9))]) * draw.choice([1, 1, 1, 50])


def _remove(content: bytearray, draw: random.Random) -> None:
    place = _place(content, draw)
    del content[place : place + draw.choice([1, 2, 4, 40, len(content)])]


def _repeat(content: bytearray, draw: random.Random) -> None:
    place, length = _place(content, draw), draw.randrange(1, 60)
    content[place:place] = bytes(content[place : place + length]) * draw.choice([1, 2, 100])


_CHANGES = (_flip, _flip, _overwrite, _overwrite, _insert, _remove, _repeat)


def _prepare(case: Case, where: Path) -> None:
    path = where / case.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(case.content)


def read_case(case: Case, where: Path) -> Outcome:
    """What `open_data` makes of the file of a case."""
    try:
        shape = (3, 32, 32)
        for batch in open_data(case.spec.format(folder=where), unnormalised(shape)):
            images = batch if isinstance(batch, torch.Tensor) else batch[0]
            if images.shape[1:] != shape or not 0 <= float(images.min()) <= float(images.max()) <= 1:
                return Outcome(case.seed, "wrong", f"images of shape {tuple(images.shape)}")
    except RecoupError as error:
        return Outcome(case.seed, "refused", str(error))
    return Outcome(case.seed, "read")


Reader: TypeAlias = Callable[[Case, Path], Outcome]


def outcomes_of(cases: list[Case], folder: Path, read: Reader = read_case) -> Iterator[Outcome]:
    """Cases are run in a process of their own, and in a new one after each that ends it or fills its memory."""
    context = multiprocessing.get_context("spawn")
    waiting = cases
    while waiting:
        ours, theirs = context.Pipe()
        worker = context.Process(target=_work, args=(theirs, waiting, folder, read), daemon=True)
        worker.start()
        theirs.close()
        found = list(_received(ours, waiting))
        worker.kill()
        worker.join()
        yield from found
        waiting = waiting[len(found) :]


def _received(ours: Connection, cases: list[Case]) -> Iterator[Outcome]:
    if not ours.poll(60) or ours.recv() != "ready":
        raise RuntimeError("the process that reads the files did not start")
    for case in cases:
        if not ours.poll(SECONDS):
            yield Outcome(case.seed, "hang", f"more than {SECONDS} s")
            return
        try:
            outcome = ours.recv()
        except EOFError:
            yield Outcome(case.seed, "crash", "the process that read it died")
            return
        yield outcome
        if outcome.what == "memory":  # the next ones would be measured against this peak
            return


def _work(theirs: Connection, cases: list[Case], folder: Path, read: Reader) -> None:
    """Read every case under the eyes of Python's audit hooks."""
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123  # until the process ends
    seen: list[str] = []
    is_watching = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if is_watching and _is_forbidden(event, arguments):
            seen.append(f"{event} {str(arguments)[:100]}")

    for case in _warm_up():  # what is imported on the way is there afterwards
        _prepare(case, folder / "warm")
        read_case(case, folder / "warm")
    sys.addaudithook(watch)
    theirs.send("ready")
    for case in cases:
        where = folder / str(case.seed)
        _prepare(case, where)
        before, files = _peak(), sorted(folder.rglob("*"))
        is_watching = True
        try:
            outcome = read(case, where)
        except Exception:
            is_watching = False
            outcome = Outcome(case.seed, "raw exception", traceback.format_exc(limit=-3))
        is_watching = False
        if seen:
            outcome = Outcome(case.seed, "side effect", seen[0])
            seen.clear()
        elif sorted(folder.rglob("*")) != files:
            outcome = Outcome(case.seed, "file written")
        elif _peak() - before > MEGABYTES:
            outcome = Outcome(case.seed, "memory", f"{_peak() - before:.0f} MB")
        theirs.send(outcome)


def _warm_up() -> list[Case]:
    broken = Case(0, "folder:{folder}/0", "0/broken.png", b"no image")
    images = [Case(0, "folder:{folder}/1", f"1/{form}.png", make()) for form, make in _FORMS.items()]
    pickles = [Case(0, "cifar10:{folder}", "cifar-10-batches-py/test_batch", _cifar(protocol)) for protocol in range(6)]
    return [broken, *images, *pickles]


def _is_forbidden(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open":
        _, mode, flags = arguments
        return bool(flags & WRITING) or (isinstance(mode, str) and bool(set("wax+") & set(mode)))
    if event == "import":
        return arguments[0] not in sys.modules
    return event in FORBIDDEN


def _peak() -> float:
    """The most memory this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    outcomes = run(given.count, given.seed)
    broken = [outcome for outcome in outcomes if not outcome.is_lawful]
    for outcome in broken:
        print(f"seed {outcome.seed}: {outcome.what}. {outcome.message}")
    read = sum(outcome.what == "read" for outcome in outcomes)
    print(
        f"{len(outcomes)} data files: {read} read, {len(outcomes) - read - len(broken)} refused, {len(broken)} broken"
    )
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
