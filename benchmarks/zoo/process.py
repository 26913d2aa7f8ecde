"""The process that makes a row: what it may hold, what it held, and where it runs."""

from __future__ import annotations

import os
import resource

import torch

from benchmarks.machine import device_name

KIB_PER_MIB, BYTES_PER_MIB, BYTES_PER_GIB = 2**10, 2**20, 2**30


def limit_memory(gibibytes: float) -> None:
    """More than this raises instead of taking the machine down; 0 for no limit."""
    if gibibytes:
        size = int(gibibytes * BYTES_PER_GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def peak_memory(device: str) -> int:
    """The most that this process had in memory at once so far, in MiB; on a GPU, in the memory of that."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() // BYTES_PER_MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // KIB_PER_MIB


def machine(device: str) -> str:
    """What it runs on, in words."""
    cores = f"{torch.get_num_threads()} of {os.cpu_count()} cores of a {device_name('cpu')}"
    where = f"{device_name(device)} and {cores}" if device.startswith("cuda") else cores
    return f"{where}, torch {torch.__version__}"
