"""Where the activations of many batches wait for their turn: in memory as far as allowed, then on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from recoup.inputs.batches import tensors_in
from recoup.inputs.resources import free_on
from recoup.recovery.spool import Extent, Spool

# The share of the free memory that activations may wait in, and the most of it elsewhere than on a GPU.
GPU_SHARE, CPU_SHARE = 0.5, 0.25
CPU_MOST = 6 << 30
# The most that stays in memory on a CPU though it could be had again: what waits in a file is in the system's cache
# while there is room, and what is computed again costs a twentieth of the time.
CPU_RESIDENT = 1 << 30
# The same for activations that are in work at once: a GPU is idle between small operations, a CPU has small caches.
GPU_WORK_SHARE, CPU_WORK_SHARE = 0.1, 0.05
CPU_MOST_WORK = 1 << 29


def memory_of(device: torch.device) -> int:
    """How many bytes of activations may be held in the memory of a device."""
    if device.type == "cuda":
        return int(GPU_SHARE * free_on(device))
    return min(CPU_MOST, int(CPU_SHARE * free_on(device)))


def resident_of(device: torch.device) -> int:
    """How many of these bytes stay in memory though they could be had again, from a file or by computing them."""
    return memory_of(device) if device.type == "cuda" else min(CPU_RESIDENT, memory_of(device))


def work_of(device: torch.device) -> int:
    """How many bytes of activations may be in work at once on a device."""
    if device.type == "cuda":
        return int(GPU_WORK_SHARE * free_on(device))
    return min(CPU_MOST_WORK, int(CPU_WORK_SHARE * free_on(device)))


class ActivationStore:
    """Holds one value per place, whatever tensors it consists of; at most `limit` bytes of them in memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spool = Spool()
        self._held: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._written: dict[int, _Written] = {}
        self.peak = 0

    def put(self, place: int, value: Any) -> None:
        """Leave `value` at `place`."""
        size = size_of(value)
        if sum(self._sizes.values()) + size <= self._limit:
            self._held[place], self._sizes[place] = value, size
            self.peak = max(self.peak, sum(self._sizes.values()))
        else:
            self._written[place] = _write(value, self._spool)

    def take(self, place: int) -> Any:
        """The value left at `place`, which is free afterwards."""
        if place in self._held:
            del self._sizes[place]
            return self._held.pop(place)
        return _read(self._written.pop(place), self._spool)

    def require(self, size: int) -> None:
        """Refuse to begin with values of `size` bytes in all, if memory and disk together have not as many."""
        self._spool.require(max(0, size - self._limit))

    def close(self) -> None:
        """Remove what is on disk."""
        self._spool.close()


def size_of(value: Any) -> int:
    """Bytes of the tensors in `value`, storage that several of them share counted once."""
    storages = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors_in(value) if _is_dense(tensor)}
    return sum(storages.values())


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor as a view of the storage at a place in a list."""

    storage: int
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """A value whose storages are on disk: tensors are views of them, all else is here."""

    leaves: Sequence[Any]
    tree: TreeSpec
    sizes: Sequence[int]
    extent: Extent


def _write(value: Any, spool: Spool) -> _Written:
    """Storages are written as a whole, each once: what shared memory before does so again."""
    leaves, tree = tree_flatten(value)
    leaves = [leaf.detach().resolve_conj().resolve_neg() if _is_dense(leaf) else leaf for leaf in leaves]
    storages = {_key(leaf): leaf.untyped_storage() for leaf in leaves if _is_dense(leaf)}
    numbers = {key: number for number, key in enumerate(storages)}
    views = [_view(leaf, numbers[_key(leaf)]) if _is_dense(leaf) else leaf for leaf in leaves]
    parts = [_bytes(storage.cpu()) for storage in storages.values()]
    return _Written(views, tree, [part.nbytes for part in parts], spool.write(parts))


def _key(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _view(tensor: Tensor, storage: int) -> _View:
    return _View(storage, tensor.dtype, tensor.device, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _read(written: _Written, spool: Spool) -> Any:
    storages = [torch.UntypedStorage(size) for size in written.sizes]
    spool.read_into(written.extent, [_bytes(storage) for storage in storages])
    devices = {leaf.storage: leaf.device for leaf in written.leaves if isinstance(leaf, _View)}
    moved = [_on(storage, devices[number]) for number, storage in enumerate(storages)]
    leaves = [_viewed(leaf, moved[leaf.storage]) if isinstance(leaf, _View) else leaf for leaf in written.leaves]
    return tree_unflatten(leaves, written.tree)


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _bytes(storage: torch.UntypedStorage) -> memoryview:
    """A storage's memory, to be read from and written into."""
    flat = torch.empty(0, dtype=torch.uint8)
    flat.set_(storage, 0, (storage.nbytes(),), (1,))
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # an array is a buffer


def _on(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    return storage if device.type == "cpu" else storage.to(device=device)


def _viewed(view: _View, storage: torch.UntypedStorage) -> Tensor:
    tensor = torch.empty(0, dtype=view.dtype, device=view.device)
    return tensor.set_(storage, view.offset, view.size, view.stride)
