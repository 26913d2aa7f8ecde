"""A temporary file without a name: it is gone with the process, however that ends."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from recoup.errors import ResourceError
from recoup.inputs.resources import free_disk, readable

# Bytes of disk that are left to others.
RESERVE = 1 << 29
ADVICE = "Give fewer calibration images, set TMPDIR to a folder on a larger disk, or use method='paper'."


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of the file."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.start + self.length


class Spool:
    """Bytes on disk; what was read is overwritten, so the file grows only as far as it has to.

    Raises:
        ResourceError: the disk has no room for what is written, seen before it is, or while it is.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._gaps: list[Extent] = []
        self._end = 0

    def write(self, parts: Sequence[memoryview]) -> Extent:
        """Where the parts are, one behind the other."""
        extent = self._reserved(sum(part.nbytes for part in parts))
        try:
            self._opened().seek(extent.start)
            for part in parts:
                _write_all(self._opened(), part)
        except OSError as error:
            self.free(extent)
            raise ResourceError(
                f"activations of {readable(extent.length)} could not be written to {tempfile.gettempdir()} "
                f"({error.strerror or error}). {ADVICE}"
            ) from error
        return extent

    def read_into(self, extent: Extent, parts: Sequence[memoryview]) -> None:
        """Fill the parts with what was written there, and free the place."""
        file = self._opened()
        file.seek(extent.start)
        for part in parts:
            _read_all(file, part)
        self.free(extent)

    def free(self, extent: Extent) -> None:
        """Let the place be written again; what is free at the end of the file is given back to the disk."""
        self._gaps = _merged([*self._gaps, extent])
        if self._gaps[-1].end == self._end:
            self._end = self._gaps.pop().start
            if self._file is not None:
                self._file.truncate(self._end)

    def require(self, needed: int) -> None:
        """Refuse to begin what would need so many bytes, if there are not as many."""
        free = max(0, self._free_disk() - RESERVE) + self._end
        if needed > free:
            raise ResourceError(
                f"activations need {readable(needed)} in {tempfile.gettempdir()}, and {readable(free)} are free there. "
                f"{ADVICE}"
            )

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._gaps, self._end = None, [], 0

    def _reserved(self, length: int) -> Extent:
        """The first gap that is long enough, or a place at the end."""
        for gap in self._gaps:
            if gap.length >= length:
                self._gaps.remove(gap)
                if gap.length > length:
                    self._gaps = _merged([*self._gaps, Extent(gap.start + length, gap.length - length)])
                return Extent(gap.start, length)
        self.require(self._end + length)
        self._end += length
        return Extent(self._end - length, length)

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="recoup-", buffering=0)  # noqa: SIM115  # until `close`
        return self._file

    def _free_disk(self) -> int:
        try:
            return free_disk(tempfile.gettempdir())
        except OSError as error:
            raise ResourceError(
                f"no folder for temporary files ({error.strerror or error}). Set TMPDIR to one you may write to."
            ) from error


def _merged(extents: list[Extent]) -> list[Extent]:
    """In order, neighbours put together; empty ones left out."""
    found: list[Extent] = []
    for extent in sorted((extent for extent in extents if extent.length), key=lambda extent: extent.start):
        if found and found[-1].end == extent.start:
            found[-1] = Extent(found[-1].start, found[-1].length + extent.length)
        else:
            found.append(extent)
    return found


def _write_all(file: IO[bytes], part: memoryview) -> None:
    while part.nbytes:
        part = part[file.write(part) :]


def _read_all(file: IO[bytes], part: memoryview) -> None:
    while part.nbytes:
        count = file.readinto(part)  # type: ignore[attr-defined]  # a raw file
        if not count:
            raise ResourceError("the temporary file is shorter than what was written to it. Run it again.")
        part = part[count:]
