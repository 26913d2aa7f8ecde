"""Streams that can be turned: all that makes, carries and reads them is linear in their channels, but for norms.

In another orthonormal basis LayerNorm and RMSNorm compute the same, once their gains are in the layers behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from recoup.channels.groups import resolve
from recoup.channels.norm_paths import makes_channels, passes_on
from recoup.channels.propagate import propagate
from recoup.channels.settling import with_whole_streams
from recoup.channels.structure import Group, Site, Structure, named_tensors, numbers
from recoup.graph.biases import with_biases
from recoup.graph.capture import Captured, capture, module_path
from recoup.inputs.batches import Inputs
from recoup.labels.arrays import core
from recoup.labels.constraints import Norm, Product
from recoup.operators.names import operation_name
from recoup.operators.record import operator_of

# Behind a norm, what changes the scale would change what its bias adds.
_RESCALES = ("sum", "mul", "div")


@dataclass(frozen=True, slots=True)
class StreamReader:
    """A layer that reads a stream along `dim` of its weight, behind a norm of that `gain` and `shift` or behind none.

    `bias` names its own bias, new to it or not, where it has a place for one.
    """

    weight: str
    dim: int
    bias: str | None
    gain: str | None
    shift: str | None


@dataclass(frozen=True, slots=True, eq=False)
class NormedStream:
    """A group of channels that can be turned: what makes it, its norms, what reads it.

    `sites` are all places of its channels in tensors. The mean over the channels is taken off wherever it is read, if
    it `is_centred`.
    """

    group: Group
    makers: tuple[Site, ...]
    norms: tuple[Norm, ...]
    readers: tuple[StreamReader, ...]
    is_centred: bool
    sites: tuple[Site, ...]

    def site(self, tensor: str, dim: int) -> Site:
        """Where the channels lie in a tensor."""
        return next(site for site in self.sites if (site.tensor, site.dim) == (tensor, dim))

    def places(self, site: Site) -> tuple[Tensor, Tensor]:
        """Indices of a tensor that belong to the stream, and the channel of each, from 0."""
        inside = _inside(site.channel_of, self.group).nonzero().squeeze(1)
        return inside, site.channel_of[inside] - self.group.start


@dataclass(frozen=True, slots=True, eq=False)
class NormedStreams:
    """The streams of a network that can be turned, and why others cannot, by group."""

    found: tuple[NormedStream, ...]
    refused: Mapping[str, str]


class _CannotTurnError(Exception):
    """Why a stream cannot be turned."""


def streams_of(model: nn.Module, sample: Inputs) -> NormedStreams:
    """What of a model can be turned; `sample` is a batch of one."""
    captured, _ = with_biases(capture(model, sample))
    propagated = propagate(captured, frees_norms=True)
    structure, numbering = resolve(propagated, model, captured)
    structure = with_whole_streams(structure)
    channels = {node: _channels(propagated.labels.get(node.name), numbering) for node in captured.graph.nodes}
    found, refused = [], {}
    for group in structure.groups:
        norms = tuple(norm for norm in structure.norms if bool(_inside(norm.channels, group).any()))
        if norms:
            try:
                found.append(_StreamSearch(model, captured, structure, channels, group, norms).stream())
            except _CannotTurnError as reason:
                refused[group.name] = str(reason)
    return NormedStreams(tuple(found), refused)


@dataclass(slots=True, eq=False)
class _StreamSearch:
    """One group: which values carry its channels, as they are (`raw`) or behind which norm."""

    model: nn.Module
    captured: Captured
    structure: Structure
    channels: Mapping[fx.Node, Tensor]
    group: Group
    norms: tuple[Norm, ...]
    raw: set[fx.Node] = field(default_factory=set)
    behind: dict[fx.Node, Norm] = field(default_factory=dict)

    def stream(self) -> NormedStream:
        """All of it, or the reason why not."""
        if self.group.free < self.group.width:
            raise _CannotTurnError(self.group.reasons[0])
        for node in self.captured.graph.nodes:
            self._follow(node)
        is_centred = any(norm.is_centred for norm in self.norms)
        if not all(sorted(norm.channels.tolist()) == list(range(*self._range)) for norm in self.norms):
            raise _CannotTurnError(f"{self.norms[0].site} sees a part of it, or more")
        readers = tuple(dict.fromkeys(self._readers(is_centred)))
        sites = self._sites(readers)
        used = {(reader.weight, reader.dim) for reader in readers} | {(norm.gain, 0) for norm in self.norms}
        used |= {(norm.bias, 0) for norm in self.norms if norm.bias is not None}
        makers = tuple(site for site in sites if (site.tensor, site.dim) not in used)
        return NormedStream(self.group, makers, self.norms, readers, is_centred, sites)

    @property
    def _range(self) -> tuple[int, int]:
        return self.group.start, self.group.start + self.group.width

    def _follow(self, node: fx.Node) -> None:
        """Say whether a value carries channels, and how; refuse what is not linear in them."""
        inputs = [source for source in node.all_input_nodes if source in self.raw or source in self.behind]
        norm = next((norm for norm in self.norms if norm.node == node.name), None)
        if node.op == "placeholder":
            sources = frozenset[str]().union(*(norm.sources for norm in self.norms))
            if self.captured.tensors.get(node.name) in sources and not self._is_of_layer(node):
                self.raw.add(node)
        elif norm is not None:
            self.behind[node] = norm
        elif node.op == "call_function" and makes_channels(node, operator_of(node.target)):
            self._require_read_once(node, inputs)
            self.raw |= {node} if self._carries(node) else set()
        elif inputs and not (node.op == "call_function" and operator_of(node.target).is_check):
            self._pass_on(node, inputs)

    def _pass_on(self, node: fx.Node, inputs: list[fx.Node]) -> None:
        is_linear = node.op == "call_function" and passes_on(node, operator_of(node.target)) and self._carries(node)
        if is_linear and all(source in self.raw for source in inputs):
            self.raw.add(node)
        elif is_linear and len(inputs) == 1 and not self._rescales(node, self.behind[inputs[0]]):
            self.behind[node] = self.behind[inputs[0]]
        else:
            raise _CannotTurnError("the model returns it" if node.op == "output" else _not_linear(node))

    def _rescales(self, node: fx.Node, norm: Norm) -> bool:
        return operation_name(node.target) in _RESCALES and self._has_bias(norm)

    def _has_bias(self, norm: Norm) -> bool:
        return norm.bias is not None and bool(named_tensors(self.model)[norm.bias].any())

    def _carries(self, node: fx.Node) -> bool:
        return bool(_inside(self.channels[node], self.group).any())

    def _is_of_layer(self, node: fx.Node) -> bool:
        """Whether a stored tensor is only seen through the layers it belongs to."""
        return all(makes_channels(user, operator_of(user.target)) for user in node.users)

    def _require_read_once(self, node: fx.Node, inputs: list[fx.Node]) -> None:
        """A layer reads channels by its weight; an input that is none of its own is another matter."""
        if inputs and inputs != [_read_by(node)]:
            raise _CannotTurnError(_not_linear(node))

    def _readers(self, is_centred: bool) -> Iterator[StreamReader]:
        """The layers that read it, each in one way."""
        nodes = {node.name: node for node in self.captured.graph.nodes}
        ways: dict[str, StreamReader] = {}
        for product in self.structure.products:
            value = _read_by(nodes[product.node])
            if value not in self.raw and value not in self.behind:
                continue
            norm = self.behind.get(value)
            if is_centred and (norm is None or not norm.is_centred):
                raise _CannotTurnError(f"{product.weight} reads it with its mean, and a LayerNorm without")
            reader = self._reader(product, norm)
            if ways.setdefault(product.weight, reader) != reader:
                raise _CannotTurnError(f"{product.weight} reads it in several ways")
            yield reader

    def _reader(self, product: Product, norm: Norm | None) -> StreamReader:
        consumer = next((c for c in self.structure.consumers if c.weight == product.weight), None)
        if product.input_dim is None or consumer is None:
            raise _CannotTurnError(f"{product.weight} reads it in groups")
        bias = consumer.biases[0] if len(consumer.biases) == 1 else None
        if norm is None:
            return StreamReader(product.weight, product.input_dim, bias, None, None)
        if self._has_bias(norm) and (bias is None or product.kernel > 1):
            raise _CannotTurnError(f"{product.weight} cannot take in what {norm.bias} adds")
        return StreamReader(product.weight, product.input_dim, bias, norm.gain, norm.bias)

    def _sites(self, readers: tuple[StreamReader, ...]) -> tuple[Site, ...]:
        """Every tensor with channels of it, all of which are known to make, to scale or to read them."""
        read = {(reader.weight, reader.dim) for reader in readers}
        scale = {name for norm in self.norms for name in (norm.gain, norm.bias)}
        sources = frozenset[str]().union(*(norm.sources for norm in self.norms))
        sites = tuple(site for site in self.structure.sites if bool(_inside(site.channel_of, self.group).any()))
        for site in sites:
            inside = site.channel_of[_inside(site.channel_of, self.group)]
            if len(inside) != self.group.width or len(inside.unique()) != len(inside):
                raise _CannotTurnError(f"{site.tensor} has a part of it")
            if (site.tensor, site.dim) not in read and site.tensor not in scale | sources:
                raise _CannotTurnError(f"{site.tensor} acts on its channels one by one")
        return sites


def _read_by(node: fx.Node) -> fx.Node | None:
    """What a layer reads by its weight."""
    layer = operator_of(node.target).layer
    return None if layer is None else layer.argument(node, "input")


def _not_linear(node: fx.Node) -> str:
    return f"{operation_name(node.target)} in {module_path(node) or 'forward'} is not linear in it"


def _channels(labels: object, numbering: Tensor) -> Tensor:
    """The channels of a value; none where it is no tensor with labels."""
    if isinstance(labels, (list, tuple)):
        return torch.cat([torch.zeros(0, dtype=torch.long), *(_channels(part, numbering) for part in labels)])
    if not isinstance(labels, Tensor):
        return torch.zeros(0, dtype=torch.long)
    found: Tensor = numbers(core(labels)[0], numbering).unique()
    return found


def _inside(channel_of: Tensor, group: Group) -> Tensor:
    return (channel_of >= group.start) & (channel_of < group.start + group.width)
