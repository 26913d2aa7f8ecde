"""Networks beyond classifiers of images, by family: small configurations with random weights, one line each."""

from __future__ import annotations

from benchmarks.zoo.beyond.audio import AUDIO
from benchmarks.zoo.beyond.convolutional import CONVOLUTIONAL
from benchmarks.zoo.beyond.detection import DETECTION
from benchmarks.zoo.beyond.diffusion import DIFFUSION
from benchmarks.zoo.beyond.language import LANGUAGE
from benchmarks.zoo.beyond.recurrent import RECURRENT
from benchmarks.zoo.beyond.restoration import RESTORATION
from benchmarks.zoo.beyond.segmentation import SEGMENTATION
from benchmarks.zoo.beyond.vision import VISION
from benchmarks.zoo.spec import Spec

FAMILIES = (VISION, DETECTION, SEGMENTATION, CONVOLUTIONAL, RESTORATION, DIFFUSION, AUDIO, LANGUAGE, RECURRENT)


def beyond_suite(_: int | None = None) -> dict[str, Spec]:
    """Every family, in this order; each network has one size."""
    return {name: spec for family in FAMILIES for name, spec in family.items()}
