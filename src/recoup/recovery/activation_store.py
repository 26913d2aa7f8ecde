"""Where the activations of many batches wait for their turn: in memory as far as allowed, then on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from recoup.inputs.batches import tensors_in

# The share of a GPU's free memory that may be waited in, and the bytes of a computer's.
GPU_SHARE = 0.5
CPU_MEMORY = 6 << 30
# The same for activations that are in work at once: a GPU is idle between small operations, a CPU has small caches.
GPU_WORK_SHARE = 0.1
CPU_WORK = 1 << 29


def memory_of(device: torch.device) -> int:
    """How many bytes of activations may wait in the memory of a device."""
    if device.type == "cuda":
        return int(GPU_SHARE * _free(device))
    return CPU_MEMORY


def work_of(device: torch.device) -> int:
    """How many bytes of activations may be in work at once on a device."""
    if device.type == "cuda":
        return int(GPU_WORK_SHARE * _free(device))
    return CPU_WORK


class ActivationStore:
    """Holds one value per place, whatever tensors it consists of; at most `limit` bytes of them in memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._folder = tempfile.TemporaryDirectory(prefix="recoup-")
        self._held: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def put(self, place: int, value: Any) -> None:
        """Leave `value` at `place`."""
        size = size_of(value)
        if sum(self._sizes.values()) + size <= self._limit:
            self._held[place], self._sizes[place] = value, size
            self.peak = max(self.peak, sum(self._sizes.values()))
        else:
            torch.save(value, self._file(place))

    def take(self, place: int) -> Any:
        """The value left at `place`, which is free afterwards."""
        if place in self._held:
            del self._sizes[place]
            return self._held.pop(place)
        value = torch.load(self._file(place), weights_only=False)  # written by us, into a folder of our own
        self._file(place).unlink()
        return value

    def close(self) -> None:
        """Remove what is on disk."""
        self._folder.cleanup()

    def _file(self, place: int) -> Path:
        return Path(self._folder.name) / f"{place}.pt"


def size_of(value: Any) -> int:
    """Bytes of the tensors in `value`, storage that several of them share counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(value)}
    return sum(storages.values())


def _free(device: torch.device) -> int:
    """Bytes of a GPU that nobody uses: what torch holds back for later is free to it as well."""
    held_back = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held_back
