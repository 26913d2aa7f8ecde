"""Networks by name, their weights from a file, and the small ones this package builds itself."""

from recoup.cli.models.bottleneck import resnet50
from recoup.cli.models.digits import digits_resnet, train_digits
from recoup.cli.models.registry import OpenModel, open_model
from recoup.cli.models.resnet import resnet20, resnet56
from recoup.cli.models.vgg import vgg16_bn, vgg16_fc_bn, vgg19_bn
from recoup.cli.models.weights import load_weights

__all__ = [
    "OpenModel",
    "digits_resnet",
    "load_weights",
    "open_model",
    "resnet20",
    "resnet50",
    "resnet56",
    "train_digits",
    "vgg16_bn",
    "vgg16_fc_bn",
    "vgg19_bn",
]
