"""What to compare with: magnitude pruning that refits nothing, Torch-Pruning, and batch norm estimated again.

All of them keep the same share of every group of channels, the largest one at which the multiply-accumulates of
convolutions and linear layers fit the share asked for. The caller's model is not changed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode

import recoup
from recoup.channels.cost import cost
from recoup.channels.structure import Structure, named_tensors
from recoup.cli.importing import import_library
from recoup.errors import BudgetError, ModelError
from recoup.recovery.batch_norm import estimated_statistics

# Halvings of the interval of shares: finer than one channel in a layer of 4096.
BISECTIONS = 12
# A share such as 0.7 of 10 channels is 7 of them, though 0.7 * 10 > 7 in floating point.
ROUNDING = 1e-9


def prune_by_l2(model: nn.Module, example: Tensor, share: float) -> nn.Module:
    """The model without the channels whose filters have the smallest L2 norms, at `share` of its MACs.

    Groups of channels and surgery are recoup's own; the weights that stay are as they were. Filters are those of
    ordinary layers, as in recoup's selector of that name: a depthwise layer passes channels on and makes none.
    """
    structure = recoup.trace(model, example).structure
    norms = filter_norms(structure, model)
    allowed = share * cost(structure, model).macs

    def keep(part: float) -> Tensor:
        return keep_best(structure, norms, part)

    best = largest_share(lambda part: cost(structure, model, keep(part)).macs <= allowed)
    return recoup.apply(model, plan_without_refit(structure, keep(best)))


def prune_with_torch_pruning(
    model: nn.Module, example: Tensor, share: float, *, ignored: str | Sequence[str]
) -> nn.Module:
    """What Torch-Pruning's MagnitudePruner makes of the model at `share` of its MACs; the layers `ignored` stay whole.

    The settings are the library's own: group L2 norms (over all layers of a group, batch norm and depthwise included,
    on the input and output side), one pruning ratio for all groups, one step.
    """
    return torch_pruned(model, example, ignored, torch_pruning_ratio(model, example, share, ignored=ignored))


def torch_pruning_ratio(model: nn.Module, example: Tensor, share: float, *, ignored: str | Sequence[str]) -> float:
    """The share of every group that Torch-Pruning keeps at `share` of the MACs, found by bisection."""
    allowed = share * count_macs(model, example)
    smaller = partial(torch_pruned, model, example, ignored)
    return largest_share(lambda part: count_macs(smaller(part), example) <= allowed)


def reestimated(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> nn.Module:
    """A copy whose batch norms hold the statistics of `batches`, as the recovery of that name estimates them.

    Its weights are the model's, and it is in evaluation mode.
    """
    result = copy.deepcopy(model).eval()
    tensors = named_tensors(result)
    for name, value in estimated_statistics(model, enumerate(batches, start=1)).items():
        tensors[name].copy_(value)
    return result


def largest_share(fits: Callable[[float], bool]) -> float:
    """The largest share in (0, 1] that fits, to one part in 2^BISECTIONS; what is smaller than a fitting one fits too.

    >>> largest_share(lambda share: share <= 0.25)
    0.25

    Raises:
        BudgetError: not even the smallest share fits.
    """
    if fits(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0.0:
        raise BudgetError(f"even the share {high:.1%} of every group costs more than allowed. Keep more.")
    return low


def keep_best(structure: Structure, score: Tensor, share: float) -> Tensor:
    """The mask over all channels that keeps those of the largest `score`, `share` of the free ones in each group."""
    keep = structure.keep_all()
    for group in structure.prunable:
        staying_first = torch.where(group.locked, torch.inf, score[group.channels])
        count = group.width - group.free + math.ceil(share * group.free - ROUNDING)
        keep[group.channels] = False
        keep[group.start + staying_first.argsort(descending=True, stable=True)[:count]] = True
    return keep


def filter_norms(structure: Structure, model: nn.Module) -> Tensor:
    """For every channel of all groups the L2 norm of the weights that make it, all its makers together."""
    squares = torch.zeros(structure.width, dtype=torch.float64)
    makers = {f"{name}.weight" for name, module in model.named_modules() if is_ordinary(module)}
    for site in (site for site in structure.sites if site.tensor in makers and site.dim == 0):
        inside = site.channel_of >= 0
        of_filter = model.get_parameter(site.tensor).detach().cpu().double().flatten(1).square().sum(dim=1)
        squares.index_add_(0, site.channel_of[inside], of_filter[inside])
    return squares.sqrt()


def is_ordinary(module: nn.Module) -> bool:
    """Whether it is a layer all of whose outputs read all of its inputs: linear, or a convolution without groups."""
    return isinstance(module, nn.Linear) or (isinstance(module, _ConvNd) and module.groups == 1)


def plan_without_refit(structure: Structure, keep: Tensor) -> recoup.Plan:
    """The plan that keeps `keep` and writes nothing: what is pruned is only cut off."""
    slices = structure.slices(keep)
    shapes = {piece.tensor: structure.shapes[piece.tensor] for piece in slices}
    return recoup.Plan(structure.masks(keep), slices, {}, shapes)


def count_macs(model: nn.Module, example: Tensor) -> int:
    """Multiply-accumulates of convolutions and linear layers for one sample, as recoup counts them."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(example)
    return int(counter.get_total_flops()) // (2 * len(example))


def torch_pruned(model: nn.Module, example: Tensor, ignored: str | Sequence[str], share: float) -> nn.Module:
    """What the library makes of the model when it keeps `share` of every group."""
    library = import_library("torch_pruning", "torch-pruning==1.6.1", ModelError)
    twin, names = copy.deepcopy(model).eval(), [ignored] if isinstance(ignored, str) else ignored
    pruner = library.pruner.MagnitudePruner(
        twin,
        example,
        importance=library.importance.MagnitudeImportance(p=2),
        pruning_ratio=1 - share,
        ignored_layers=[twin.get_submodule(name) for name in names],
    )
    pruner.step()
    return twin
