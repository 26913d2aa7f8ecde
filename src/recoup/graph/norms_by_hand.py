"""RMSNorms whose formula is written out in a model's code, as in most language models; torch's own does the same.

    x * rsqrt(mean(x²) + eps) * gain           gain: the weight, or 1 + the weight

Operations of such code are no norm to whoever reads the graph. A module is known by what it computes: on rows whose
size is far above eps, about eps and below it, nothing else gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from recoup.graph.copies import duplicate

# Root mean squares of the rows that a module is tried on, relative to the square root of its eps; and as they are.
_SIZES = (1e-1, 1.0, 10.0)
_PLAIN = (1.0, 100.0)
# Code that casts to float32 is no closer to the formula; another eps, or a mean taken off, is much further away.
_CLOSE = 1e-5
_LARGEST_EPS = 1e-2


def norms_by_hand(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that compute what an RMSNorm over their channels does, and are none of torch's."""
    return tuple(name for name, module in model.named_modules() if name and own_norm(module) is not None)


def with_own_norms(twin: nn.Module, names: Iterable[str]) -> nn.Module:
    """`twin`, a copy of ours, with torch's RMSNorm in the place of these modules; the weights that are kept are theirs.

    Raises:
        LookupError: one of them is no such module.
    """
    for name in names:
        module = twin.get_submodule(name)
        norm = own_norm(module)
        if norm is None:
            raise LookupError(name)
        for owner in list(twin.modules()):  # it may be called from several places
            for attribute in [key for key, child in owner._modules.items() if child is module]:
                owner._modules[attribute] = norm
    return twin


def own_norm(module: nn.Module) -> nn.RMSNorm | None:
    """Torch's RMSNorm that computes what the module does; None where there is none, or the module is torch's itself."""
    weight = _lone_weight(module)
    is_other = type(module).__module__.startswith("torch.nn.") or module._forward_hooks or module._forward_pre_hooks
    if weight is None or is_other:
        return None
    sizes = {value for value in vars(module).values() if type(value) is float and 0 < value < _LARGEST_EPS}
    if not sizes:
        return None
    twin = duplicate(module).double().eval()
    held = weight.detach().double()
    for eps in sorted(sizes):
        for gain, exact in ((held, weight.detach()), (1 + held, 1 + weight.detach())):
            if _computes(twin, gain, eps):
                return _norm(module, weight, exact, eps)
    return None


def _lone_weight(module: nn.Module) -> nn.Parameter | None:
    """The module's weight, if this vector is all that it has."""
    tensors = [*module.parameters(), *module.buffers()]
    weight = module._parameters.get("weight")
    return weight if weight is not None and len(tensors) == 1 and weight.dim() == 1 and len(weight) > 1 else None


def _computes(twin: nn.Module, gain: Tensor, eps: float) -> bool:
    """Whether the module gives the formula's numbers for this gain and eps."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 3, len(gain), dtype=torch.float64, generator=generator).to(gain.device) + 0.5
    for size in (*(relative * eps**0.5 for relative in _SIZES), *_PLAIN):
        given = rows * size
        expected = given * (given.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * gain
        try:
            with torch.no_grad():
                found = twin(given.clone())
        except Exception:  # user code, which may want anything else
            return False
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            return False
        if not torch.allclose(found.double(), expected, rtol=_CLOSE, atol=_CLOSE * float(expected.abs().mean())):
            return False
    return True


def _norm(module: nn.Module, weight: nn.Parameter, gain: Tensor, eps: float) -> nn.RMSNorm:
    norm = nn.RMSNorm(len(gain), eps=eps, device="meta")
    norm.weight = weight if torch.equal(gain, weight) else nn.Parameter(gain, requires_grad=weight.requires_grad)
    return norm.train(module.training)
