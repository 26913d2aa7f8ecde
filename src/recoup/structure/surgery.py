"""Surgery: carry out a plan on a copy of the model. Nothing is decided here."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from recoup.errors import ArtefactError
from recoup.plan import Plan
from recoup.structure.copying import duplicate, strip_hooks


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """A smaller module of the model's own class, with the plan's weights; its training flags are the model's.

    Raises:
        ArtefactError: the plan was made for a model with other parameters.
    """
    smaller = masked(model, plan)
    for piece in plan.slices:
        tensor = _get(smaller, piece.tensor)
        assert tensor is not None
        _replace(smaller, tensor, tensor.detach().index_select(piece.dim, piece.kept.to(tensor.device)))
    for name in {piece.tensor.rpartition(".")[0] for piece in plan.slices}:
        _refresh_attributes(smaller.get_submodule(name))
    return smaller


def masked(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy at full size that carries the plan's weights: what the smaller module must compute."""
    _check_shapes(model, plan)
    twin = strip_hooks(duplicate(model))
    for name, value in plan.weights.items():
        old = _get(twin, name)
        if old is None:
            _set_new(twin, name, value)
        else:
            _replace(twin, old, value.to(device=old.device, dtype=old.dtype))
    return twin


def _check_shapes(model: nn.Module, plan: Plan) -> None:
    for name, shape in plan.shapes.items():
        try:
            tensor = _get(model, name)
        except AttributeError:
            tensor = None
        found = tuple(tensor.shape) if tensor is not None else None
        if found != tuple(shape):
            raise ArtefactError(
                f"the plan was made for a model whose {name} has shape {tuple(shape)}; here it is "
                f"{found or 'missing'}. Build the model exactly as it was before pruning."
            )


def _get(model: nn.Module, name: str) -> Tensor | None:
    owner, _, attribute = name.rpartition(".")
    value = getattr(model.get_submodule(owner), attribute)
    assert value is None or isinstance(value, Tensor)
    return value


def _set_new(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    like = next(module.parameters())
    fresh = nn.Parameter(value.to(device=like.device, dtype=like.dtype), requires_grad=like.requires_grad)
    setattr(module, attribute, fresh)


def _replace(model: nn.Module, old: Tensor, value: Tensor) -> None:
    """Put `value` in every place that holds `old`, so that tied tensors stay tied."""
    value = value.contiguous().clone()
    fresh = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for attribute in [key for key, held in store.items() if held is old]:
                store[attribute] = fresh  # type: ignore[assignment]  # each store gets back the kind it held


def _refresh_attributes(module: nn.Module) -> None:
    """Bring the sizes that torch's own layers remember in line with their tensors."""
    if isinstance(module, _ConvNd):
        if module.groups == module.in_channels == module.out_channels and module.groups > 1:
            module.groups = module.weight.shape[0]
        module.out_channels = module.weight.shape[0]
        module.in_channels = module.weight.shape[1] * module.groups
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _NormBase):
        sized = module.weight if module.weight is not None else module.running_mean
        module.num_features = len(sized) if sized is not None else module.num_features
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)


def zero_inputs(weight: Tensor, keep: Tensor) -> Tensor:
    """A weight (out, in, ...) with zeros where an input is not kept."""
    return weight.detach() * keep.to(weight.device).view(1, -1, *[1] * (weight.dim() - 2)).to(weight.dtype)
