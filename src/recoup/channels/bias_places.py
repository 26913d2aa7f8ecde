"""Where the bias of a layer is kept, and which biases no layer may change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from recoup.graph.capture import Captured
from recoup.graph.usage import biases_read_elsewhere
from recoup.labels.constraints import Product


def places_of_biases(
    products: Iterable[Product], model: nn.Module, tensors: Mapping[str, Tensor], shared: frozenset[str]
) -> dict[Product, str | None]:
    """For every call of a layer the name of the bias it has a place for; `shared` ones are nobody's."""
    return {product: None if product.bias in shared else place_of_bias(model, tensors, product) for product in products}


def shared_biases(products: Iterable[Product], captured: Captured) -> frozenset[str]:
    """Names of biases that layers of several weights add, or that somebody else reads: no layer may change them."""
    weights: dict[str, set[str]] = {}
    for product in products:
        if product.bias is not None:
            weights.setdefault(product.bias, set()).add(product.weight)
    return frozenset(name for name, of in weights.items() if len(of) > 1) | biases_read_elsewhere(captured)


def place_of_bias(model: nn.Module, tensors: Mapping[str, Tensor], product: Product) -> str | None:
    """Name of the bias that the call adds, now or once its layer has one; None where there is no place for it."""
    if product.bias in tensors:
        return product.bias
    owner = product.weight.rpartition(".")[0]
    is_known = product.where in dict(model.named_modules(remove_duplicate=False))
    where = product.where if is_known else owner  # a module made in forward, as by a slice, has no name in the model
    if product.weight not in tensors:
        return None
    module = model.get_submodule(where)
    if module._parameters.get("weight") is not tensors[product.weight]:
        return None
    can_have_one = isinstance(module, (_ConvNd, nn.Linear)) and module.bias is None
    return f"{where}.bias" if is_known and can_have_one else None
