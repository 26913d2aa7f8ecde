"""What is free: memory, a GPU's memory, disk. It is asked for anew every time, as others use it too."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

# Where nobody says how much memory is free.
UNKNOWN = 2 << 30
PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# What the two versions of control groups call their limit, their use, and the part of it that can be had back.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most `bytes` that tensors took at a time on a GPU; not `is_exact` where others took as much before."""

    bytes: int
    is_exact: bool

    def __str__(self) -> str:
        return readable(self.bytes) if self.is_exact else f"at most {readable(self.bytes)}, as much as taken before"


class MemoryWatch:
    """Tells the peak of GPU memory since it was made, and leaves torch's counters, which are the caller's, alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._highest()

    def peak(self) -> PeakMemory | None:
        """The peak; None on another device, and where somebody has set torch's counter back meanwhile.

        Torch counts from the start of the process, so it may be an earlier one.
        """
        highest = self._highest()
        if highest is None or self._before is None or highest < self._before:
            return None
        return PeakMemory(highest, highest > self._before)

    def _highest(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None


def free_on(device: torch.device) -> int:
    """Bytes of memory where tensors of a device live that nobody uses."""
    if device.type != "cuda":
        return free_memory()
    # What torch holds back for later is free to it as well.
    held_back = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held_back


def free_memory() -> int:
    """Bytes of memory that this process may still have: what the machine has free, or less in a container."""
    return min([_free_in_machine(), *_left_in_groups()])


def free_disk(folder: str | os.PathLike[str]) -> int:
    """Bytes that may still be written to the disk that a folder is on."""
    return shutil.disk_usage(folder).free


def readable(count: int) -> str:
    """A number of bytes for messages.

    >>> readable(3 << 30), readable(5 << 20)
    ('3.2 GB', '5.2 MB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _free_in_machine() -> int:
    try:
        lines = (PROC / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):  # not Linux
        return _free_by_pages()


def _free_by_pages() -> int:
    try:
        size = os.sysconf("SC_PAGE_SIZE")
        if "SC_AVPHYS_PAGES" in os.sysconf_names:
            return size * os.sysconf("SC_AVPHYS_PAGES")
        return size * os.sysconf("SC_PHYS_PAGES") // 4  # macOS says how many there are, and not how many are free
    except (AttributeError, ValueError, OSError):  # Windows
        return UNKNOWN


def _left_in_groups() -> Iterator[int]:
    """What the control groups of this process leave, each of which may have a limit."""
    found = (_left_in(folder, *names) for folder in _groups() for names in _GROUP_FILES)
    yield from (left for left in found if left is not None)


def _left_in(folder: Path, limit: str, used: str, reclaimable: str) -> int | None:
    try:
        most, current = int((folder / limit).read_text()), int((folder / used).read_text())
        cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, most - current + int(cached.get(reclaimable, 0)))
    except (OSError, ValueError):  # "max", or another version
        return None


def _groups() -> Iterator[Path]:
    """Folders of the groups that this process is in, innermost first, and of those around them."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            inner = Path(path.lstrip("/"))
            yield from (GROUPS / controllers / part for part in (inner, *inner.parents))
