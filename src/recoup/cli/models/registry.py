"""Models by name: `recoup:vgg16_bn`, `torchvision:resnet50`, `timm:vit_tiny`, `hf:FOLDER`, or the user's own factory.

A name becomes an `OpenModel`: the network in evaluation mode, with its weights when a file is given, and the input it
expects. Nothing is ever downloaded.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from recoup.cli.importing import call_factory, import_library
from recoup.cli.input_spec import CIFAR, IMAGENET, InputSpec, unnormalised
from recoup.cli.models.bottleneck import resnet50
from recoup.cli.models.digits import demo_network, digits_resnet
from recoup.cli.models.pretrained import open_pretrained, vocabulary_of
from recoup.cli.models.resnet import resnet20, resnet56
from recoup.cli.models.vgg import vgg16_bn, vgg16_fc_bn, vgg19_bn
from recoup.cli.models.weights import load_weights
from recoup.errors import ModelError, UsageError

# Tokens that a language model is shown where only its wiring is looked at.
TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class OpenModel:
    """A network in evaluation mode, the input it expects, and the text it was opened by."""

    model: nn.Module
    input: InputSpec
    spec: str


def open_model(
    spec: str, weights: str | Path | None = None, *, classes: int | None = None, input: InputSpec | None = None
) -> OpenModel:
    """The model that `spec` names, with the weights of a file or fresh ones.

    Args:
        spec: `recoup:NAME`, `torchvision:NAME`, `timm:NAME`, `hf:FOLDER` as save_pretrained writes it,
            `package.module:factory` or `path/file.py:factory`; a factory takes no arguments and returns an `nn.Module`.
        weights: a `.safetensors` file or a PyTorch checkpoint; without it the weights are fresh.
        classes: how many classes the last layer tells apart, where the model lets one choose.
        input: replaces the input the model declares; a factory declares none and is given that of ImageNet.

    >>> open_model("recoup:resnet20").input.shape
    (3, 32, 32)

    Raises:
        UsageError: no such model, or `classes` that it cannot take.
        ModelError: a library is missing, or building the model or loading its weights failed.
    """
    if classes is not None and classes < 1:
        raise UsageError(f"'{spec}' cannot have {classes} classes. Ask for at least one.")
    source, _, name = spec.partition(":")
    built = _LIBRARIES[source](name, classes) if source in _LIBRARIES else _from_factory(spec, classes)
    if weights is not None:
        load_weights(built.model, weights)
    return OpenModel(built.model.eval(), input or built.input, spec)


@dataclass(frozen=True, slots=True, eq=False)
class _Built:
    model: nn.Module
    input: InputSpec


@dataclass(frozen=True, slots=True)
class _Own:
    """A model of this package: its builder takes `classes`."""

    build: Callable[..., nn.Module]
    input: InputSpec


# The public CIFAR ResNet checkpoints were trained with ImageNet's normalisation.
_CIFAR_RESNET = InputSpec(CIFAR.shape, IMAGENET.mean, IMAGENET.std)

_OWN = {
    "vgg16_bn": _Own(vgg16_bn, CIFAR),
    "vgg16_fc_bn": _Own(vgg16_fc_bn, CIFAR),
    "vgg19_bn": _Own(vgg19_bn, CIFAR),
    "resnet20": _Own(resnet20, _CIFAR_RESNET),
    "resnet56": _Own(resnet56, _CIFAR_RESNET),
    "resnet50": _Own(resnet50, CIFAR),
    "digits": _Own(digits_resnet, unnormalised((1, 8, 8))),
    "demo": _Own(demo_network, unnormalised((1, 8, 8))),
}


def _from_recoup(name: str, classes: int | None) -> _Built:
    _check_known(f"recoup:{name}", name, list(_OWN))
    own = _OWN[name]
    return _Built(own.build() if classes is None else own.build(classes=classes), own.input)


def _from_torchvision(name: str, classes: int | None) -> _Built:
    import_library("torchvision", "torchvision", ModelError)
    library = import_library("torchvision.models", "torchvision", ModelError)
    _check_known(f"torchvision:{name}", name, library.list_models())
    options: dict[str, Any] = {"weights": None, **_class_option(classes)}
    # Detectors and segmenters fetch trained backbones unless told otherwise.
    if "weights_backbone" in inspect.signature(library.get_model_builder(name)).parameters:
        options["weights_backbone"] = None
    model = _build(f"torchvision:{name}", lambda: library.get_model(name, **options))
    return _Built(model, _torchvision_input(library, name, model))


def _torchvision_input(library: ModuleType, name: str, model: nn.Module) -> InputSpec:
    """The crop its published weights were trained for, unless the model itself is built for one size."""
    published = list(library.get_model_weights(name))
    crop = getattr(published[0].transforms(), "crop_size", None) if published else None
    size = int(getattr(model, "image_size", crop[0] if crop else IMAGENET.shape[-1]))
    return InputSpec((3, size, size), IMAGENET.mean, IMAGENET.std)


def _from_timm(name: str, classes: int | None) -> _Built:
    library = import_library("timm", "timm", ModelError)
    if not library.is_model(name):
        _check_known(f"timm:{name}", name, library.list_models())
    model = _build(f"timm:{name}", lambda: library.create_model(name, pretrained=False, **_class_option(classes)))
    declared: Any = model.pretrained_cfg
    return _Built(model, InputSpec(tuple(declared["input_size"]), tuple(declared["mean"]), tuple(declared["std"])))


def _from_folder(name: str, classes: int | None) -> _Built:
    if classes is not None:
        raise UsageError(f"'hf:{name}' has the classes that it was saved with. Leave classes out.")
    model = open_pretrained(name)
    tokens = vocabulary_of(model)
    return _Built(model, unnormalised((TOKENS,), tokens) if tokens else IMAGENET)


def _from_factory(spec: str, classes: int | None) -> _Built:
    if ":" not in spec:
        raise _unknown(spec, spec, [f"recoup:{name}" for name in _OWN])
    if classes is not None:
        raise UsageError(
            f"'{spec}' is a factory without arguments, so {classes} classes cannot be asked of it. "
            "Leave classes out and let the factory build the right number."
        )
    model = call_factory(spec, ModelError)
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{spec}' returned a {type(model).__name__}. A model factory has to return an nn.Module.")
    return _Built(model, IMAGENET)


_LIBRARIES = {"recoup": _from_recoup, "torchvision": _from_torchvision, "timm": _from_timm, "hf": _from_folder}


def _class_option(classes: int | None) -> dict[str, int]:
    return {} if classes is None else {"num_classes": classes}


def _build(spec: str, build: Callable[[], nn.Module]) -> nn.Module:
    try:
        return build()
    except Exception as error:  # the library's constructors raise anything from TypeError to RuntimeError
        raise ModelError(
            f"'{spec}' could not be built: {type(error).__name__}: {error}. "
            "Leave classes out if they were given, or build it in a factory of your own and name that."
        ) from error


def _check_known(spec: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise _unknown(spec, name, known)


def _unknown(spec: str, name: str, known: Sequence[str]) -> UsageError:
    close = difflib.get_close_matches(name, known, n=5, cutoff=0.5) or sorted(known)[:5]
    return UsageError(
        f"There is no model '{spec}'. Did you mean one of {', '.join(close)}? Models are named recoup:NAME, "
        "torchvision:NAME, timm:NAME, hf:FOLDER, package.module:factory or path/file.py:factory."
    )
