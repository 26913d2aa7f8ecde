"""From a model and one batch to its structure, and to the module that will be worked on.

That module, the host, is the model itself if its class holds every size its channels may be cut to. Otherwise it is the
model's standalone form, the captured graph, whose numbers can be put right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from recoup.channels.blocks import residual_blocks
from recoup.channels.by_hand import by_hand
from recoup.channels.elementwise import with_elementwise
from recoup.channels.groups import resolve
from recoup.channels.head import read_by_head
from recoup.channels.layouts import layouts
from recoup.channels.other_products import with_other_products
from recoup.channels.propagate import propagate
from recoup.channels.settling import with_whole_streams
from recoup.channels.structure import Structure, named_tensors, with_every_bias, with_free_sums, without
from recoup.errors import CaptureError, InputError
from recoup.graph.activation import Activation, activation_behind
from recoup.graph.biases import with_biases
from recoup.graph.canonical import with_layers, with_sums
from recoup.graph.capture import Captured
from recoup.graph.expressions import shown
from recoup.graph.folding import fold
from recoup.graph.modes import without_collection
from recoup.graph.one_sample import BatchCapture, capture_for_one, captured_for_one
from recoup.graph.sizes import Sizes
from recoup.graph.standalone import Standalone, entering, standalone
from recoup.graph.usage import idle_modules, written_tensors
from recoup.graph.writing import graph_plan
from recoup.inputs.batches import Inputs, device_of, inputs_of
from recoup.inputs.models import require_model
from recoup.inputs.samples import sampled_call
from recoup.inputs.surroundings import undisturbed
from recoup.plan import Check, GraphPlan, Plan
from recoup.surgery.apply import bare_plan
from recoup.surgery.resize import resize
from recoup.surgery.verify import agrees, follows
from recoup.tracing.class_support import lock_what_breaks, runs_as_cut, why_class_fails, why_not_by_hand
from recoup.tracing.configured import with_series
from recoup.tracing.following import with_followers
from recoup.tracing.preparation import Prepared, prepared
from recoup.tracing.samples import require_samples_first
from recoup.tracing.terms import Terms

# Samples to find out with what the caller's hooks do, and whether samples lie along the first dim.
FEW = 2


@dataclass(frozen=True, eq=False)
class Form:
    """What it takes to write the graph of a standalone result: the captured one and the layouts of its values.

    `given` is the copy that is worked on, `batch` the graph as captured from it, `captured` the one that is cut;
    `added` names biases that it did not have, `sums` the weights that sums have got. `reason` says why the model's own
    class would not do, and is None where it does: the form then only serves to be looked into.
    """

    given: Prepared
    batch: BatchCapture
    captured: Captured
    layouts: Mapping[str, Any]
    added: frozenset[str]
    reason: str | None
    sums: tuple[str, ...] = ()

    @property
    def model(self) -> nn.Module:
        """The caller's model, as a copy to work on."""
        return self.given.model

    @property
    def original(self) -> Captured:
        """The graph of the copy for one sample."""
        return self.batch.one

    @cached_property
    def sizes(self) -> Sizes:
        """How the graph follows its inputs: a result in all sizes, a form that is only looked into in the batch.

        Raises:
            CaptureError: the graph serves one batch size only.
        """
        if self.reason is not None:
            with suppress(CaptureError):  # the batch may still be followed
                sizes = self.batch.followed(self.model, any_size=True)
                if follows(self.model, self._whole(sizes), self.batch.samples):
                    return self._guarded(sizes)
        return self._guarded(self.batch.followed(self.model, any_size=False))

    def _guarded(self, sizes: Sizes) -> Sizes:
        """With a condition if the model does something else for a single sample than for several."""
        if self.serves_one:
            return sizes
        single = tuple(Check(("ge", leaf, 2)) for leaf in sorted(sizes.batch))
        return replace(sizes, checks=(*sizes.checks, *single))

    @cached_property
    def serves_one(self) -> bool:
        """Whether the model does for a single sample what it does for several."""
        if self.batch.sizes is None:
            return True
        return agrees(self.model, self._whole(self.batch.sizes), self.batch.samples.one)

    @property
    def said(self) -> str | None:
        """The reason, and which sizes are fixed in a standalone result; None where there is no need for one."""
        fixed = [shown(check.holds) for check in self.sizes.fixed] if self.reason is not None else []
        return f"{self.reason}; it serves calls with {', '.join(fixed)} only" if fixed else self.reason

    @cached_property
    def host(self) -> Standalone:
        """The whole model in this form."""
        return self._whole(self.sizes)

    def _whole(self, sizes: Sizes) -> Standalone:
        as_they_are = {node.name: None for node in self.captured.graph.nodes}
        whole = resize(self.captured, as_they_are, torch.zeros(0, dtype=torch.bool))
        tensors = {self.captured.tensors[name]: value for name, value in self.captured.values.items()}
        module = standalone(graph_plan(self.captured, whole.graph, {}, sizes, frozenset()), tensors)
        module.train(self.model.training)
        return module

    def plan(self, keep: Tensor, written: frozenset[str]) -> GraphPlan:
        """The graph that keeps `keep`; of the added biases only those in `written` are there."""
        resized = resize(self.captured, self.layouts, keep)
        unused = self.added - written
        plan = graph_plan(self.captured, resized.graph, resized.constants, self.sizes, unused)
        return replace(plan, graph=with_sums(plan.graph, self.sums), host=self.host)


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A network's structure, the activation behind each consumer, its residual blocks, and what its head reads.

    `blocks` and `head` are names of groups.

    Every model has a standalone form, to be run operation by operation; `form` is there when the model's own class
    cannot hold other sizes and that form is worked on instead. `terms` are what was asked of it.
    """

    structure: Structure
    activations: dict[str, Activation]
    blocks: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]
    inputs: Inputs
    standalone: Form
    terms: Terms

    @property
    def form(self) -> Form | None:
        """The standalone form if the result has it too."""
        return None if self.standalone.reason is None else self.standalone

    @property
    def idle(self) -> tuple[str, ...]:
        """Modules of the model's class that hold parameters, none of which the captured graph reads."""
        return () if self.form is not None else idle_modules(self.standalone.model, self.standalone.original)

    def serves(self, inputs: Inputs) -> bool:
        """Whether the captured graph takes a call of this form; where there is no graph to run, any will do."""
        try:
            entering(self.standalone.host, inputs.args, inputs.kwargs)
        except InputError:
            return False
        except CaptureError:
            return True
        return True

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the parameters and buffers that the model writes into as it runs."""
        return written_tensors(self.standalone.original)

    @property
    def host(self) -> nn.Module:
        """The module to work on: the model itself, or its standalone form."""
        return self.standalone.model if self.form is None else self.form.host

    def graph(self, keep: Tensor, written: frozenset[str] = frozenset()) -> GraphPlan | None:
        """The graph of the smaller model, if it is a standalone one."""
        return None if self.form is None else self.form.plan(keep, written)


@undisturbed
def trace(
    model: nn.Module,
    example: Any,
    *,
    keep_class: bool = False,
    keep_config: bool = False,
    only: Iterable[str] = (),
    exclude: Iterable[str] = (),
    untie: bool = True,
    streams: bool = False,
) -> Traced:
    """The structure of `model`: its groups of channels, what is locked and why; `example` is one batch of inputs.

    With `keep_class`, what the model's own class cannot hold at another size is locked too; with `keep_config`, also
    what the model's config could not tell, and groups that one of its numbers counts keep equally many. Locked are
    groups that `only` does not name or `exclude` does: by the name of a group or of a module, with wildcards. A layer
    whose weight is a table of embeddings too gets one of its own; without `untie` what it reads is locked. With
    `streams`, what a LayerNorm or RMSNorm reads may lose channels too.

    Raises:
        CaptureError: `torch.export` cannot capture the model.
        UsageError: a name in `only` or `exclude` matches nothing.
    """
    require_model(model)
    asked: dict[str, Any] = {"keep_class": keep_class, "keep_config": keep_config, "streams": streams}
    return traced_for(model, example, Terms.of(**asked, untie=untie, only=only, exclude=exclude))


def traced_for(model: nn.Module, example: Any, terms: Terms) -> Traced:
    """The structure of a model on these terms."""
    inputs = inputs_of(example, model)
    require_samples_first(model, inputs.first(FEW).to(device_of(model)))
    samples = sampled_call(inputs).to(device_of(model))
    with without_collection():
        few, streams = samples.times(min(samples.given, FEW)), terms.streams and not terms.keep_config
        given = prepared(model, few, may_untie=terms.untie and not terms.keep_config, streams=streams)
        traced = _trace(given, capture_for_one(given.model, samples), terms)
        if samples.given == 1 and not traced.standalone.serves_one:
            traced = _trace(given, captured_for_one(given.model, samples), terms)
        return traced


@undisturbed
def in_own_class(traced: Traced) -> Traced:
    """The structure of the same model with all that locked which its own class cannot hold at another size."""
    form = traced.standalone
    with without_collection():
        return _trace(form.given, form.batch, replace(traced.terms, keep_class=True))


def plain_cut(traced: Traced, keep: Tensor) -> Plan:
    """The plan that keeps `keep` and refits nothing."""
    return bare_plan(traced.structure, named_tensors(traced.host), keep, traced.graph(keep))


def _trace(given: Prepared, batch: BatchCapture, terms: Terms) -> Traced:
    if terms.keep_class or terms.keep_config:
        return _in_class(given, batch, terms)
    model = given.model
    rewritten = with_layers(batch.one, by_hand(batch.one))
    folded = fold(rewritten.captured, untie=terms.untie)
    computed = (*rewritten.weights, *folded.names)
    captured, added = with_biases(folded.captured)
    structure, numbering, labels = _structure(captured, model, terms, sizes_stay=False)
    structure = with_free_sums(structure, rewritten.weights)
    ways = layouts(labels, numbering, structure)
    structure = with_other_products(structure, ways, captured)
    reasons = []
    for own in with_followers(without(structure, added), model):
        reasons.append(why_not_by_hand(own, rewritten) or why_class_fails(model, batch, own, ways, folded.names))
        if reasons[-1] is None:
            break
    reason = None if reasons[-1] is None else reasons[0]
    form = Form(given, batch, captured, ways, added, reason, rewritten.weights)
    if reason is not None:
        return _traced(with_every_bias(structure), form, terms)
    # The class has no place for computed weights, none of which loses anything.
    sites = tuple(site for site in own.sites if site.tensor not in computed)
    consumers = tuple(consumer for consumer in own.consumers if consumer.weight not in computed)
    products = tuple(product for product in own.products if product.weight not in rewritten.weights)
    return _traced(replace(own, sites=sites, consumers=consumers, products=products), form, terms)


def _in_class(given: Prepared, batch: BatchCapture, terms: Terms) -> Traced:
    """With all that locked which the model's own class, or its config, cannot hold."""
    model = given.model
    captured, added = with_biases(batch.one)
    # Numbers that a config tells are put right; others in the code stay as they are.
    structure, numbering, labels = _structure(captured, model, terms, sizes_stay=not terms.keep_config)
    ways = layouts(labels, numbering, structure)
    own = without(structure, added)
    runs = partial(runs_as_cut, model, batch, layouts=ways)
    own = with_series(own, model, added) if terms.keep_config else _followed(own, model, runs)
    own = lock_what_breaks(model, own, batch, ways)
    ways = layouts(labels, numbering, own)
    own = with_other_products(own, ways, captured)
    return _traced(own, Form(given, batch, captured, ways, added, None), terms)


def _structure(
    captured: Captured, model: nn.Module, terms: Terms, *, sizes_stay: bool
) -> tuple[Structure, Tensor, Mapping[str, Any]]:
    """Groups and what they cost, the channel number of every label, and the labels of every value."""
    propagated = propagate(captured, sizes_stay=sizes_stay, frees_norms=terms.streams)
    structure, numbering = resolve(propagated, model, captured)
    structure = with_elementwise(with_whole_streams(structure), propagated, numbering, captured)
    return terms.choice.lock_others(structure), numbering, propagated.labels


def _followed(structure: Structure, model: nn.Module, runs: Callable[[Structure], bool]) -> Structure:
    """The structure with the numbers that follow: the fewest with which the code runs as it ought to."""
    return next((own for own in with_followers(structure, model) if runs(own)), structure)


def _traced(structure: Structure, form: Form, terms: Terms) -> Traced:
    chains = {consumer.name: activation_behind(form.captured, consumer.node) for consumer in structure.consumers}
    blocks, head = residual_blocks(structure, form.captured), read_by_head(structure, form.captured)
    return Traced(structure, chains, blocks, head, form.batch.samples.one, form, terms)
