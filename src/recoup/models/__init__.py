"""Networks by name, their weights from a file, and the small ones this package builds itself."""

from recoup.models.digits import digits_resnet, train_digits
from recoup.models.registry import OpenModel, open_model
from recoup.models.resnet import resnet20, resnet56
from recoup.models.vgg import vgg16_bn, vgg19_bn
from recoup.models.weights import load_weights

__all__ = [
    "OpenModel",
    "digits_resnet",
    "load_weights",
    "open_model",
    "resnet20",
    "resnet56",
    "train_digits",
    "vgg16_bn",
    "vgg19_bn",
]
