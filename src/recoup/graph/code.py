"""Where an operation stands in the user's code."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import fx

from recoup.graph.capture import module_path
from recoup.operators.names import operation_name

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)


def code_line(node: fx.Node) -> str:
    """File and line, as `net.py:12`, of the innermost call that is not torch's own; empty where there is none."""
    return last_line(node.meta.get("stack_trace") or "")


def site_of(node: fx.Node) -> str:
    """For messages: the operation and the module it happens in."""
    return f"{operation_name(node.target)} in {module_path(node) or 'forward'}"


def last_line(trace: str) -> str:
    """The same of the text of a stack trace."""
    frames = [(file, line) for file, line in _FRAME.findall(trace) if not file.startswith((_TORCH, "<"))]
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""
