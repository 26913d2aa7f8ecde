"""Networks that give an image back, larger or cleaner: spandrel."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.beyond.making import of
from benchmarks.zoo.reading import images
from benchmarks.zoo.spec import Spec

S = 32  # side of the images
WINDOWS: dict[str, Any] = {
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 8,
    "mlp_ratio": 2.0,
    "img_size": S,
}


def _spandrel(place: str, name: str, channels: int = 3, **options: Any) -> Spec:
    folder, _, file = place.partition("/")
    return of(f"spandrel.architectures.{folder}.__arch.{file}:{name}", images(S, channels), size=S, **options)


RESTORATION = {
    "SwinIR": _spandrel("SwinIR/SwinIR", "SwinIR", **WINDOWS, upscale=2, upsampler="pixelshuffledirect"),
    "Swin2SR": _spandrel("Swin2SR/Swin2SR", "Swin2SR", **WINDOWS, upscale=2, upsampler="pixelshuffledirect"),
    "HAT": _spandrel("HAT/HAT", "HAT", **WINDOWS, upscale=2, compress_ratio=3, squeeze_factor=4, num_feat=16),
    "SPAN": _spandrel("SPAN/span", "SPAN", num_in_ch=3, num_out_ch=3, feature_channels=16, upscale=2),
    "NAFNet": _spandrel("NAFNet/NAFNet_arch", "NAFNet", width=8, enc_blk_nums=[1, 1], dec_blk_nums=[1, 1]),
    "RCAN": _spandrel("RCAN/rcan_arch", "RCAN", scale=2, n_resgroups=2, n_resblocks=2, n_feats=16, reduction=4),
    "Compact": _spandrel("Compact/SRVGG", "SRVGGNetCompact", num_feat=16, num_conv=4, upscale=2),
    "DnCNN": _spandrel("DnCNN/network_dncnn", "DnCNN", 1, nc=16, nb=5),
    "DRUNet": _spandrel("DRUNet/network_unet", "DRUNet", 1, nc=[8, 16, 16, 32], nb=1),
    "SAFMN": _spandrel("SAFMN/safmn", "SAFMN", dim=16, n_blocks=2, upscaling_factor=2),
    "RealPLKSR": _spandrel("PLKSR/RealPLKSR", "RealPLKSR", dim=16, n_blocks=2, upscaling_factor=2),
    "OmniSR": _spandrel("OmniSR/OmniSR", "OmniSR", num_feat=16, up_scale=2),
    "ESRGAN": _spandrel("ESRGAN/RRDB", "RRDBNet", num_filters=16, num_blocks=2, scale=2),
}
