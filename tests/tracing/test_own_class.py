"""Own class first: a standalone result only where the class leaves too little to cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.graph.standalone import Standalone
from recoup.tracing import class_support

METHOD = recoup.Paper(classifier=True)


class Block(nn.Module):
    """Two layers, the first of which is cut in two by numbers in the code."""

    def __init__(self, width, *, fixed=True):
        super().__init__()
        self.up, self.down, self.fixed = nn.Conv2d(16, width, 3, padding=1), nn.Conv2d(width, 16, 1), fixed
        self.half = width // 2

    def forward(self, x):
        y = self.up(x)
        if self.fixed:
            left, right = y[:, : self.half], y[:, self.half :]
            y = torch.cat([right, left.relu()], 1)
        return x + self.down(y.relu())


class Network(nn.Module):
    """A stem, blocks of which some fix their widths, and a head."""

    def __init__(self, *blocks):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 16, 3), nn.Sequential(*blocks), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Halves(nn.Module):
    """A layer whose channels the code cuts in two pieces, one of which a stream runs through."""

    def __init__(self, width):
        super().__init__()
        self.up, self.on = nn.Conv2d(16, width, 3, padding=1), nn.Conv2d(width // 2, width // 2, 3, padding=1)
        self.down = nn.Conv2d(width // 2 * 3, 16, 1)

    def forward(self, x):
        left, right = self.up(x).relu().chunk(2, 1)
        return x + self.down(torch.cat([left, right, right + self.on(right).relu()], 1))


def images():
    return torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def pruned(*blocks, **options):
    torch.manual_seed(0)
    options = {"budget": recoup.Budget(macs=0.5), "method": METHOD, "exclude": ["stem"], **options}
    return recoup.prune(Network(*blocks).eval(), [images()], **options)


def little():
    """Most of the work is in groups that the class can hold."""
    return Block(8), Block(48, fixed=False)


def much():
    """Most of the work is in the group that it cannot hold."""
    return Block(48), Block(8, fixed=False)


@pytest.mark.parametrize(
    "goal", [{}, {"budget": recoup.Budget(width=0.5)}, {"budget": recoup.Budget(parameters=0.6)}], ids=str
)
def test_the_class_is_kept_where_it_leaves_enough(goal):
    result = pruned(*little(), **goal)
    assert type(result.model) is Network
    assert result.model.blocks[0].up.out_channels == 8 and result.model.blocks[1].up.out_channels < 48
    assert "at another size: blocks.0.up; keep_class=False" in str(result.report)


@pytest.mark.parametrize("width", [10, 24])
@pytest.mark.parametrize("method", ["paper", "fast", "best"])
def test_pieces_of_equal_size_keep_equally_many_of_their_own_channels(width, method):
    result = pruned(Halves(width), method=method)
    assert type(result.model) is Network and result.report.proof.difference < 1e-10
    left, right = result.plan.keep["blocks.0.up"].view(2, -1)
    assert 0 < left.sum() == right.sum() < width // 2 and not torch.equal(left, right)


@pytest.mark.parametrize("goal", [{}, {"budget": recoup.Budget(width=0.5)}], ids=str)
def test_a_graph_takes_its_place_where_it_does_not(goal):
    result = pruned(*much(), **goal)
    assert isinstance(result.model, Standalone) and result.report.held_by_class is None
    assert result.model.blocks.get_submodule("0.up").weight.shape[0] < 48
    assert type(pruned(*much(), budget=recoup.Budget(macs=0.9), keep_class=True).model) is Network


def test_a_small_budget_needs_the_groups_that_the_class_cannot_hold():
    assert isinstance(pruned(*little(), budget=recoup.Budget(macs=0.2)).model, Standalone)


def test_so_do_widths_of_such_a_group():
    result = pruned(*little(), widths={"blocks.0.up": 4})
    assert isinstance(result.model, Standalone)
    assert type(pruned(*little(), widths={"blocks.1.up": 4}).model) is Network


def test_all_of_it_is_cut_where_the_class_is_not_asked_for():
    result = pruned(*little(), keep_class=False)
    assert isinstance(result.model, Standalone)
    assert result.model.blocks.get_submodule("0.up").weight.shape[0] < 8


def test_what_breaks_is_looked_for_where_it_shows(monkeypatch):
    """Among 32 groups, three that break the code: halving them would take twice as many captures."""
    tried, capture = [], class_support.capture
    monkeypatch.setattr(class_support, "capture", lambda *args, **how: tried.append(1) or capture(*args, **how))
    torch.manual_seed(0)
    model = Network(*(Block(8, fixed=number in (3, 12, 20)) for number in range(31))).eval()
    structure = recoup.trace(model, images(), keep_class=True).structure
    held = [group.name for group in structure.groups if any(why.startswith("cutting it") for why in group.reasons)]
    assert held == ["blocks.3.up", "blocks.12.up", "blocks.20.up"]
    assert len(tried) <= 16
