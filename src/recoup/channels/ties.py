"""Why all that a layer makes is a single channel: which operation tied its channels together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from recoup.graph.code import code_line, site_of
from recoup.labels.constraints import Constraints

ALONE = "its layers make a single channel"


def why_alone(constraints: Constraints, labels: Tensor, node: fx.Node) -> str:
    """Why a value, which a node makes, consists of the one channel that `labels` are."""
    ends = torch.tensor([[block.start, block.start + block.count] for block in constraints.blocks])
    places = torch.searchsorted(ends[:, 0].contiguous(), labels, right=True) - 1
    is_made = (places >= 0) & (labels < ends[places, 1])
    widths = (ends[:, 1] - ends[:, 0])[places[is_made]]
    if bool((widths > 1).any()) and not ties(constraints, labels):
        line = code_line(node)
        return f"{site_of(node)} takes it alone{f' ({line})' if line else ''}"
    return why_single(constraints, labels)


def why_single(constraints: Constraints, labels: Tensor) -> str:
    """The operation that ties most of `labels`, which are one channel, or what else there is to say."""
    tied = ties(constraints, labels)
    if not tied:
        return ALONE
    site, _ = tied.most_common(1)[0]
    others = {1: "", 2: ", as does another"}.get(len(tied), f", as do {len(tied) - 1} others")
    return f"{site} ties its channels into one{others}"


def ties(constraints: Constraints, labels: Tensor) -> Counter[str]:
    """How many channels of one layer fewer there are by each operation, in the order in which they were met."""
    member = torch.zeros(constraints.count, dtype=torch.bool)
    member[labels[labels >= 0]] = True
    block_of = torch.full((constraints.count,), -1)
    for number, block in enumerate(constraints.blocks):
        block_of[block.start : block.start + block.count] = number
    made = (member & (block_of >= 0)).nonzero().squeeze(1).tolist()
    sets = _Sets({label: {int(block_of[label])} for label in made})
    lost: Counter[str] = Counter()
    for coupling in constraints.couplings:
        for left, right in _within(coupling.pairs, member):
            lost[coupling.site] += sets.join(left, right)
    return +lost


def _within(pairs: Tensor, member: Tensor) -> Iterator[list[int]]:
    yield from pairs[:, member[pairs].all(dim=0)].T.tolist()


class _Sets:
    """Labels that are one channel so far, and the layers that make them."""

    def __init__(self, makers: dict[int, set[int]]) -> None:
        self._makers, self._parent = makers, dict[int, int]()

    def join(self, left: int, right: int) -> int:
        """For how many layers two of their channels become one."""
        a, b = self._root(left), self._root(right)
        if a == b:
            return 0
        one, other = self._makers.get(a, set()), self._makers.get(b, set())
        self._parent[b] = a
        self._makers[a] = one | other
        return len(one & other)

    def _root(self, label: int) -> int:
        while label in self._parent:
            above = self._parent[label]
            self._parent[label] = self._parent.get(above, above)
            label = above
        return label
