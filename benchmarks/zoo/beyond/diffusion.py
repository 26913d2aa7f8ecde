"""Networks of diffusion models: diffusers."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.beyond.making import of
from benchmarks.zoo.reading import Reads, images, named, numbers, tensors
from benchmarks.zoo.spec import Spec

S = 16  # side of the images
STEPS = 1000  # of the noise
WIDTHS: dict[str, Any] = {"sample_size": S, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}


def _noisy(name: str, channels: int, **more: Reads) -> Reads:
    """Images under that name, and the step that each of them is at."""
    return named(**{name: images(S, channels), "timestep": numbers(STEPS), **more})


def _diffusers(name: str, reads: Reads, **options: Any) -> Spec:
    return of(f"diffusers:{name}", reads, size=S, **options)


DIFFUSION = {
    "UNet2D": _diffusers(
        "UNet2DModel",
        _noisy("sample", 3),
        **WIDTHS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    ),
    "UNet2DCondition": _diffusers(
        "UNet2DConditionModel",
        _noisy("sample", 4, encoder_hidden_states=tensors((6, 24))),
        **WIDTHS,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=4,
    ),
    "AutoencoderKL": _diffusers(
        "AutoencoderKL",
        images(S),
        **WIDTHS,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "DiT": _diffusers(
        "DiTTransformer2DModel",
        _noisy("hidden_states", 4, class_labels=numbers(10)),
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        sample_size=S,
        norm_num_groups=4,
        num_embeds_ada_norm=STEPS,
    ),
    "ControlNet": _diffusers(
        "ControlNetModel",
        _noisy("sample", 4, encoder_hidden_states=tensors((6, 24)), controlnet_cond=images(S * 8)),
        **{name: value for name, value in WIDTHS.items() if name != "sample_size"},
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=4,
    ),
}
