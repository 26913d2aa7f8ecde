"""Selectors by name, and the check on what a user's own function returns."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from recoup.algebra.selection.batch_norm_scale import bn_scale
from recoup.algebra.selection.feature_rank import hrank
from recoup.algebra.selection.geometric_median import fpgm
from recoup.algebra.selection.greedy import backward, forward
from recoup.algebra.selection.lasso import lasso
from recoup.algebra.selection.lookahead import lookahead
from recoup.algebra.selection.magnitude import l1, l2, random
from recoup.algebra.selection.obs import obs
from recoup.algebra.selection.problem import Problem, Ranking, Selector
from recoup.algebra.selection.propagated import nisp, synflow
from recoup.algebra.selection.taylor import taylor
from recoup.algebra.selection.thinet import thinet
from recoup.algebra.selection.zeros import apoz
from recoup.errors import IllConditionedError, RecoupError, UsageError, shown, told, unknown_name

SELECTORS: Mapping[str, Selector] = MappingProxyType(
    {
        "forward": forward, "backward": backward, "l1": l1, "l2": l2, "random": random, "fpgm": fpgm, "taylor": taylor,
        "hrank": hrank, "apoz": apoz, "bn-scale": bn_scale, "thinet": thinet, "lasso": lasso, "nisp": nisp,
        "synflow": synflow, "obs": obs, "lookahead": lookahead,
    }
)  # fmt: skip
# Those that look at images: calibration keeps some for them, and for functions of the user's own.
LOOK_AT_IMAGES = (taylor, hrank, apoz)


def find_selector(selector: str | Selector) -> Selector:
    """The selector of that name, or the function itself."""
    if not isinstance(selector, str) and callable(selector):
        return selector
    if not isinstance(selector, str) or selector not in SELECTORS:
        raise unknown_name("selector", selector, SELECTORS, ", or a function of your own")
    return SELECTORS[selector]


def looks_at_images(selector: str | Selector) -> bool:
    """Whether a selector may ask for feature maps or gradients: some do, and nobody knows of a user's own."""
    found = find_selector(selector)
    return found in LOOK_AT_IMAGES or found not in SELECTORS.values()


def ask(problem: Problem, selector: str | Selector, name: str) -> Ranking:
    """What `selector` says of `problem`, checked to be a ranking of all its channels; `name` is for the message."""
    try:
        answer = find_selector(selector)(problem)
    except (IllConditionedError, UsageError) as error:
        raise type(error)(f"{name}: {error}") from error
    except RecoupError:
        raise
    except Exception as error:  # user code
        if isinstance(selector, str):
            raise
        raise UsageError(f"{name}: the selector failed ({told(error)}).") from error
    ranking = answer if isinstance(answer, Ranking) else Ranking(_as_order(answer, problem, name))
    _check(ranking.order, problem, name)
    if ranking.loss is not None and ranking.loss.shape != (problem.width + 1,):
        raise UsageError(
            f"{name}: the loss of a ranking is told for 0 to {problem.width} channels, as {problem.width + 1} values; "
            f"the selector returned {tuple(ranking.loss.shape)}."
        )
    if ranking.most is not None and not 0 <= ranking.most <= problem.width:
        raise UsageError(f"{name}: of {problem.width} channels {ranking.most} cannot be the most to choose.")
    return ranking


def _as_order(answer: object, problem: Problem, name: str) -> Tensor:
    try:
        return torch.as_tensor(answer).to(problem.device)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"{name}: the selector must return channel numbers or a recoup.Ranking, it returned {shown(answer)}."
        ) from None


def _check(order: Tensor, problem: Problem, name: str) -> None:
    every = torch.arange(problem.width, device=order.device)
    if order.dtype != torch.long or order.shape != every.shape or not torch.equal(order.sort().values, every):
        raise UsageError(
            f"{name}: the selector must return each of the {problem.width} channel numbers once, best first, as an "
            f"integer tensor; it returned {tuple(order.shape)} {order.dtype}."
        )
    staying = int((~problem.free).sum())
    if not bool((~problem.free)[order[:staying]].all()):
        raise UsageError(f"{name}: the selector must put the {staying} channels that are not `free` first.")
