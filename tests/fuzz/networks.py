"""Cases as plain data: a network of pieces and what is asked for it; drawn from a seed, built from what was drawn."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import tests.fuzz.image_pieces
import tests.fuzz.other_pieces
import tests.fuzz.token_pieces  # noqa: F401  # these fill the table
from tests.fuzz.comparison import flat
from tests.fuzz.kinds import KINDS, channel_dim

WORDS, MOST_CHANNELS = 11, 32
# How the network is called, and the form that its stem gives.
STEMS = {
    "image": "image", "image_and_vector": "image", "image_and_number": "image", "image_by_name": "image",
    "optional": "image", "tokens": "tokens", "words": "tokens", "words_and_mask": "tokens", "signal": "signal",
    "volume": "volume", "vector": "vector",
}  # fmt: skip
WRAPS = ("none", "add", "cat", "twice", "gate", "scaled")
HEADS = ("pooled", "dense", "tied")
OUTPUTS = (
    "plain", "tuple", "dict", "none", "with_class", "with_number", "fill", "finfo", "feature", "class", "complex",
    "nested", "topk",
)  # fmt: skip
CUTS = ("copies", "width", "macs", "parameters", "tolerance", "nothing")
METHODS = ("paper", "released", "fast", "best")


@dataclass(frozen=True, slots=True)
class Step:
    """One piece: its kind, the options it is made with, and how it is joined to what it reads."""

    kind: str
    options: Mapping[str, Any]
    wrap: str = "none"


@dataclass(frozen=True, slots=True)
class Case:
    """A network, and the request to make it smaller; `weights` is the seed of its parameters and of its data."""

    steps: tuple[Step, ...]
    stem: str = "image"
    head: str = "pooled"
    output: str = "plain"
    weights: int = 0
    training: bool = False
    cut: str = "copies"
    method: str = "paper"
    keep_class: bool = False

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def parse(text: str) -> Case:
    """The case that was printed as `text`."""
    fields = json.loads(text)
    return Case(**{**fields, "steps": tuple(Step(**step) for step in fields["steps"])})


def draw(seed: int, number: int, methods: tuple[str, ...] = METHODS) -> Case:
    """Case `number` of a seed: the first one drawn whose network runs."""
    dice = random.Random(f"{seed}/{number}")
    while True:
        case = _drawn(dice, methods[number % len(methods)])
        if runs(case):
            return case


def runs(case: Case) -> bool:
    """Whether the pieces fit together: the network can be built, and gives finite numbers for two batches."""
    try:
        model = build(case)
        with torch.no_grad():
            results = [call(model, batch(case, count, 3)) for count in (1, 2)]
    except Exception:  # whatever does not fit
        return False
    return all(not bool(leaf.isnan().any()) for result in results for leaf in flat(result) if isinstance(leaf, Tensor))


def build(case: Case) -> nn.Module:
    """The network of a case; the same parameters each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.weights)
        form, made = STEMS[case.stem], {"image_and_vector": Two, "words_and_mask": Two}.get(case.stem, One)
        model = (Named if case.stem in ("image_and_number", "image_by_name", "optional") else made)(case, form)
        _shake_norms(model)
    return model.train(case.training)


def batch(case: Case, count: int, seed: int, size: int = 0) -> Any:
    """So many samples of what the network reads, `size` steps larger or smaller than those it is calibrated with."""
    dice = torch.Generator().manual_seed(1000 * case.weights + seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=dice)

    side = 8 + 4 * size
    image = noise(3, side, side)
    if case.stem == "image_and_vector":
        return image, noise(5)
    if case.stem in ("image_and_number", "image_by_name", "optional"):
        extra = {"image_and_number": {"t": 3 + seed % 2}, "optional": {"side": None}}.get(case.stem, {})
        return {"x": image, **extra}
    if case.stem.startswith("words"):
        words = torch.randint(WORDS, (count, 9 + 4 * size), generator=dice)
        keep = torch.rand(words.shape, generator=dice) < 0.8
        return (words, keep.index_fill(1, torch.tensor([0]), True)) if case.stem == "words_and_mask" else words
    return {
        "tokens": lambda: noise(9 + 4 * size, 5), "signal": lambda: noise(3, 16 + 4 * size), "vector": lambda: noise(6),
        "volume": lambda: noise(2, 4 + 2 * size, 4 + 2 * size, 4 + 2 * size),
    }.get(case.stem, lambda: image)()  # fmt: skip


def changed(data: Any, change: Any) -> Any:
    """A batch with every tensor changed."""
    if isinstance(data, Tensor):
        return change(data)
    if isinstance(data, tuple):
        return tuple(changed(part, change) for part in data)
    return {name: changed(part, change) for name, part in data.items()} if isinstance(data, dict) else data


def call(model: nn.Module, data: Any) -> Any:
    """What a model returns for a batch; the batch is copied, as a model may write into it."""
    data = changed(data, Tensor.clone)
    if isinstance(data, dict):
        return model(**data)
    return model(*data) if isinstance(data, tuple) else model(data)


class _Network(nn.Module):
    """Stem, pieces, head; the classes below differ in how they are called."""

    def __init__(self, case: Case, form: str) -> None:
        super().__init__()
        self.case, self.first_form = case, form
        self.stem, self.side = _stem(case, form), nn.Linear(5, 8)
        self.body = nn.ModuleList()
        c = 8
        for step in case.steps:
            form, c = self._append(step, form, c)
        self.last_form = form
        self.feature = nn.Linear(8, 8)
        if case.head == "tied":
            assert isinstance(self.stem, nn.Embedding) and form == "tokens" and c == 8
            self.head = nn.Linear(c, WORDS, bias=False)
            self.head.weight = self.stem.weight
        else:
            self.head = nn.Linear(c, 6)
        self.register_buffer("banned", torch.arange(self.head.out_features) > self.head.out_features - 3)

    def _append(self, step: Step, form: str, c: int) -> tuple[str, int]:
        kind = KINDS[step.kind]
        assert kind.reads == form and c <= MOST_CHANNELS
        piece = kind.make(c, **step.options)
        self.body.append(piece)
        out = int(piece.out) + (c if step.wrap == "cat" else 0)
        assert step.wrap == "none" or kind.gives == form
        assert step.wrap in ("none", "cat") or out == c
        return kind.gives, out

    def run(self, x: Tensor, extra: Tensor | None = None) -> Any:
        """From what the stem gives to what is returned."""
        if extra is not None:
            x = x + extra.view(*extra.shape, *[1] * (x.dim() - 2))
        x = torch.relu(x) if self.first_form != "tokens" else x
        feature = x
        for step, piece in zip(self.case.steps, self.body, strict=True):
            x = _joined(step, piece, x)
        dim = channel_dim(self.last_form)
        if self.case.head == "pooled" and self.last_form != "vector":
            x = x.mean(tuple(range(2, x.dim())) if dim == 1 else 1)
            y = self.head(x)
        else:
            y = self.head(x.movedim(1, -1)).movedim(-1, 1) if dim == 1 else self.head(x)
        return _returned(self, y, dim if y.dim() == x.dim() and y.dim() > 2 else -1, feature)


class One(_Network):
    """A network of one input."""

    def forward(self, x: Tensor) -> Any:
        return self.run(self.stem(x))


class Two(_Network):
    """A network of two."""

    def forward(self, x: Tensor, side: Tensor) -> Any:
        if side.dtype == torch.bool:
            return self.run(self.stem(x) * side[..., None])
        return self.run(self.stem(x), self.side(side))


class Named(_Network):
    """A network whose inputs have names, among them a number and one that may be absent."""

    def forward(self, x: Tensor, t: int = 2, side: Tensor | None = None) -> Any:
        y = self.stem(x)
        if side is None:
            return self.run(y * t / 4)
        return self.run(y, self.side(side))


def _stem(case: Case, form: str) -> nn.Module:
    if case.stem.startswith("words"):
        return nn.Embedding(WORDS, 8)
    made = {"image": nn.Conv2d(3, 8, 3, padding=1), "signal": nn.Conv1d(3, 8, 3, padding=1)}
    made |= {"volume": nn.Conv3d(2, 8, 3, padding=1), "tokens": nn.Linear(5, 8), "vector": nn.Linear(6, 8)}
    return made[form]


def _joined(step: Step, piece: nn.Module, x: Tensor) -> Tensor:
    if step.wrap == "twice":
        return piece(torch.tanh(piece(x)))
    y = piece(x)
    if step.wrap == "cat":
        return torch.cat([x, y], channel_dim(KINDS[step.kind].gives))
    if step.wrap == "gate":
        return x * y.sigmoid()
    if step.wrap == "scaled":
        return 0.5 * x - 2 * y
    return x + y if step.wrap == "add" else y


def _returned(model: _Network, y: Tensor, dim: int, feature: Tensor) -> Any:
    """The scores `y`, with their classes along `dim`, in the form that the case asks for."""
    how = model.case.output
    banned = model.banned.view(-1, *[1] * (y.dim() - 1 - dim % y.dim()))
    if how == "fill":
        return y.masked_fill(banned, -1e9)
    if how == "finfo":
        return torch.where(banned, torch.finfo(y.dtype).min, y)
    if how in ("with_class", "class"):
        return y.argmax(dim) if how == "class" else (y, y.argmax(dim))
    if how == "feature":
        return {"scores": y, "feature": feature}
    return {
        "tuple": lambda: (y, y.softmax(dim)), "dict": lambda: {"scores": y, "mean": y.mean()},
        "none": lambda: (y, None), "with_number": lambda: (y, y.shape[-1]),
        "complex": lambda: torch.complex(y, y.tanh()),
        "nested": lambda: {"a": [y, (y.relu(), None)]}, "topk": lambda: tuple(y.topk(2, dim)),
    }.get(how, lambda: y)()  # fmt: skip


def _shake_norms(model: nn.Module) -> None:
    """Give norms something to do: statistics and scales as if they had been trained."""
    for module in model.modules():
        if isinstance(getattr(module, "running_mean", None), Tensor):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
        if "Norm" in type(module).__name__ and isinstance(getattr(module, "weight", None), nn.Parameter):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            if getattr(module, "bias", None) is not None:
                nn.init.normal_(module.bias, 0, 0.3)


def _drawn(dice: random.Random, method: str) -> Case:
    stem = dice.choice([*STEMS, "image", "image", "image", "image", "words", "tokens"])
    form, steps = STEMS[stem], []
    for _ in range(dice.choice([1, 2, 3, 3, 4])):
        steps.append(_step(dice, form))
        form = KINDS[steps[-1].kind].gives
    plain = dice.random() < 0.4
    return Case(
        steps=tuple(steps),
        stem=stem,
        head="tied" if stem == "words" and form == "tokens" and dice.random() < 0.4 else dice.choice(HEADS[:2]),
        output="plain" if plain else dice.choices(OUTPUTS, [1 if how == "class" else 4 for how in OUTPUTS])[0],
        weights=dice.randrange(10_000),
        training=dice.random() < 0.15,
        cut=dice.choices(CUTS, [10, 4, 3, 2, 1, 1])[0],
        method=method,
        keep_class=dice.random() < 0.2,
    )


def _step(dice: random.Random, form: str) -> Step:
    changes = dice.random() < 0.12
    kinds = [kind for kind in KINDS.values() if kind.reads == form and (kind.gives != form) == changes]
    kinds = kinds or [kind for kind in KINDS.values() if kind.reads == form and kind.gives == form]
    kind = dice.choice(kinds)
    wrap = dice.choice(WRAPS) if kind.gives == form and dice.random() < 0.4 else "none"
    return Step(kind.name, {name: dice.choice(values) for name, values in kind.options.items()}, wrap)


def simpler(case: Case) -> list[Case]:
    """Cases with something taken out or put back to its simplest, those that lose most first."""
    found = [replace(case, steps=case.steps[:n] + case.steps[n + 1 :]) for n in range(len(case.steps))]
    plain = Case(())
    fields = ("stem", "head", "output", "training", "keep_class", "cut", "method")
    differing = [name for name in fields if getattr(case, name) != getattr(plain, name)]
    found += [replace(case, **{name: getattr(plain, name)}) for name in differing]
    for n, step in enumerate(case.steps):
        found += [replace(case, steps=(*case.steps[:n], s, *case.steps[n + 1 :])) for s in _simpler_steps(step)]
    return found


def _simpler_steps(step: Step) -> list[Step]:
    found = [replace(step, wrap="none")] if step.wrap != "none" else []
    for name, values in KINDS[step.kind].options.items():
        if step.options[name] != values[0]:
            found.append(replace(step, options={**step.options, name: values[0]}))
    return found
