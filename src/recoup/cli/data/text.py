"""Text in files, as blocks of tokens: `text:PATH`, `text:PATH?tokenizer=FOLDER&block=256`.

The files of a folder are read in the order of their names, those in folders below it too. Their tokens are put one
behind the other and cut into blocks of equal length, so that there is no padding; what does not fill the last is left
out. Bytes are tokens that need no other library; a tokeniser is one that was saved before, and is never downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import torch
from torch import Tensor

from recoup.cli.data.files import open_regular
from recoup.cli.data.spec import DataSpec
from recoup.cli.importing import import_library
from recoup.errors import DataError, UsageError

SUFFIXES = frozenset({".txt", ".md", ".rst", ".text"})
"""File names that count as text, in lower case."""
BYTES = "bytes"
BLOCK = 128
"""Tokens in a block where nothing is said."""
# Larger text is no calibration set: a few thousand blocks are enough.
MOST_BYTES = 1 << 28

Encode: TypeAlias = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of tokens (count, length) of one text."""

    name: str
    tokens: Tensor

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.tokens)

    @property
    def labels(self) -> None:
        """Text is its own label."""
        return

    def images(self, rows: Tensor) -> Tensor:
        """The blocks of the given rows."""
        return self.tokens[rows]


def open_text(spec: DataSpec) -> Blocks:
    """The blocks of tokens of a file, or of all text files in a folder.

    Raises:
        UsageError: an option is unknown, or makes no sense.
        DataError: there is no text, or too little for a block; the tokeniser is missing.
    """
    place, _, said = spec.place.partition("?")
    options = _options(spec, said)
    root = Path(place)
    files = _text_files(root) if root.is_dir() else [root]
    encode = _tokenizer(options["tokenizer"])
    ids = torch.tensor([token for file in files for token in encode(_read(file))], dtype=torch.int64)
    block = int(options["block"])
    if len(ids) < block:
        raise DataError(
            f"'{place}' has {len(ids):,} tokens, fewer than a block of {block}. Give more text, or a smaller block."
        )
    whole = len(ids) // block * block
    return Blocks(f"text:{root.resolve().name}", ids[:whole].view(-1, block))


def _options(spec: DataSpec, said: str) -> dict[str, str]:
    given = dict(parse_qsl(said, keep_blank_values=True))
    known = {"tokenizer": BYTES, "block": str(BLOCK)}
    if not spec.place.partition("?")[0] or given.keys() - known.keys():
        raise UsageError(
            f"'{spec.text}': write text:PATH, or text:PATH?tokenizer=FOLDER&block=N with either of the two."
        )
    options = known | given
    if not options["block"].isdecimal() or not 2 <= int(options["block"][:9]) == int(options["block"]):
        raise UsageError(f"'{spec.text}': a block of '{options['block'][:20]}' tokens is none. Give 2 or more.")
    return options


def _text_files(root: Path) -> list[Path]:
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise DataError(
            f"There is no text in '{root}': nothing in it or below ends in {', '.join(sorted(SUFFIXES))}. Check the "
            "path after 'text:'."
        )
    return files


def _read(path: Path) -> str:
    with open_regular(path, MOST_BYTES) as file:
        return file.read().decode(errors="replace")


def _tokenizer(place: str) -> Encode:
    """What turns text into tokens: bytes, or the tokeniser saved in a folder or a file."""
    if place == BYTES:
        return str.encode
    root = Path(place)
    file = root / "tokenizer.json" if root.is_dir() else root
    if file.exists():
        library = import_library("tokenizers", "tokenizers", DataError)
        return _loaded(place, lambda: library.Tokenizer.from_file(str(file)), lambda text, made: made.encode(text).ids)
    if not root.is_dir():
        raise DataError(f"There is no tokeniser '{place}'. Give the folder of one, or tokenizer={BYTES}.")
    library = import_library("transformers", "transformers", DataError)
    return _loaded(
        place,
        lambda: library.AutoTokenizer.from_pretrained(str(root), local_files_only=True),
        lambda text, made: made(text)["input_ids"],
    )


def _loaded(place: str, load: Callable[[], Any], encode: Callable[[str, Any], Sequence[int]]) -> Encode:
    try:
        made = load()
    except Exception as error:  # of whatever kind the library has
        raise DataError(
            f"the tokeniser in '{place}' cannot be read ({type(error).__name__}: {str(error)[:200]}). Give a folder "
            f"with tokenizer.json, or tokenizer={BYTES}."
        ) from error
    return lambda text: encode(text, made)
