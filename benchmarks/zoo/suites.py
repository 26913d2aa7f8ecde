"""The networks, by suite: how to build each, what it reads, and which layers give its answer.

A suite takes the side of the images, None for the networks' own. A network that is made for one size keeps it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.torchvision_operators import define_missing_torchvision_operators
from torch import nn

from benchmarks.zoo.beyond import beyond_suite
from benchmarks.zoo.odd import ODD
from benchmarks.zoo.reading import images
from benchmarks.zoo.spec import Spec

define_missing_torchvision_operators()
import timm  # noqa: E402  # imports torchvision
import torchvision  # noqa: E402

FAMILIES = Path(__file__).with_name("families.json")
OWN = 224
SIZES = {"inception_v3": 299}  # torchvision's classifiers that do not read 224 x 224
FIXED = ("maxvit",)  # windows that have to fit


def torchvision_suite(size: int | None = None) -> dict[str, Spec]:
    """Every classifier of torchvision."""
    names = torchvision.models.list_models(module=torchvision.models)
    return {name: _torchvision_spec(name, size) for name in names}


def timm_suite(size: int | None = None) -> dict[str, Spec]:
    """The smallest network of each of timm's module files, frozen in families.json as {family: [name, size]}."""
    families: dict[str, tuple[str, int]] = json.loads(FAMILIES.read_text())
    return {name: _timm_spec(name, own, size) for name, own in families.values()}


def dense_suite(size: int | None = None) -> dict[str, Spec]:
    """Segmentation networks, and the backbones of detectors."""
    segmentation = ("fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large")
    pyramid = ("fpn.layer_blocks", "fpn.extra_blocks")
    last = ("features.0.13.0", "features.1.3", "extra.0.2", "extra.1.2", "extra.2.2", "extra.3.2")
    detection = {
        "ssdlite320_mobilenet_v3_large": (320, last),
        "retinanet_resnet50_fpn": (OWN, pyramid),
        "fasterrcnn_resnet50_fpn": (OWN, pyramid),
    }
    return {
        **{name: _pictures(functools.partial(_from_torchvision, name), size or OWN, 21) for name in segmentation},
        **{
            f"{name}.backbone": _pictures(functools.partial(_backbone, name), size or own, 0, heads)
            for name, (own, heads) in detection.items()
        },
    }


def odd_suite(_: int | None = None) -> dict[str, Spec]:
    """Small networks, one odd operation each; they have one size."""
    return {name: Spec(entry.factory, entry.reads, 0, entry.heads) for name, entry in ODD.items()}


SUITES: Mapping[str, Callable[[int | None], dict[str, Spec]]] = {
    "torchvision": torchvision_suite,
    "timm": timm_suite,
    "dense": dense_suite,
    "odd": odd_suite,
    "beyond": beyond_suite,
}


def _pictures(factory: Callable[[], nn.Module], size: int, classes: int = 1000, heads: tuple[str, ...] = ()) -> Spec:
    return Spec(factory, images(size), classes, heads, size)


def _torchvision_spec(name: str, size: int | None) -> Spec:
    if size is None or name.startswith(FIXED):
        return _pictures(functools.partial(_from_torchvision, name), SIZES.get(name, OWN))
    options = {"image_size": size} if name.startswith("vit") else {}
    return _pictures(functools.partial(_from_torchvision, name, **options), size)


def _timm_spec(name: str, own: int, size: int | None) -> Spec:
    configuration = timm.get_pretrained_cfg(name)
    is_fixed = configuration is not None and configuration.fixed_input_size
    return _pictures(functools.partial(_from_timm, name), own if is_fixed or size is None else size)


def _from_torchvision(name: str, **options: int) -> nn.Module:
    quiet = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}  # says so, or it warns
    model: nn.Module = torchvision.models.get_model(
        name, weights=None, **quiet, **options, **_no_backbone_weights(name)
    )
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
