"""The files of a saved result, and how they are read: regular ones within the folder, of a bounded size, strictly.

The folder may come from a stranger. A named pipe would hang a plain `open`, a link may lead anywhere, a sparse file
looks like a terabyte, and Python's own reader of JSON takes NaN, keys that stand twice and integers of any length.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from recoup.artefact.schema import Check, MisfitError
from recoup.errors import ArtefactError

FORMAT = 5
MANIFEST, PLAN, GRAPH = "manifest.json", "plan.json", "graph.json"
WEIGHTS, SAMPLES = "model.safetensors", "samples.safetensors"
REPORT, PAGE = "report.json", "report.html"

# A plan of a network with ten million channels has some 60 MB; what json makes of a file takes twenty times its size.
JSON_BYTES = 32 << 20
# How deep lists and objects may be nested: a graph's arguments have four levels, trees of outputs hardly more.
DEPTH = 40
# The longest integer of 64 bits has nineteen digits and a sign.
_DIGITS = 20

AGAIN = "Copy the folder again or save the result again."


def open_regular(path: Path) -> int:
    """A descriptor of a regular file that lies in its folder.

    Raises:
        ArtefactError: it is missing, no regular file, or a link that leads out of the folder.
    """
    folder = path.parent
    try:
        if path.is_symlink() and folder.resolve() not in path.resolve().parents:
            raise ArtefactError(f"{path} is a link that leads out of the folder. Copy the files themselves into it.")
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError as error:
        hint = f"{folder} is not a folder that recoup saved" if path.name in (PLAN, MANIFEST) else "copy all of it"
        raise ArtefactError(f"{path} is missing: {hint}.") from error
    except (OSError, RuntimeError) as error:  # links in a circle
        raise ArtefactError(f"{path} cannot be read ({error}). {AGAIN}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ArtefactError(f"{path} is no regular file. {AGAIN}")
    return descriptor


def read_bytes(path: Path, most: int) -> bytes:
    """A file that is no larger than `most`."""
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > most:
            raise ArtefactError(f"{path} is larger than {most >> 20} MB, which no such file of ours is. {AGAIN}")
        try:
            return file.read(most)
        except OSError as error:
            raise ArtefactError(f"{path} cannot be read ({error}). {AGAIN}") from error


def size_of(path: Path) -> int:
    """Size of a regular file."""
    descriptor = open_regular(path)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def digest_of(path: Path) -> str:
    """SHA-256 of a regular file."""
    found = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            while part := file.read(1 << 20):
                found.update(part)
        except OSError as error:
            raise ArtefactError(f"{path} cannot be read ({error}). {AGAIN}") from error
    return found.hexdigest()


def read_json(path: Path) -> Any:
    """What a JSON file holds, strictly: finite numbers, integers of 64 bits, no key twice, a bounded depth."""
    data = read_bytes(path, JSON_BYTES)
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_without_repeats,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_no_constant,
        )
        _check_depth(value)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ArtefactError(f"{path} is damaged ({_brief(error)}). {AGAIN}") from error
    return value


def read_checked(path: Path, schema: Check, what: str) -> Any:
    """A JSON file under a schema; its format is looked at first."""
    value = read_json(path)
    found = value.get("format") if isinstance(value, dict) else None
    if type(found) is int and found != FORMAT:
        raise ArtefactError(
            f"{path} has format {found}, this version reads {FORMAT}. Install the version of recoup that wrote it "
            f"({str(value.get('recoup'))[:40]})."
        )
    try:
        return schema(value, "")
    except MisfitError as error:
        raise not_a(path, what, error) from error


def not_a(path: Path, what: str, error: Exception) -> ArtefactError:
    """The error for a file whose content makes no sense."""
    return ArtefactError(f"{path} is not {what}: {_brief(error)}. {AGAIN}")


def dump_json(value: Any, indent: int | None = None) -> str:
    """JSON that `read_json` takes: what is not finite raises."""
    return json.dumps(value, allow_nan=False, indent=indent)


def flush(path: Path) -> None:
    """Have the disk hold a file or folder now, so that no later failure takes a part of it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(path: Path) -> None:
    """The same for a folder's list of names; some file systems have no such thing."""
    with contextlib.suppress(PermissionError, NotImplementedError):
        flush(path)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= _DIGITS else 1 << 64
    if not -(2**63) <= value < 2**63:
        raise ValueError("an integer has more than 64 bits")
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number is too large")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _check_depth(value: Any) -> None:
    """Level by level, as a recursion would itself be at the mercy of the depth."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEPTH:
            raise ValueError(f"it is nested more than {DEPTH} levels deep")
        containers = [part for part in level if isinstance(part, (dict, list))]
        level = [part for parts in containers for part in (parts.values() if isinstance(parts, dict) else parts)]


def _brief(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
