"""Files of unknown origin: opened only if they are plain files of a size that can be meant."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from recoup.errors import DataError


def open_regular(path: Path, most: int) -> BinaryIO:
    """The file, open for reading; the caller closes it.

    What is looked at is what was opened, so it cannot be swapped in between. A pipe is opened without waiting for
    somebody to write into it.

    Raises:
        DataError: it is missing, not allowed, no regular file, or larger than `most` bytes.
    """
    try:
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115  # a Path takes no opener
    except OSError as error:
        raise DataError(f"'{path}' cannot be opened ({error.strerror or error}). Check that it can be read.") from error
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and found.st_size <= most:
        return file
    file.close()
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"'{path}' is no regular file, but a pipe, a device or a folder. Take it out of the data.")
    raise DataError(
        f"'{path}' has {found.st_size:,} bytes, more than the {most:,} that such a file can have. Check where it "
        "comes from."
    )


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
