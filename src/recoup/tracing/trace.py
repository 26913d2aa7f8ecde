"""From a model and one batch to its structure, and to the module that will be worked on.

That module, the host, is the model itself if its class holds every size its channels may be cut to. Otherwise it is the
model's standalone form, the captured graph, whose numbers can be put right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from recoup.channels.blocks import residual_blocks
from recoup.channels.elementwise import with_elementwise
from recoup.channels.groups import Structure, named_tensors, resolve, with_every_bias, without
from recoup.channels.head import read_by_head
from recoup.channels.layouts import layouts
from recoup.channels.other_products import with_other_products
from recoup.channels.patterns import Choice
from recoup.channels.propagate import propagate
from recoup.config import require_flag
from recoup.errors import CaptureError
from recoup.graph.activation import Activation, activation_behind
from recoup.graph.biases import with_biases
from recoup.graph.capture import Captured
from recoup.graph.expressions import shown
from recoup.graph.folding import fold
from recoup.graph.modes import without_collection
from recoup.graph.one_sample import BatchCapture, capture_for_one, captured_for_one
from recoup.graph.sizes import Sizes
from recoup.graph.standalone import Standalone, standalone
from recoup.graph.usage import idle_modules, written_tensors
from recoup.graph.writing import graph_plan
from recoup.inputs.batches import Inputs, device_of, inputs_of, require_model
from recoup.inputs.samples import sampled_call
from recoup.inputs.surroundings import undisturbed
from recoup.plan import Check, GraphPlan, Plan
from recoup.surgery.apply import bare_plan
from recoup.surgery.resize import resize
from recoup.surgery.verify import agrees, follows
from recoup.tracing.class_support import lock_what_breaks, why_class_fails
from recoup.tracing.preparation import Prepared, prepared

# Samples to find out with what the caller's hooks do.
FEW = 2


@dataclass(frozen=True, eq=False)
class Form:
    """What it takes to write the graph of a standalone result: the captured one and the layouts of its values.

    `given` is the copy that is worked on, `batch` the graph as captured from it, `captured` the one that is cut;
    `added` names biases that it did not have. `reason` says why the model's own class would not do, and is None where
    it does: the form then only serves to be looked into.
    """

    given: Prepared
    batch: BatchCapture
    captured: Captured
    layouts: Mapping[str, Any]
    added: frozenset[str]
    reason: str | None

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
        return replace(plan, host=self.host)


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A network's structure, the activation behind each consumer, its residual blocks, and what its head reads.

    `blocks` and `head` are names of groups.

    Every model has a standalone form, to be run operation by operation; `form` is there when the model's own class
    cannot hold other sizes and that form is worked on instead.
    """

    structure: Structure
    activations: dict[str, Activation]
    blocks: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]
    inputs: Inputs
    standalone: Form

    @property
    def form(self) -> Form | None:
        """The standalone form if the result has it too."""
        return None if self.standalone.reason is None else self.standalone

    @property
    def idle(self) -> tuple[str, ...]:
        """Modules of the model's class that hold parameters, none of which the captured graph reads."""
        return () if self.form is not None else idle_modules(self.standalone.model, self.standalone.original)

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
    only: Iterable[str] = (),
    exclude: Iterable[str] = (),
    untie: bool = True,
) -> Traced:
    """The structure of `model`: its groups of channels, what is locked and why; `example` is one batch of inputs.

    With `keep_class`, what the model's own class cannot hold at another size is locked too. So are groups that `only`
    does not name or `exclude` does: by the name of a group or of a module, with wildcards. A layer whose weight is a
    table of embeddings too gets one of its own; without `untie` what it reads is locked.

    Raises:
        CaptureError: `torch.export` cannot capture the model.
        UsageError: a name in `only` or `exclude` matches nothing.
    """
    require_model(model)
    require_flag("keep_class", keep_class)
    choice = Choice.of(only, exclude)
    samples = sampled_call(inputs_of(example, model)).to(device_of(model))
    with without_collection():
        given = prepared(model, samples.times(min(samples.given, FEW)), may_untie=untie)
        batch = capture_for_one(given.model, samples)
        traced = _trace(given, batch, choice, keep_class=keep_class, may_untie=untie)
        if samples.given == 1 and not traced.standalone.serves_one:
            batch = captured_for_one(given.model, samples)
            traced = _trace(given, batch, choice, keep_class=keep_class, may_untie=untie)
        return traced


@undisturbed
def in_own_class(traced: Traced, *, only: Iterable[str] = (), exclude: Iterable[str] = ()) -> Traced:
    """The structure of the same model with all that locked which its own class cannot hold at another size."""
    form = traced.standalone
    with without_collection():
        return _trace(form.given, form.batch, Choice.of(only, exclude), keep_class=True, may_untie=True)


def plain_cut(traced: Traced, keep: Tensor) -> Plan:
    """The plan that keeps `keep` and refits nothing."""
    return bare_plan(traced.structure, named_tensors(traced.host), keep, traced.graph(keep))


def _trace(given: Prepared, batch: BatchCapture, choice: Choice, *, keep_class: bool, may_untie: bool) -> Traced:
    model, original = given.model, batch.one
    if keep_class:
        captured, added = with_biases(original)
        propagated = propagate(captured, sizes_stay=True)
        structure, numbering = resolve(propagated, model, captured)
        structure = choice.lock_others(with_elementwise(structure, propagated, numbering, captured))
        ways = layouts(propagated.labels, numbering, structure)
        own = lock_what_breaks(model, without(structure, added), batch, ways)
        ways = layouts(propagated.labels, numbering, own)
        own = with_other_products(own, ways, captured)
        return _traced(own, Form(given, batch, captured, ways, added, None))
    folded = fold(original, untie=may_untie)
    captured, added = with_biases(folded.captured)
    propagated = propagate(captured)
    structure, numbering = resolve(propagated, model, captured)
    structure = choice.lock_others(with_elementwise(structure, propagated, numbering, captured))
    ways = layouts(propagated.labels, numbering, structure)
    structure = with_other_products(structure, ways, captured)
    own = without(structure, added)
    reason = why_class_fails(model, batch, own, ways, folded.names)
    form = Form(given, batch, captured, ways, added, reason)
    if reason is not None:
        return _traced(with_every_bias(structure), form)
    # The class has no place for computed weights, none of which loses anything.
    sites = tuple(site for site in own.sites if site.tensor not in folded.names)
    consumers = tuple(consumer for consumer in own.consumers if consumer.weight not in folded.names)
    return _traced(replace(own, sites=sites, consumers=consumers), form)


def _traced(structure: Structure, form: Form) -> Traced:
    chains = {consumer.name: activation_behind(form.captured, consumer.node) for consumer in structure.consumers}
    blocks, head = residual_blocks(structure, form.captured), read_by_head(structure, form.captured)
    return Traced(structure, chains, blocks, head, form.batch.samples.one, form)
