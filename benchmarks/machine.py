"""What a benchmark ran on, and how long its stages took."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import TypeVar

import torch

import recoup

Made = TypeVar("Made")


def timed(seconds: dict[str, float], stage: str, work: Callable[[], Made]) -> Made:
    """What `work` returns; the seconds that it took, on the GPU too, are put down under `stage`."""
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[stage] = time.perf_counter() - start
    return result


def device_name(device: str) -> str:
    """The name of the GPU, or CPU."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def versions() -> dict[str, str]:
    """The versions that decide what comes out."""
    return {"recoup": recoup.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
