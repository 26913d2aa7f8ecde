"""Options that several commands share, and the texts that explain how models and data are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

NAMES = """\b
Models:  recoup:NAME       vgg16_bn, vgg16_fc_bn, vgg19_bn, resnet20, resnet50, resnet56, digits
         torchvision:NAME  timm:NAME  hf:FOLDER, as save_pretrained writes it
         package.module:factory or path/file.py:factory, without arguments
Data:    cifar10:DIR  cifar100:DIR  imagenet:DIR  voc:DIR   with @train, @test, ...
         folder:DIR                  one folder per class, or images alone
         text:PATH  text:PATH?tokenizer=FOLDER&block=256   bytes, or tokens of a tokeniser
         digits  digits@train  noise:1024
         package.module:factory or path/file.py:factory of batches
"""


def combined(*options: Decorator) -> Decorator:
    """One decorator that adds all of `options`, in the order in which help lists them."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def folder_option(*, required: bool, help: str) -> Decorator:
    """`-o DIR`."""
    kind = click.Path(path_type=Path)
    return click.option("-o", "--output", metavar="DIR", type=kind, required=required, help=help)


def number_of_images(name: str, help: str) -> Decorator:
    """An option that takes a positive number of images."""
    return click.option(name, metavar="N", type=click.IntRange(min=1), help=help)


common_options = combined(
    click.option(
        "--device", default="cpu", show_default=True, metavar="NAME", help="Where to compute: cpu, cuda, cuda:1."
    ),
    click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Random seed."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else."),
)

weights_option = click.option("--weights", metavar="FILE", help="State dict: .safetensors or a PyTorch checkpoint.")

shape_option = click.option(
    "--input", "shape", metavar="C,H,W", help="Shape of one input, such as 3,32,32, where the model does not say."
)

normalise_option = click.option(
    "--normalise",
    type=click.Choice(["cifar", "imagenet", "none"]),
    help="How images in [0, 1] are normalised, where the model does not say or says otherwise.",
)

batch_size_option = click.option(
    "--batch-size", default=250, show_default=True, type=click.IntRange(min=1), metavar="N", help="Images at a time."
)

choice_options = combined(
    click.option(
        "--only", metavar="NAME", multiple=True, help="Prune only this group or module; wildcards; repeatable."
    ),
    click.option("--exclude", metavar="NAME", multiple=True, help="Leave this group or module alone; repeatable."),
    click.option(
        "--keep-class/--standalone",
        default=None,
        help="Lock what the model's class cannot hold, or return a standalone graph wherever there is any.",
    ),
    click.option("--keep-config", is_flag=True, help="Prune what the model's config can tell, equally in all layers."),
)
