"""Transformers and their like that read images, as Hugging Face has them."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.beyond.making import LIVELY, hugging_face
from benchmarks.zoo.reading import both, pixels, tokens

S = 32  # side of the images
ENCODER: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
PATCHES: dict[str, Any] = {**ENCODER, "image_size": S, "patch_size": 8}
STAGES: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 40]}
WINDOWS: dict[str, Any] = {
    "image_size": S,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
SEG: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 2, 2, 4]}
MOBILE: dict[str, Any] = {
    "image_size": 64,
    "hidden_sizes": [24, 32, 40],
    "neck_hidden_sizes": [8, 16, 16, 24, 32, 40, 64],
}
READERS: dict[str, Any] = {
    "vision_config": {**LIVELY, **PATCHES},
    "text_config": {**LIVELY, **ENCODER, "vocab_size": 100, "eos_token_id": 99},
}

VISION = {
    "ViT": hugging_face("ViTForImageClassification", pixels(S), size=S, **PATCHES),
    "DeiT": hugging_face("DeiTForImageClassification", pixels(S), size=S, **PATCHES),
    "DINOv2": hugging_face("Dinov2ForImageClassification", pixels(S), size=S, **PATCHES, mlp_ratio=2),
    "BEiT": hugging_face("BeitForImageClassification", pixels(S), size=S, **PATCHES, use_relative_position_bias=True),
    "Swin": hugging_face("SwinForImageClassification", pixels(S), size=S, **WINDOWS),
    "SwinV2": hugging_face("Swinv2ForImageClassification", pixels(S), size=S, **WINDOWS),
    "ConvNeXt": hugging_face("ConvNextForImageClassification", pixels(S), size=S, **STAGES),
    "ConvNeXtV2": hugging_face("ConvNextV2ForImageClassification", pixels(S), size=S, **STAGES),
    "ResNet": hugging_face("ResNetForImageClassification", pixels(S), size=S, embedding_size=16, **STAGES),
    "SegFormer": hugging_face("SegformerForSemanticSegmentation", pixels(64), size=64, decoder_hidden_size=32, **SEG),
    "MobileViT": hugging_face("MobileViTForImageClassification", pixels(64), size=64, **MOBILE),
    "CLIP": hugging_face("CLIPModel", both(tokens(100, 12), pixel_values=pixels(S)), size=S, **READERS),
    "SigLIP": hugging_face("SiglipVisionModel", pixels(S), size=S, **PATCHES),
}
