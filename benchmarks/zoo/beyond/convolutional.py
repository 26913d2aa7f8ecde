"""Families of convolutional networks, a small one of each: pytorchcv."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from benchmarks.zoo.beyond.making import of
from benchmarks.zoo.reading import images
from benchmarks.zoo.spec import Spec

# Side of the images: {network: side}.
CLASSIFIERS = {
    "bam_resnet18": 224,
    "cbam_resnet18": 224,
    "channelnet": 224,
    "condensenet74_c8_g8": 224,
    "darknet_tiny": 224,
    "densenet40_k12_cifar10": 32,
    "diaresnet20_cifar10": 32,
    "dicenet_wd5": 32,
    "diracnet18v2": 224,
    "efficientnet_b0": 32,
    "espnetv2_wd2": 224,
    "fbnet_cb": 224,
    "fdmobilenet_wd4": 224,
    "ghostnet": 224,
    "hardnet39ds": 224,
    "igcv3_wd4": 224,
    "menet108_8x1_g3": 224,
    "mixnet_s": 224,
    "mnasnet_small": 224,
    "mobilenet_wd4": 224,
    "mobilenetv2_wd4": 224,
    "mobilenetv3_small_w7d20": 224,
    "msdnet22": 224,
    "nasnet_4a1056": 224,
    "nin_cifar10": 32,
    "octresnet10_ad2": 224,
    "peleenet": 224,
    "preresnet20_cifar10": 32,
    "proxylessnas_cpu": 224,
    "pyramidnet110_a48_cifar10": 32,
    "regnetx002": 32,
    "resnet20_cifar10": 32,
    "resneta10": 32,
    "resnext20_16x4d_cifar10": 32,
    "ror3_56_cifar10": 32,
    "seresnet20_cifar10": 32,
    "shakeshakeresnet20_2x16d_cifar10": 32,
    "shufflenet_g3_wd4": 224,
    "shufflenetv2_wd2": 224,
    "spnasnet": 224,
    "sqnxt23_w1": 224,
    "squeezenet_v1_1": 224,
    "xdensenet40_2_k24_bc_cifar10": 32,
}
DENSE = {
    "cgnet_cityscapes": 64,
    "ctxnet_cityscapes": 64,
    "dabnet_cityscapes": 64,
    "edanet_cityscapes": 64,
    "enet_cityscapes": 64,
    "erfnet_cityscapes": 64,
    "esnet_cityscapes": 64,
    "espcnet_cityscapes": 64,
    "fpenet_cityscapes": 64,
    "lednet_cityscapes": 64,
    "lffd20x5s320v2_widerface": 128,
    "linknet_cityscapes": 64,
    "simplepose_resnet18_coco": 64,
    "sinet_cityscapes": 128,
}


def _pytorchcv(name: str, size: int) -> Spec:
    spec = of("pytorchcv.model_provider:get_model", images(size), name, size=size)
    return dataclasses.replace(spec, factory=lambda: with_places(spec.factory()))


def with_places(model: nn.Module) -> nn.Module:
    """`model`, in which layers that choose their inputs by number choose different ones.

    CondenseNet learns these numbers. In a fresh network all of them are 0: every layer would read one channel.
    """
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] == "index" and not buffer.is_floating_point() and not bool(buffer.any()):
            buffer.copy_(torch.randperm(len(buffer)))
    return model


CONVOLUTIONAL = {name: _pytorchcv(name, size) for name, size in {**CLASSIFIERS, **DENSE}.items()}
