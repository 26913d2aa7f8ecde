"""The manifest: what every file of a saved result must be, so that damage is found before anything is built.

It carries a hash of itself. Hashes find damage and mix-ups; whoever changes a file on purpose can write a new manifest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recoup.artefact.files import (
    AGAIN,
    FORMAT,
    GRAPH,
    MANIFEST,
    PAGE,
    PLAN,
    REPORT,
    SAMPLES,
    WEIGHTS,
    digest_of,
    dump_json,
    read_checked,
    read_json,
    size_of,
)
from recoup.artefact.graph_json import DTYPES
from recoup.artefact.schema import (
    MOST,
    Check,
    flag,
    integer,
    listing,
    mapping,
    matching,
    one_of,
    optional,
    real,
    record,
    text,
)
from recoup.errors import ArtefactError
from recoup.version import __version__

# The widest difference that a stored output may be given: more is no rounding.
LOOSEST = 0.05


@dataclass(frozen=True, slots=True)
class Stored:
    """A saved tensor: whether it was all finite, and whether it is a parameter that trains (None: a buffer)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    finite: bool
    trains: bool | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder holds.

    files: size and SHA-256 of each; tensors: what is in the weights file.
    training: the mode of the whole model under the empty name, and of each module that differs from it.
    call: how the stored inputs are passed, and tolerance: how far outputs may be from the stored ones; without stored
    samples, `unchecked` says why there are none.
    """

    cls: str
    torch: str
    files: Mapping[str, tuple[int, str]]
    tensors: Mapping[str, Stored]
    training: Mapping[str, bool]
    call: Any
    tolerance: float
    unchecked: str | None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        ArtefactError: there is none, it is damaged, or of another format.
    """
    path = folder / MANIFEST
    if not path.exists():
        _refuse_other_formats(folder)
    content = read_checked(path, _SCHEMA, "a manifest")
    claimed = content.pop("sha256")
    if claimed != _digest(content):
        raise ArtefactError(f"{path} is damaged: it is not what was saved. {AGAIN}")
    tensors = {
        name: Stored(DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["finite"], entry["trains"])
        for name, entry in content["tensors"].items()
    }
    files = {name: (entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()}
    return Manifest(
        content["class"],
        content["torch"],
        files,
        tensors,
        content["training"],
        content["call"],
        content["tolerance"],
        content["unchecked"],
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it, for files that are all in their place."""
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    content = {
        "format": FORMAT,
        "recoup": __version__,
        "torch": manifest.torch,
        "class": manifest.cls,
        "files": {name: {"bytes": size_of(folder / name), "sha256": digest_of(folder / name)} for name in names},
        "tensors": {name: _stored_to_json(stored) for name, stored in manifest.tensors.items()},
        "training": dict(manifest.training),
        "call": manifest.call,
        "tolerance": manifest.tolerance,
        "unchecked": manifest.unchecked,
    }
    (folder / MANIFEST).write_text(dump_json({**content, "sha256": _digest(content)}, indent=1), encoding="utf-8")


def check_files(folder: Path, manifest: Manifest) -> None:
    """That the folder holds the files of its manifest, whole, and no others.

    Raises:
        ArtefactError: one is missing, damaged or new.
    """
    for name in manifest.files:
        size_of(folder / name)  # says so if it is missing
    for found in sorted(folder.iterdir()):
        if found.name not in manifest.files and found.name != MANIFEST:
            raise ArtefactError(
                f"{found} is none of the files that were saved. Remove it, or pass check=False to `load` if "
                "it belongs there."
            )
    for name, (size, digest) in manifest.files.items():
        if size_of(folder / name) != size or digest_of(folder / name) != digest:
            raise ArtefactError(f"{folder / name} is damaged: it is not the file that was saved. {AGAIN}")


def check_tensors(tensors: Mapping[str, Tensor], manifest: Manifest, path: Path) -> None:
    """That the saved tensors have the names, dtypes and shapes of the manifest, and are finite where they were."""
    wrong = sorted(tensors.keys() ^ manifest.tensors.keys())
    wrong += [n for n, t in tensors.items() if n not in wrong and not _is_as_stored(t, manifest.tensors[n])]
    if wrong:
        raise ArtefactError(
            f"{path} is damaged: {', '.join(wrong[:3])} differ from the manifest, in name, dtype or shape, or are no "
            f"longer finite. {AGAIN}"
        )


def stored(tensor: Tensor) -> Stored:
    """What the manifest says of a tensor."""
    trains = tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
    return Stored(tensor.dtype, tuple(tensor.shape), _is_finite(tensor.detach()), trains)


def _is_as_stored(tensor: Tensor, expected: Stored) -> bool:
    is_alike = tensor.dtype == expected.dtype and tuple(tensor.shape) == expected.shape
    return is_alike and (not expected.finite or _is_finite(tensor))


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return True
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # eight bits know no isfinite
    return bool(wide.isfinite().all())


def _stored_to_json(entry: Stored) -> dict[str, Any]:
    name = str(entry.dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(entry.shape), "finite": entry.finite, "trains": entry.trains}


def _digest(content: Mapping[str, Any]) -> str:
    """Of the content in one spelling: sorted, without spaces."""
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(plain.encode()).hexdigest()


def _refuse_other_formats(folder: Path) -> None:
    """Folders of earlier versions have a plan and no manifest."""
    plan = read_json(folder / PLAN)
    found = plan.get("format") if isinstance(plan, dict) else None
    if type(found) is int and found != FORMAT:
        raise ArtefactError(
            f"{folder / PLAN} has format {found}, this version reads {FORMAT}. Install the version of recoup that "
            f"wrote it ({str(plan.get('recoup'))[:40]})."
        )


def _bounded_shape(value: Any, where: str) -> list[int]:
    shape: list[int] = listing(integer(0), 64)(value, where)
    integer(0)(math.prod(shape), where)
    return shape


_SHA = matching("[0-9a-f]{64}", "a SHA-256 in hexadecimal digits")
_ANYTHING: Check = lambda value, _: value  # noqa: E731  # `samples.py` looks at it
_SCHEMA = record(
    format=integer(FORMAT, FORMAT),
    recoup=text(100),
    torch=text(100),
    **{"class": text()},
    files=mapping(one_of(PLAN, GRAPH, WEIGHTS, SAMPLES, REPORT, PAGE), record(bytes=integer(0, MOST), sha256=_SHA)),
    tensors=mapping(
        text(),
        record(dtype=one_of(*DTYPES), shape=_bounded_shape, finite=flag, trains=optional(flag)),
    ),
    training=mapping(text(), flag),
    call=_ANYTHING,
    tolerance=real(0.0, LOOSEST),
    unchecked=optional(text()),
    sha256=_SHA,
)
