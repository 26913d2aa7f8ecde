"""Detectors, and what shares their form: masks, poses, turned boxes, prompts."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.beyond.making import hugging_face, of
from benchmarks.zoo.reading import images, pixels
from benchmarks.zoo.spec import Spec

S = 64  # side of the images
CLASSES = 10
BACKBONE: dict[str, Any] = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 24, 32, 40],
    "depths": [1, 1, 1, 1],
}
ENDS: dict[str, Any] = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
WIDE: dict[str, Any] = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10}
ENCODER: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SAM: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mlp_dim": 64,
    "output_channels": 16,
}


def _yolo(name: str, kind: str = "DetectionModel", **options: Any) -> Spec:
    """A network of ultralytics, made of the description that it ships."""
    return of(f"ultralytics.nn.tasks:{kind}", images(S), cfg=f"{name}.yaml", ch=3, verbose=False, size=S, **options)


DETECTION = {
    "DETR": hugging_face(
        "DetrForObjectDetection",
        pixels(S),
        size=S,
        **ENDS,
        **WIDE,
        backbone_config={**BACKBONE, "out_features": ["stage4"]},
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
    ),
    "YOLOS": hugging_face(
        "YolosForObjectDetection",
        pixels(S),
        size=S,
        **ENCODER,
        image_size=[S, S],
        patch_size=16,
        num_detection_tokens=5,
    ),
    "SAM encoder": hugging_face(
        "SamVisionModel", pixels(S), size=S, **SAM, image_size=S, patch_size=8, window_size=4, global_attn_indexes=[1]
    ),
    "YOLOv5n": _yolo("yolov5n", nc=CLASSES),
    "YOLOv8n": _yolo("yolov8n", nc=CLASSES),
    "YOLOv9t": _yolo("yolov9t", nc=CLASSES),
    "YOLOv10n": _yolo("yolov10n", nc=CLASSES),
    "YOLO11n": _yolo("yolo11n", nc=CLASSES),
    "YOLO12n": _yolo("yolo12n", nc=CLASSES),
    "YOLOv8n-seg": _yolo("yolov8n-seg", "SegmentationModel", nc=CLASSES),
    "YOLOv8n-pose": _yolo("yolov8n-pose", "PoseModel", data_kpt_shape=(5, 3)),
    "YOLOv8n-obb": _yolo("yolov8n-obb", "OBBModel", nc=CLASSES),
    "YOLOv8n-cls": _yolo("yolov8n-cls", "ClassificationModel", nc=CLASSES),
    "YOLO11n-seg": _yolo("yolo11n-seg", "SegmentationModel", nc=CLASSES),
    "RT-DETR": _yolo("rtdetr-resnet50", "RTDETRDetectionModel", nc=CLASSES),
}
