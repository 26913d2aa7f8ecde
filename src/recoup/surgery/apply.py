"""Surgery: carry out a plan on a copy of the model. Nothing is decided here."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from recoup.channels.settling import centred, settled
from recoup.channels.structure import Consumer, Structure, named_tensors
from recoup.errors import ArtefactError, InputError, require_kind
from recoup.graph.copies import duplicate, light_copy, strip_hooks, untie
from recoup.graph.norms_by_hand import with_own_norms
from recoup.graph.settings import Settings, adjust
from recoup.graph.standalone import standalone
from recoup.inputs.surroundings import undisturbed
from recoup.operators.record import refresh_of
from recoup.plan import GraphPlan, Plan, Slice, centre

# How many times the relative precision a product may be off: it is rounded once, and so is the factor.
ROUNDED = 2.0
_Places: TypeAlias = dict[int, list[tuple[dict[str, Any], str]]]


@undisturbed
def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """A smaller module of the model's own class, with the plan's weights; its training flags are the model's.

    A plan with a graph gives a standalone module instead, made from the standalone form that the plan carries.

    Raises:
        ArtefactError: the plan was made for a model with other parameters.
    """
    require_kind("model", model, nn.Module, "the torch.nn.Module that the plan was made for")
    require_kind("plan", plan, Plan, "a recoup.Plan, as recoup.recover makes one")
    smaller = masked(model, plan)
    places = _places(smaller)
    for piece in plan.slices:
        tensor = _get(smaller, piece.tensor)
        assert tensor is not None
        _replace(places, tensor, piece.of(tensor.detach()))
    if plan.graph is not None:
        return standalone(plan.graph, named_tensors(smaller)).train(model.training)
    _refresh_attributes(smaller, plan.slices)
    adjust(smaller, plan.settings)
    for name in plan.idle if plan.slices else ():
        smaller.get_submodule(name).register_forward_pre_hook(functools.partial(_refuse_to_run, name))
    return smaller


def _refuse_to_run(name: str, *_: Any) -> None:
    raise InputError(
        f"{name} does not run in eval mode, so it was not seen when the model was pruned and still expects the old "
        "number of channels. Train without it: switch it off, or exclude= what it reads when pruning."
    )


def hollow(model: nn.Module, slices: tuple[Slice, ...], settings: Settings) -> nn.Module:
    """The model cut by `slices`, with nothing in what was cut: to capture, not to run."""
    twin = light_copy(model)
    places = _places(twin)
    for piece in slices:
        tensor = _get(twin, piece.tensor)
        assert tensor is not None
        shape = [piece.count if dim == piece.dim else size for dim, size in enumerate(tensor.shape)]
        _replace(places, tensor, tensor.detach().new_empty(shape))
    _refresh_attributes(twin, slices)
    adjust(twin, settings)
    return twin


def masked(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy at full size that carries the plan's weights: what the smaller module must compute."""
    if plan.graph is not None:
        assert plan.graph.host is not None
        model = plan.graph.host
    _check_shapes(model, plan)
    twin = duplicate(model) if plan.keeps_hooks else strip_hooks(duplicate(model))
    if plan.graph is None:
        with_own_norms(untie(twin, plan.untied), [name for name in plan.norms if not _is_own(twin, name)])
    places = _places(twin)
    for name, value in plan.weights.items():
        old = _get(twin, name)
        if old is None:
            _set_new(twin, name, value)
        else:
            _replace(places, old, value.to(device=old.device, dtype=old.dtype).contiguous().clone())
    return twin


def _is_own(twin: nn.Module, name: str) -> bool:
    """Whether a norm is torch's already, as in the copy that a plan was made on."""
    return isinstance(twin.get_submodule(name), nn.RMSNorm)


def without_rounding(twin: nn.Module, plan: Plan, smaller: nn.Module) -> None:
    """Take the rounding of the plan's tensors out of a masked copy that is in a higher precision by now.

    What the plan has centred is centred again. What is left of a gain times a factor, as the smaller model has it, is
    the masked copy's but for rounding; otherwise it stays, and the two differ.
    """
    places, cut_tensors = _places(twin), named_tensors(smaller)
    for where in plan.centred:
        held = _get(twin, where.tensor)
        assert held is not None
        _replace(places, held, centre(held.detach(), where))
    for piece in plan.slices:
        held = _get(twin, piece.tensor) if piece.factor != 1.0 else None
        if held is not None:
            left, own = cut_tensors[piece.tensor].detach(), held.detach()
            exact, rounding = left.to(own.dtype) / piece.factor, ROUNDED * torch.finfo(left.dtype).eps
            if torch.allclose(exact, piece.places(own), rtol=rounding, atol=0.0):
                _replace(places, held, own.index_copy(piece.dim, piece.kept.to(own.device), exact))


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
    value = value.detach().to(device=like.device, dtype=like.dtype, copy=True)  # a plan's tensors stay the plan's
    fresh = nn.Parameter(value, requires_grad=like.requires_grad)
    setattr(module, attribute, fresh)


def _places(model: nn.Module) -> _Places:
    """Where a model holds each of its tensors, by `id`: tied ones are in several places."""
    places: _Places = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for attribute, held in store.items():
                if held is not None:
                    places.setdefault(id(held), []).append((store, attribute))
    return places


def _replace(places: _Places, old: Tensor, value: Tensor) -> None:
    """Put `value` in every place that holds `old`, so that tied tensors stay tied."""
    fresh = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
    held = places[id(old)]
    for store, attribute in held:
        store[attribute] = fresh
    places[id(fresh)] = held


def _refresh_attributes(model: nn.Module, slices: Iterable[Slice]) -> None:
    """Bring the sizes, and lists of tensors, that torch's own layers remember in line with their tensors."""
    rows = {piece.tensor: piece.kept for piece in slices if piece.dim == 0}
    for name in {piece.tensor.rpartition(".")[0] for piece in slices}:
        module = model.get_submodule(name)
        refresh = refresh_of(module)
        if refresh is not None:
            refresh(module, rows.get(f"{name}.weight"))


def bare_plan(
    structure: Structure, tensors: Mapping[str, Tensor], keep: Tensor, graph: GraphPlan | None = None
) -> Plan:
    """The plan that keeps `keep` and refits nothing: pruned inputs are only cut off."""
    slices = structure.slices(keep)
    weights = {
        consumer.weight: _zero_inputs(tensors[consumer.weight], kept, consumer)
        for consumer in structure.consumers
        if not bool((kept := structure.keep_indices(consumer.inputs, keep)).all())
    }
    weights = settled(structure, tensors, weights, keep)
    shapes = {name: structure.shapes[name] for name in {*weights, *(piece.tensor for piece in slices)}}
    settings, middle = structure.settings(keep) if graph is None else {}, centred(structure, weights, keep)
    return Plan(structure.masks(keep), slices, weights, shapes, graph=graph, centred=middle, settings=settings)


def _zero_inputs(weight: Tensor, keep: Tensor, consumer: Consumer) -> Tensor:
    """A weight with zeros where an input is not kept."""
    shape = [-1 if dim == consumer.input_dim else 1 for dim in range(weight.dim())]
    whole = consumer.spread(weight.detach())
    return consumer.gathered(whole * keep.to(weight.device).view(shape).to(weight.dtype))
