"""Opening a saved result: with the original it was made from, or alone where it is a graph of its own."""

from __future__ import annotations

import dataclasses
import re
import shlex

import torch

from recoup.artefact.reading import is_standalone, load, read_source, sample_shape
from recoup.cli.input_spec import IMAGENET
from recoup.cli.models import OpenModel
from recoup.cli.network import Network, choose_input, find_device, parse_shape
from recoup.errors import UsageError
from recoup.inputs.batches import device_of

# Names in these libraries, which build their models without running anything of a folder's.
_OF_A_LIBRARY = re.compile(r"(recoup|torchvision|timm):[A-Za-z0-9_.\-]+", re.ASCII)


def open_saved(folder: str, spec: str | None, given: Network) -> OpenModel:
    """The smaller network in eval mode; `spec` names its original where the folder does not say."""
    spec = spec or trusted_source(folder)
    if spec is None:
        return _open_graph(folder, given)
    opened = dataclasses.replace(given, spec=spec).open()
    smaller = load(folder, opened.model).to(device_of(opened.model))
    return dataclasses.replace(opened, model=smaller.eval())


def trusted_source(folder: str) -> str | None:
    """The original that a folder names, if building it runs no code but that of the libraries; None if none is needed.

    A folder may come from a stranger, and to build `path/file.py:factory` is to run whatever that file holds.
    """
    source = read_source(folder)
    if source is not None and _OF_A_LIBRARY.fullmatch(source):
        return source
    if is_standalone(folder):
        return None
    if source is None:
        raise UsageError(f"{folder} does not say which model it was made from. Name it with --model.")
    raise UsageError(
        f"{folder} says that it was made from {source!r}, which is code of somebody's own and is not imported unasked. "
        f"If you trust it, pass --model {shlex.quote(source)}."
    )


def _open_graph(folder: str, given: Network) -> OpenModel:
    """A standalone result by itself: its input has the shape of the samples stored with it, unless one was given."""
    device, shape = find_device(given.device), parse_shape(given.shape) or sample_shape(folder)
    torch.manual_seed(given.seed)
    model = load(folder).to(device).eval()
    return OpenModel(model, choose_input(IMAGENET, shape, given.normalise), folder)
