"""Rotation: residual streams under LayerNorm and RMSNorm, turned into their principal components.

With R orthonormal, what makes a stream makes R x in its place: W' = R W, b' = R b. An RMSNorm of R x is R times that of
x, so its gain g goes into the layers that read it: W' = W diag(g) R^T. A LayerNorm is the RMSNorm of what is centred;
there R = E U^T, where U (m, m-1) has the components of what is centred, and the columns of E (m, m-1) add up to zero.
Column j of E is zero behind place j+1, so the first n channels hold the first n-1 components and a constant.

The network computes what it did. Its least channels carry next to nothing, which no channel of its own does: each is
a mixture of all components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from recoup.channels.structure import Site, named_tensors
from recoup.errors import LockedError
from recoup.graph.copies import working_copy
from recoup.inputs.batches import (
    Stream,
    call_checked,
    check_finite,
    device_of,
    inputs_of,
    numbered_inputs,
)
from recoup.inputs.models import require_model
from recoup.inputs.surroundings import undisturbed
from recoup.operators.names import operation_name
from recoup.plan import Plan
from recoup.surgery.apply import apply
from recoup.surgery.verify import agree
from recoup.tracing.preparation import prepared
from recoup.tracing.streams import NormedStream, streams_of


@undisturbed
def rotate(model: nn.Module, calibration: Iterable[Any]) -> nn.Module:
    """A copy of `model` that computes the same, with its residual streams in the basis of their principal components.

    These are streams under LayerNorm or RMSNorm, as transformers have; `calibration` are batches of inputs. Prune the
    copy with `streams=True`, and channels that matter least are the last ones of each stream.

    Raises:
        LockedError: there is no such stream, or something in the model is not linear in its channels.
        VerificationError: the copy does not compute the same.
    """
    require_model(model)
    batches = Stream(calibration)
    return rotated(model, rotation(model, batches.first, batches), batches.first)


def rotated(model: nn.Module, turned: Plan, example: Any) -> nn.Module:
    """The copy of a model that a rotation makes, which is proven to compute the same on an example."""
    copy = apply(model, turned)
    agree(model, copy, example)
    return copy


def after(turned: Plan, plan: Plan, model: nn.Module) -> Plan:
    """A plan for the rotated model as one for the `model` itself; one with a graph carries the rotated model anyway."""
    if plan.graph is not None:
        return plan
    known, untied, norms = named_tensors(model), (*turned.untied, *plan.untied), (*turned.norms, *plan.norms)
    shapes = {name: shape for name, shape in {**turned.shapes, **plan.shapes}.items() if name in known}
    return replace(plan, weights={**turned.weights, **plan.weights}, shapes=shapes, untied=untied, norms=norms)


def rotation(model: nn.Module, first: Any, batches: Iterable[Any]) -> Plan:
    """The plan that cuts nothing and turns every stream that can be turned."""
    sample = inputs_of(first, model).first(1).to(device_of(model))
    given = prepared(model, sample, may_untie=True, streams=True)
    streams = streams_of(given.model, sample)
    if not streams.found:
        reasons = [f"{name}: {reason}" for name, reason in streams.refused.items()]
        raise LockedError(
            f"{type(model).__name__} has no stream that can be turned; "
            f"{'; '.join(reasons[:5]) or 'no LayerNorm or RMSNorm reads a sum of layers'}."
        )
    twin = working_copy(given.model)
    seen = _second_moments(twin, streams.found, batches)
    tensors = {name: tensor.detach().double() for name, tensor in named_tensors(twin).items()}
    changed: dict[str, Tensor] = {}
    for stream, moments in zip(streams.found, seen, strict=True):
        changed |= _turn(stream, basis(moments, is_centred=stream.is_centred), {**tensors, **changed})
    like = named_tensors(twin)
    a_weight = next(iter(streams.found[0].readers)).weight
    weights = {name: value.to(like.get(name, like[a_weight]).dtype) for name, value in changed.items()}
    shapes = {name: tuple(like[name].shape) for name in weights if name in like}
    return Plan({}, (), weights, shapes, untied=given.untied, norms=given.norms, keeps_hooks=given.keeps_hooks)


def basis(moments: Tensor, *, is_centred: bool) -> Tensor:
    """The matrix R (m, m) to principal components, largest first, from second moments (m, m) in float64.

    >>> x = torch.tensor([[3.0, 3.0], [1.0, -1.0]], dtype=torch.float64)
    >>> (x @ basis(x.T @ x, is_centred=False).T).abs().round(decimals=6).tolist()
    [[4.242641, 0.0], [0.0, 1.414214]]
    """
    if not is_centred:
        components: Tensor = torch.linalg.eigh(moments).eigenvectors.flip(1).T.contiguous()
        return components
    contrasts = _contrasts(len(moments)).to(moments)
    inner: Tensor = torch.linalg.eigh(contrasts.T @ moments @ contrasts).eigenvectors.flip(1)
    return contrasts @ (contrasts @ inner).T


def _contrasts(size: int) -> Tensor:
    """E (m, m-1): orthonormal columns that add up to zero, column j of ones in front of place j+1 (Helmert's)."""
    columns = torch.ones(size, size - 1, dtype=torch.float64).triu()
    number = torch.arange(1, size, dtype=torch.float64)
    columns[torch.arange(1, size), torch.arange(size - 1)] = -number
    return columns / (number * (number + 1)).sqrt()


def _turn(stream: NormedStream, turn: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What makes, scales and reads a stream once it is turned."""
    found: dict[str, Tensor] = {}
    for site in stream.makers:
        if site.tensor in tensors:
            found[site.tensor] = _multiplied(tensors[site.tensor], site, stream, turn)
    for reader in stream.readers:
        site = stream.site(reader.weight, reader.dim)
        weight = found.get(reader.weight, tensors[reader.weight])  # a layer may make what it reads
        if reader.gain is not None:
            if reader.shift is not None and bool(tensors[reader.shift].any()):
                assert reader.bias is not None
                added = _read_from(weight, site, _in_order(tensors[reader.shift], reader.shift, stream), stream)
                found[reader.bias] = found.get(reader.bias, tensors.get(reader.bias, 0.0)) + added
            weight = _scaled(weight, site, _in_order(tensors[reader.gain], reader.gain, stream), stream)
        found[reader.weight] = _multiplied(weight, site, stream, turn)
    for norm in stream.norms:
        found[norm.gain] = torch.ones_like(tensors[norm.gain])
        if norm.bias is not None:
            found[norm.bias] = torch.zeros_like(tensors[norm.bias])
    return found


def _multiplied(value: Tensor, site: Site, stream: NormedStream, turn: Tensor) -> Tensor:
    """A tensor with R in front of what it has along the dim of the stream."""
    places, channel = (part.to(value.device) for part in stream.places(site))
    part = value.index_select(site.dim, places).movedim(site.dim, 0)
    turned = torch.tensordot(turn.to(value)[channel][:, channel], part, dims=1)
    return value.index_copy(site.dim, places, turned.movedim(0, site.dim))


def _in_order(value: Tensor, name: str, stream: NormedStream) -> Tensor:
    """What a vector has for each channel of the stream, in the stream's order."""
    places, channel = stream.places(stream.site(name, 0))
    return torch.zeros_like(value[places]).index_copy(0, channel.to(value.device), value[places])


def _scaled(weight: Tensor, site: Site, gain: Tensor, stream: NormedStream) -> Tensor:
    """W diag(g)."""
    places, channel = (part.to(weight.device) for part in stream.places(site))
    shape = [-1 if dim == site.dim else 1 for dim in range(weight.dim())]
    return weight.index_copy(site.dim, places, weight.index_select(site.dim, places) * gain[channel].view(shape))


def _read_from(weight: Tensor, site: Site, shift: Tensor, stream: NormedStream) -> Tensor:
    """What a layer without a window makes of a constant."""
    places, channel = (part.to(weight.device) for part in stream.places(site))
    return (weight.index_select(site.dim, places).movedim(site.dim, -1) @ shift[channel]).flatten()


def _second_moments(twin: nn.Module, streams: Iterable[NormedStream], batches: Iterable[Any]) -> list[Tensor]:
    """For every stream the mean outer product (m, m) of what its norms make of it, before their gains."""
    tensors, watched = named_tensors(twin), _NormWatch()
    for number, stream in enumerate(streams):
        for norm in stream.norms:
            order = stream.places(stream.site(norm.gain, 0))[1]
            watched.streams[id(tensors[norm.gain])] = number, order.to(tensors[norm.gain].device)
    device, number = device_of(twin), 0
    for number, batch in enumerate(batches, start=1):
        inputs = numbered_inputs(batch, twin, number).to(device)
        check_finite(inputs, number)
        with torch.no_grad(), watched:
            call_checked(twin, inputs, number)
    return [watched.sums[place] for place in range(len(watched.sums))]


class _NormWatch(TorchFunctionMode):
    """While active, sums up what norms of known gains make: `streams` has number and order by the gain's `id`."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[int, tuple[int, Tensor]] = {}
        self.sums: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, then look."""
        kwargs = kwargs or {}
        if operation_name(func) in ("layer_norm", "rms_norm"):
            known = self.streams.get(id(kwargs.get("weight", args[2] if len(args) > 2 else None)))
            if known is not None:
                self._see(args[0], *known, is_centred=operation_name(func) == "layer_norm")
        return func(*args, **kwargs)

    def _see(self, inputs: Tensor, number: int, order: Tensor, *, is_centred: bool) -> None:
        rows = torch.empty_like(inputs.flatten(0, -2), dtype=torch.float64)
        rows[:, order] = inputs.detach().flatten(0, -2).double()
        rows = rows - rows.mean(dim=1, keepdim=True) if is_centred else rows
        sizes = rows.square().mean(dim=1, keepdim=True)
        rows = rows / sizes.clamp(min=torch.finfo(torch.float32).tiny).sqrt()
        self.sums[number] = self.sums.get(number, 0.0) + rows.T @ rows / len(rows)
