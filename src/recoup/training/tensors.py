"""The tensors of a model: all of them by name, their bytes, and whether they are finite."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

# Of which torch can say whether they are finite.
_CHECKED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)  # fmt: skip


def held(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def plain(tensor: Tensor) -> Tensor:
    """A copy in the memory of the CPU that is dense, in order and nobody else's."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu().resolve_conj().resolve_neg().contiguous().clone()


def digest(facts: str, tensors: Mapping[str, Tensor]) -> str:
    """A hash over a text and plain tensors: names, dtypes, shapes and bytes."""
    found = hashlib.sha256(facts.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return found.hexdigest()


def digest_of(model: nn.Module | None) -> str:
    """A hash over every parameter and buffer; the empty text without a model."""
    return "" if model is None else digest("", {name: plain(value) for name, value in held(model).items()})


def finite_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters and buffers without NaN and infinity, of those that could have them."""
    checked = {
        name: value.detach()
        for name, value in held(model).items()
        if value.dtype in _CHECKED and value.layout is torch.strided
    }
    is_finite = [value.isfinite().all().to("cpu", torch.bool) for value in checked.values()]
    return frozenset(name for name, flag in zip(checked, is_finite, strict=True) if bool(flag))
