"""Networks that give a class to every pixel or voxel: segmentation_models_pytorch and MONAI."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.beyond.making import of
from benchmarks.zoo.reading import images, tensors
from benchmarks.zoo.spec import Spec

S = 64  # side of the images
SIDE = 32  # of the volumes
CLASSES = 5
VOLUME = tensors((1, SIDE, SIDE, SIDE))
STEPS: dict[str, Any] = {"channels": (8, 16, 32), "strides": (2, 2)}
ENDS: dict[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": CLASSES}


def _smp(name: str, encoder: str = "resnet18", size: int = S, **options: Any) -> Spec:
    """A network of segmentation_models_pytorch on an encoder without weights."""
    where = f"segmentation_models_pytorch:{name}"
    return of(where, images(size), encoder, encoder_weights=None, classes=CLASSES, size=size, **options)


def _monai(name: str, *, flat: bool = False, **options: Any) -> Spec:
    """A network of MONAI for volumes, or for images."""
    size = S if flat else SIDE
    given = {**ENDS, **({"spatial_dims": 2} if flat else {}), **options}
    reads = tensors((1, S, S)) if flat else VOLUME
    return of(f"monai.networks.nets:{name}", reads, size=size, **given)


SEGMENTATION = {
    "smp Unet": _smp("Unet"),
    "smp Unet, attention": _smp("Unet", decoder_attention_type="scse"),
    "smp Unet++": _smp("UnetPlusPlus"),
    "smp FPN": _smp("FPN"),
    "smp DeepLabV3": _smp("DeepLabV3"),
    "smp DeepLabV3+": _smp("DeepLabV3Plus", "mobilenet_v2"),
    "smp PSPNet": _smp("PSPNet"),
    "smp PAN": _smp("PAN", size=128),
    "smp Linknet": _smp("Linknet"),
    "smp MAnet": _smp("MAnet"),
    "smp UPerNet": _smp("UPerNet"),
    "smp Segformer": _smp("Segformer", "mit_b0"),
    "MONAI UNet": _monai("UNet", **STEPS, num_res_units=1),
    "MONAI UNet, images": _monai("UNet", flat=True, **STEPS, norm="BATCH"),
    "MONAI AttentionUnet": _monai("AttentionUnet", **STEPS),
    "MONAI BasicUNet": _monai("BasicUNet", features=(8, 8, 16, 16, 32, 8)),
    "MONAI SegResNet": _monai("SegResNet"),
    "MONAI VNet": _monai("VNet", flat=True),
    "MONAI UNETR": _monai("UNETR", img_size=(SIDE,) * 3, feature_size=8, hidden_size=32, mlp_dim=64, num_heads=4),
    "MONAI SwinUNETR": _monai("SwinUNETR", flat=True, feature_size=12, depths=(1, 1, 1, 1), num_heads=(2, 2, 4, 4)),
    "MONAI DenseNet": _monai("DenseNet121", flat=True, init_features=16, growth_rate=8, block_config=(2, 2, 2)),
    "MONAI HighResNet": _monai("HighResNet", flat=True),
    "MONAI MedNeXt": _monai("MedNeXt", flat=True, init_filters=8),
}
