"""The networks, by suite: how to build each, what it reads, and which layers give its answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.torchvision_operators import define_missing_torchvision_operators
from torch import Tensor, nn

from benchmarks.zoo.odd import ODD
from benchmarks.zoo.randomise import randomise

define_missing_torchvision_operators()
import timm  # noqa: E402  # imports torchvision
import torchvision  # noqa: E402

SEED = 0
FAMILIES = Path(__file__).with_name("families.json")
SIZES = {"inception_v3": 299}  # torchvision's classifiers that do not read 224 x 224


@dataclass(frozen=True, slots=True)
class Spec:
    """A network: its constructor, the shape of each input without the batch, and what must not lose outputs.

    Layers of `classes` outputs, and those named in `heads`, give the answer. `vocabulary` is the number of tokens where
    the inputs are token numbers.
    """

    factory: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((3, 224, 224),)
    classes: int = 1000
    heads: tuple[str, ...] = ()
    vocabulary: int | None = None

    def build(self) -> nn.Module:
        """The network in eval mode, the same at every call, with nothing left at zero or one."""
        torch.manual_seed(SEED)
        return randomise(self.factory(), self.example(2), SEED)

    def example(self, samples: int) -> tuple[Tensor, ...]:
        """Random inputs for one call."""
        generator = torch.Generator().manual_seed(SEED)
        if self.vocabulary is not None:
            limit = self.vocabulary
            return tuple(torch.randint(limit, (samples, *shape), generator=generator) for shape in self.shapes)
        return tuple(torch.randn(samples, *shape, generator=generator) for shape in self.shapes)


def torchvision_suite() -> dict[str, Spec]:
    """Every classifier of torchvision."""
    names = torchvision.models.list_models(module=torchvision.models)
    return {name: Spec(functools.partial(_from_torchvision, name), _image(SIZES.get(name, 224))) for name in names}


def timm_suite() -> dict[str, Spec]:
    """The smallest network of each of timm's module files, frozen in families.json as {family: [name, size]}."""
    families: dict[str, tuple[str, int]] = json.loads(FAMILIES.read_text())
    return {name: Spec(functools.partial(_from_timm, name), _image(size)) for name, size in families.values()}


def dense_suite() -> dict[str, Spec]:
    """Segmentation networks, and the backbones of detectors."""
    segmentation = ("fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large")
    pyramid = ("fpn.layer_blocks", "fpn.extra_blocks")
    last = ("features.0.13.0", "features.1.3", "extra.0.2", "extra.1.2", "extra.2.2", "extra.3.2")
    detection = {
        "ssdlite320_mobilenet_v3_large": (320, last),
        "retinanet_resnet50_fpn": (224, pyramid),
        "fasterrcnn_resnet50_fpn": (224, pyramid),
    }
    return {
        **{name: Spec(functools.partial(_from_torchvision, name), classes=21) for name in segmentation},
        **{
            f"{name}.backbone": Spec(functools.partial(_backbone, name), _image(size), 0, heads)
            for name, (size, heads) in detection.items()
        },
    }


def odd_suite() -> dict[str, Spec]:
    """Small networks, one odd operation each."""
    return {name: Spec(entry.factory, entry.shapes, 0, entry.heads, entry.vocabulary) for name, entry in ODD.items()}


SUITES: Mapping[str, Callable[[], dict[str, Spec]]] = {
    "torchvision": torchvision_suite,
    "timm": timm_suite,
    "dense": dense_suite,
    "odd": odd_suite,
}


def _image(size: int) -> tuple[tuple[int, ...], ...]:
    return ((3, size, size),)


def _from_torchvision(name: str) -> nn.Module:
    options = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}  # says so, or it warns
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options, **_no_backbone_weights(name))
    return model


def _no_backbone_weights(name: str) -> dict[str, None]:
    is_classifier = name in torchvision.models.list_models(module=torchvision.models)
    return {} if is_classifier else {"weights_backbone": None}


def _from_timm(name: str) -> nn.Module:
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=1000)
    return model


def _backbone(name: str) -> nn.Module:
    backbone = _from_torchvision(name).backbone
    assert isinstance(backbone, nn.Module)
    return backbone
