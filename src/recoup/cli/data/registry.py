"""Data by name: `cifar10:DIR@train`, `folder:DIR`, `text:PATH`, `noise:1024`, or the user's own factory of batches."""

from __future__ import annotations

import difflib
from pathlib import Path

from recoup.cli.data.batches import Data, Source, draw
from recoup.cli.data.cifar import open_cifar
from recoup.cli.data.digits import open_digits
from recoup.cli.data.folder import open_folder
from recoup.cli.data.imagenet import open_imagenet
from recoup.cli.data.imported import open_imported
from recoup.cli.data.noise import open_noise
from recoup.cli.data.spec import DataSpec, parse_spec
from recoup.cli.data.text import open_text
from recoup.cli.data.voc import open_voc
from recoup.cli.input_spec import InputSpec
from recoup.errors import UsageError

KINDS = ("cifar10", "cifar100", "imagenet", "voc", "folder", "text", "digits", "noise")
"""The kinds of data known by name."""


def open_data(spec: str, input: InputSpec, *, batch_size: int = 250, limit: int | None = None, seed: int = 0) -> Data:
    """The batches that `spec` names, ready for a model with this `input`.

    Args:
        spec: `cifar10:DIR`, `cifar100:DIR` (with `@train`, `@test`, `@calibration` or `@validation`; test if not said),
            `imagenet:DIR` (the same splits), `voc:DIR` (with `@train`, `@val` or `@trainval`, the default),
            `folder:DIR`, `text:PATH` (with `?tokenizer=FOLDER&block=N`; bytes if not said), `digits` (with `@train`,
            `@validation` or `@test`; all if not said), `noise`, `noise:N`,
            `package.module:factory` or `path/file.py:factory`.
        input: the shape and normalisation of the model; batches of a factory are passed on untouched.
        batch_size: images per batch; a factory decides its own.
        limit: at most this many images, drawn at random; of a factory's, the first.
        seed: decides which images a limit draws, and what noise looks like.

    >>> from recoup.cli.input_spec import CIFAR
    >>> data = open_data("noise:100", CIFAR, batch_size=40)
    >>> [len(batch) for batch in data]
    [40, 40, 20]

    Raises:
        UsageError: no such data or split, or numbers that make no sense.
        DataError: files are missing, incomplete or damaged, or do not suit the input.
    """
    _check_numbers(batch_size=batch_size, limit=limit, seed=seed)
    parsed = parse_spec(spec)
    if parsed.kind in KINDS:
        return draw(_open_source(parsed, input, seed), batch_size=batch_size, limit=limit, seed=seed)
    if ":" in spec:
        return open_imported(spec, limit)
    raise _unknown(spec)


def _check_numbers(*, batch_size: int, limit: int | None, seed: int) -> None:
    if batch_size < 1:
        raise UsageError(f"A batch size of {batch_size} holds no images. Give at least 1.")
    if limit is not None and limit < 1:
        raise UsageError(f"A limit of {limit} images leaves none. Give at least 1, or no limit for all of them.")
    if seed < 0:
        raise UsageError(f"The seed {seed} is negative. Give 0 or more.")


def _open_source(spec: DataSpec, input: InputSpec, seed: int) -> Source:
    match spec.kind:
        case "cifar10" | "cifar100":
            return open_cifar(spec, input)
        case "imagenet":
            return open_imagenet(spec, input)
        case "voc":
            return open_voc(spec, input)
        case "folder":
            return open_folder(spec, input)
        case "text":
            return open_text(spec)
        case "digits":
            return open_digits(spec, input)
        case _:
            return open_noise(spec, input, seed)


def _unknown(spec: str) -> UsageError:
    close = difflib.get_close_matches(spec, KINDS, n=1)
    if Path(spec).is_dir():
        hint = f"For the images in that folder write folder:{spec}. "
    else:
        hint = f"Did you mean '{close[0]}'? " if close else ""
    return UsageError(
        f"There is no data called '{spec}'. {hint}Data is named cifar10:DIR, cifar100:DIR, imagenet:DIR, voc:DIR, "
        "folder:DIR, text:PATH, digits, noise, package.module:factory or path/file.py:factory."
    )
