"""Networks for the rivals' tests whose answer is known: half of the channels of every group do nothing."""

from __future__ import annotations

import torch
from benchmarks.rivals import amc, cac, dcp, gal, metapruning, sfp
from benchmarks.rivals.channels import Subject, subject_of
from benchmarks.rivals.training import Schedule
from torch import Tensor, nn

import recoup
from recoup.channels.cost import cost
from tests import zoo

# Which of the eight channels of a group are alive.
ALIVE = torch.tensor([True, False, False, True, True, False, True, False])
NONE = Schedule(epochs=0, rate=0.1, batch=32, augment=False)
BRIEF = Schedule(epochs=2, rate=0.02, batch=32, augment=False)
# Every recipe in a second.
SMALL = {
    "dcp": dcp.Settings(share=0.5, losses=1, images=8, training=BRIEF, tuning=BRIEF),
    "gal": gal.Settings(share=0.5, mask_every=2, masks=BRIEF, tuning=BRIEF),
    "metapruning": metapruning.Settings(
        share=0.5, hidden=4, generations=2, population=4, parents=2, generators=BRIEF, tuning=BRIEF
    ),
    "cac": cac.Settings(share=0.5, pruning=BRIEF, tuning=BRIEF),
    "sfp": sfp.Settings(share=0.5, training=BRIEF),
    "amc": amc.Settings(share=0.5, walks=4, random_walks=2, hidden=8, tuning=BRIEF),
}


def residual(width: int = 24) -> nn.Module:
    """A network with coupled channels."""
    with zoo.seeded(0):
        return zoo.Residual(width).eval()


def half_dead(*, norms: bool = True) -> nn.Sequential:
    """Two groups of eight channels, four of each dead: nothing makes them and nothing reads them."""
    with zoo.seeded(3):
        first, second, head = zoo.conv_bn(3, 8), zoo.conv_bn(8, 8), nn.Linear(8, 4)
        model = nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).eval()
    if not norms:
        first[1], second[1] = nn.Identity(), nn.Identity()
    with torch.no_grad():
        second[0].weight += 0.05  # what it reads is positive: none of the living sleeps on all images
        for block in (first, second):
            for parameter in block.parameters():
                parameter[~ALIVE] = 0
        for reader in (second[0], head):
            reader.weight[:, ~ALIVE] = 0
            reader.weight *= 3  # so that what is alive counts
        head.bias -= model(pictures()).mean(0)  # so that no class is the answer to everything
    return model


def pictures(count: int = 96) -> Tensor:
    """Random images that differ in their means, so that pooling does not make them alike."""
    with zoo.seeded(4):
        return torch.randn(count, 3, 6, 6) + torch.randn(count, 3, 1, 1)


def labelled(model: nn.Module, images: Tensor) -> Tensor:
    """What the model says."""
    with torch.no_grad():
        return model(images).argmax(1)


def share_of_the_living(model: nn.Module, images: Tensor) -> float:
    """The share of the MACs that is left without the dead."""
    structure = recoup.trace(model, images[:1]).structure
    keep = alive(structure)
    return cost(structure, model, keep).macs / cost(structure, model).macs


def alive(structure) -> Tensor:
    """The mask over all channels of those that are not dead."""
    keep = structure.keep_all()
    for group in structure.prunable:
        keep[group.channels] = ALIVE
    return keep


def subject(*, norms: bool = True) -> tuple[Subject, Tensor, Tensor]:
    """The half-dead network with room for the living alone, images and labels."""
    model, images = half_dead(norms=norms), pictures()
    return subject_of(model, images, share_of_the_living(model, images)), images, labelled(model, images)
