"""Trained weights from a file into a freshly built model: safetensors, or a PyTorch checkpoint of tensors only.

Nothing in a file is ever executed: pickled objects other than tensors and plain containers are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import safetensors.torch
import torch
from torch import Tensor, nn

from recoup.errors import ModelError

WRAPPERS = ("state_dict", "model")
"""Keys under which training scripts keep the state dict among other things."""

PARALLEL_PREFIX = "module."
"""What `nn.DataParallel` puts in front of every key."""

NAMES_SHOWN = 3


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Fill a freshly built `model` with the weights in `path`, cast to the model's own types.

    `.safetensors` files are read as such, anything else with `torch.load(weights_only=True)`. A state dict nested under
    `state_dict` or `model` is found, and the prefix of `nn.DataParallel` removed. This changes `model`: it is meant
    for the one that was just built. On an error nothing has been changed.

    Raises:
        ModelError: the file is missing, damaged, holds other things than tensors, or does not fit the model.
    """
    path = Path(path)
    expected = model.state_dict()
    state = _without_prefix(_state_dict(_read(path), path), expected)
    misfits = _misfits(state, expected)
    if misfits:
        raise ModelError(
            f"The weights in '{path}' do not fit this model: {'; '.join(misfits)}. "
            "Check that the file belongs to this architecture and number of classes."
        )
    # Not strict: older checkpoints have no batch counters, and everything else has just been compared.
    model.load_state_dict(state, strict=False)


def _read(path: Path) -> object:
    if not path.is_file():
        raise ModelError(f"There is no weights file at '{path}'. Check the path, or leave weights out for fresh ones.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        return cast(object, torch.load(path, weights_only=True, map_location="cpu"))
    except Exception as error:  # a damaged archive fails in as many ways as it has parts
        raise ModelError(
            f"The weights in '{path}' could not be read: the file is damaged, or it holds Python objects beside "
            "tensors, which are refused because loading them could run code. "
            "Fetch it again, or save model.state_dict() to a .safetensors file."
        ) from error


def _state_dict(content: object, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        nested = (content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping))
        content = next(nested, content)
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise ModelError(
            f"'{path}' does not hold a state dict of tensors, neither directly nor under "
            f"{' or '.join(repr(key) for key in WRAPPERS)}. Save model.state_dict() and use that file."
        )
    return dict(content)


def _without_prefix(state: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not _all_prefixed(state) or _all_prefixed(expected):
        return state
    return {key.removeprefix(PARALLEL_PREFIX): value for key, value in state.items()}


def _all_prefixed(keys: Mapping[str, Tensor]) -> bool:
    return all(key.startswith(PARALLEL_PREFIX) for key in keys)


def _misfits(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    missing = [key for key in expected if key not in state and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in expected]
    mismatched = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(value.shape)}"
        for key, value in expected.items()
        if key in state and state[key].shape != value.shape
    ]
    found = {"missing": missing, "unexpected": unexpected, "of another shape": mismatched}
    return [f"{len(names)} {kind} ({_some(names)})" for kind, names in found.items() if names]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
