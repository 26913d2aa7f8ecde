"""Stand-ins for torchvision's compiled operators, where it is installed without any that load.

Such a torchvision cannot be imported at all, because it describes the operators it expects to find; its classification
models use none of them. Declaring them is enough, and calling one still fails.
"""

import contextlib
import importlib.util
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []  # a Library takes its operators back when it is collected


def define_missing_torchvision_operators() -> None:
    """Declare `nms` and `qnms` unless torchvision brings its own; calling this again does nothing."""
    if _declared or _has_compiled_operators():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}{_SCHEMA}")
    _declared.append(library)


def _has_compiled_operators() -> bool:
    found = importlib.util.find_spec("torchvision")
    places = (found.submodule_search_locations or []) if found else []
    for file in (file for place in places for file in Path(place).glob("_C*")):
        with contextlib.suppress(OSError):  # built for another torch, such as one with CUDA
            torch.ops.load_library(file)
    return hasattr(torch.ops.torchvision, "nms")
