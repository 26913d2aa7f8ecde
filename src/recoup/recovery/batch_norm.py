"""Batch norms estimated again: weights are cut, and running statistics become those of the smaller network.

    mean, var  over the calibration images of what each batch norm reads in the smaller network

While they are estimated, every batch norm uses the mean and variance of the batch at hand, as in training. So those
further down see inputs that are already in place, and one pass is enough. Every sample counts alike; batches are those
that suit the device, and what differs between them is a part of the variance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from recoup.channels.structure import named_tensors
from recoup.errors import CalibrationError, UsageError
from recoup.graph.copies import working_copy
from recoup.inputs.batches import call_checked, device_of, numbered_inputs
from recoup.inputs.split import joined
from recoup.operators.names import operation_name
from recoup.plan import Plan
from recoup.recovery.cutting import cut_weights, recover_nothing
from recoup.recovery.plans import assemble
from recoup.statistics.calibrate import Calibration
from recoup.surgery.apply import apply

NO_BATCH_NORM = (
    "the network has no batch norm with running statistics, so there is nothing to estimate again. Use "
    "recovery='mean-shift', or 'one-pass'."
)
# How torch's own function, and the operator under it, are called.
_FUNCTION = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_OPERATOR = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
_DECOMPOSED = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")


def recover_batch_norms(calibration: Calibration, keep: Tensor) -> Plan:
    """The plan that keeps `keep`, cuts weights, and writes the running statistics that the smaller network has.

    Raises:
        UsageError: there is no batch norm.
        CalibrationError: the calibration images were an iterator, which has been read.
    """
    smaller = apply(calibration.model, recover_nothing(calibration, keep))
    device = device_of(smaller)
    batches = (numbered_inputs(batch, smaller, number) for number, batch in calibration.split.repeated())
    found = estimated_statistics(smaller, joined(batches, device))
    if not found:
        raise UsageError(NO_BATCH_NORM)
    found = _by_sliced_names(calibration, found)
    whole = {name: _at_full_size(calibration, keep, name, value) for name, value in found.items()}
    return assemble(calibration, keep, {**cut_weights(calibration, keep), **whole}, {})


def estimated_statistics(model: nn.Module, batches: Iterable[tuple[object, Any]]) -> dict[str, Tensor]:
    """Mean and variance of what every batch norm of a model reads, by the name of the buffer that is to hold them.

    `batches` come with the numbers that messages call them by. Batch norms are found as the model runs: modules,
    functions, and calls in a graph. The model is not changed.
    """
    twin, device = working_copy(model), device_of(model)
    watcher = _BatchStatistics(named_tensors(twin))
    for number, batch in batches:
        inputs = numbered_inputs(batch, twin, number).to(device)
        with torch.no_grad(), watcher:
            call_checked(twin, inputs, number)
    return watcher.found()


def _by_sliced_names(calibration: Calibration, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One value for every buffer, by the name under which it is cut: a module may have several names."""
    tensors = named_tensors(calibration.traced.host)
    cut = {id(tensors[site.tensor]): site.tensor for site in calibration.structure.sites if site.tensor in tensors}
    return {cut.get(id(tensors.get(name)), name): value for name, value in found.items()}


def _at_full_size(calibration: Calibration, keep: Tensor, name: str, value: Tensor) -> Tensor:
    """A buffer of the original with the entries that remain replaced."""
    whole = calibration.parameters[name].detach().clone()
    kept = [piece.kept for piece in calibration.structure.slices(keep) if piece.tensor == name]
    rows = kept[0].to(whole.device) if kept else slice(None)
    whole[rows] = value.to(whole)
    return whole


class _BatchStatistics(TorchFunctionMode):
    """While active, batch norms use the statistics of the batch, and those are averaged over all calls."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            self._names.setdefault(id(tensor), []).append(name)
        self._like = tensors
        self._sums: dict[tuple[int, int], tuple[int, Tensor, Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; a batch norm with running statistics is seen, and run with those of the batch."""
        kwargs = kwargs or {}
        call = _batch_norm_call(func, args, kwargs)
        places = id(call.get("running_mean")), id(call.get("running_var"))
        if not all(place in self._names for place in places):
            return func(*args, **kwargs)
        values = call["input"]
        if values.numel() <= values.shape[1]:
            raise CalibrationError("a batch norm sees one value per channel, which has no variance. Give more samples.")
        result = F.batch_norm(values, None, None, call.get("weight"), call.get("bias"), True, 0.0, call["eps"])
        self._see(places, values.detach())
        return result if call["is_whole"] else (result, None, None)

    def found(self) -> dict[str, Tensor]:
        """Averages by the names of the buffers."""
        tensors: dict[str, Tensor] = {}
        for (mean_of, variance_of), (count, means, squares, variances) in self._sums.items():
            mean = means / count
            between = (squares / count - mean.square()).clamp(min=0)
            for place, value in ((mean_of, mean), (variance_of, variances / count + between)):
                tensors |= {name: value.to(self._like[name].dtype) for name in self._names[place]}
        return tensors

    def _see(self, places: tuple[int, int], values: Tensor) -> None:
        dims, size = [dim for dim in range(values.dim()) if dim != 1], len(values)
        found = torch.var_mean(values.float() if values.element_size() < 4 else values, dims)
        variance, mean = (part.double() for part in found)
        nothing = torch.zeros_like(mean)
        count, *sums = self._sums.get(places, (0, nothing, nothing, nothing))
        means, squares, variances = (
            total + size * part for total, part in zip(sums, (mean, mean.square(), variance), strict=True)
        )
        self._sums[places] = count + size, means, squares, variances


def _batch_norm_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a batch norm by name; empty for any other operation."""
    if func is F.batch_norm:
        return {"eps": 1e-5, **dict(zip(_FUNCTION, args, strict=False)), **kwargs, "is_whole": True}
    name = operation_name(func)
    if name == "batch_norm":
        return {**dict(zip(_OPERATOR, args, strict=False)), **kwargs, "is_whole": True}
    if name == "_native_batch_norm_legit_no_training":
        return {**dict(zip(_DECOMPOSED, args, strict=False)), **kwargs, "is_whole": False}
    return {}
