"""Selectors from end to end: by name, in every method, on the command line, and on networks with a known answer."""

import re

import click
import pytest
import torch
from torch import nn

import recoup
from recoup.algebra.selection import SELECTORS
from recoup.cli import main
from tests.zoo import ZOO, seeded

WIDTH = 8
# What makes a channel worthless, and who can know.
DEAD = sorted(set(SELECTORS) - {"random"})
COPIES = ("forward", "backward")


def chain():
    with seeded(3):
        model = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(),
            nn.Conv2d(WIDTH, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4),
        )  # fmt: skip
        nn.init.uniform_(model[1].weight, 0.5, 1.5)
    return model.eval()


def images(count=60):
    with seeded(4):
        return torch.randn(count, 3, 8, 8)


def kept_by(model, selector):
    data = recoup.split(model, [images()], held_out=False)
    method = recoup.Paper(selector=selector, weighting="none")
    seen = recoup.calibrate(recoup.trace(model, images(2), only=["0"]), data, method)
    return set(recoup.rank(seen)["0"].order[: WIDTH // 2].tolist())


@pytest.mark.parametrize("selector", DEAD)
def test_channels_that_nobody_makes_go_first(selector):
    """Half of the channels are exactly zero: nothing makes them, and their batch norm adds nothing."""
    model, dead = chain(), [1, 2, 5, 7]
    for tensor in (model[0].weight, model[1].weight, model[1].bias):
        tensor.data[dead] = 0
    if selector == "fpgm":  # knows distances: four filters at one place are the nearest to the median
        model[0].weight.data *= 4
    if selector == "nisp":  # knows what reads a channel, and not what makes it
        model[3].weight.data[:, dead] = 0
    assert kept_by(model, selector) == {0, 3, 4, 6}


@pytest.mark.parametrize("selector", COPIES)
def test_of_exact_copies_one_is_kept(selector):
    model = chain()
    for tensor in (model[0].weight, model[1].weight, model[1].bias):
        tensor.data[4:] = tensor.data[:4]
    assert {channel % 4 for channel in kept_by(model, selector)} == {0, 1, 2, 3}


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("method", [recoup.Paper, recoup.Fast])
def test_every_selector_prunes_a_residual_network_by_name(selector, method):
    entry = ZOO["residual"]
    chosen = method(selector=selector)
    result = recoup.prune(entry.build(6), [entry.batch(60)], budget=recoup.Budget(macs=0.6), method=chosen)
    assert result.report.macs_removed >= 0.4
    assert result.report.proof.difference < 1e-8
    assert result.report.method["selector"] == selector


@pytest.mark.parametrize("selector", SELECTORS)
def test_the_command_line_knows_every_selector(selector):
    words = ["recoup:resnet20", "--calibration", "noise", "--macs", "0.5", "--selector", selector, "-o", "new"]
    command = main.commands["prune"]
    assert command.make_context("prune", words).params["selector"] == selector
    (option,) = [p for p in command.params if isinstance(p, click.Option) and p.name == "selector"]
    assert re.search(rf"[ ,]{re.escape(selector)}[,.]", option.help)


def test_a_group_without_a_batch_norm_is_named():
    entry = ZOO["flattened"]
    with pytest.raises(recoup.RecoupError, match=r"^0: bn-scale .* pass none.*exclude"):
        recoup.prune(
            entry.build(6), [entry.batch()], budget=recoup.Budget(macs=0.5), method=recoup.Paper(selector="bn-scale")
        )


def test_a_selector_of_ones_own_has_the_same_evidence():
    looked = []

    def by_energy(problem):
        energy = sum(values.square().transpose(0, 1).flatten(1).sum(1) for values in problem.evidence.maps())
        looked.append(problem.width)
        return torch.where(problem.free, energy, torch.inf).argsort(descending=True)

    entry = ZOO["residual"]
    for method in (recoup.Paper(selector=by_energy), recoup.Fast(selector=by_energy)):
        recoup.prune(entry.build(6), [entry.batch(60)], budget=recoup.Budget(macs=0.6), method=method)
    assert len(looked) == 2 * 4
