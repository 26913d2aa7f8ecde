"""Saved results to be mutated, small and of every kind, and the tools of somebody who changes them."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recoup

HALF = recoup.Budget(width=0.5)


class Shuffled(nn.Module):
    """A channel shuffle forces a graph; in-place calls, parts of lists, sizes and a tree of outputs are in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c = nn.Conv2d(4, 4, 1)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8).view(1, 8, 1, 1))

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = F.relu(self.b(F.relu_(self.a(x) * self.scale)))
        y = y.view(len(y), 2, 4, 6, 6).transpose(1, 2).reshape(y.shape)
        first, second = y.chunk(2, dim=1)
        z = self.c(first + second.clamp(max=1e9)).mean((2, 3))
        return {"scores": z, "parts": (z.softmax(1), [z.argmax(1)])}


class Layered(nn.Module):
    """The model's own class holds what is left; layers without a bias get one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.u, self.head = nn.ConvTranspose2d(8, 6, 3, bias=False), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.u(F.relu(self.n(self.a(x))))).mean((2, 3)))


class Tokens(nn.Module):
    """Integers and a mask by keyword, a rotation of channels, an infinite number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(11, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids)
        x = x + self.down(F.gelu(self.up(x)).roll(3, 2)) * mask.unsqueeze(-1)
        y = self.head(x)
        return y, y.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).softmax(1)


@dataclass(frozen=True)
class Saved:
    """A saved folder, its files as they were written, and what the model in it computes."""

    folder: Path
    build: Callable[[], nn.Module]
    batch: Any
    expected: list[Tensor]
    files: dict[str, bytes]

    def load(self, **options: Any) -> nn.Module:
        return recoup.load(self.folder, self.build, **options)

    def outputs(self, model: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            model = model.eval()
            return flat(model(**self.batch) if isinstance(self.batch, dict) else model(self.batch))

    def is_right(self, model: nn.Module) -> bool:
        found = self.outputs(model)
        return len(found) == len(self.expected) and all(
            a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 1e-3, 1e-3, equal_nan=True)
            for a, b in zip(self.expected, found, strict=True)
        )


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in flat(part)]


def save_one(build: Callable[[], nn.Module], batch: Any, folder: Path) -> Saved:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = recoup.prune(build().eval(), [batch] * 2, budget=HALF, method="paper", keep_class=False)
    result.save(folder)
    few = {name: value[:4] for name, value in batch.items()} if isinstance(batch, dict) else batch[:4]
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    saved = Saved(folder, build, few, [], files)
    return Saved(folder, build, few, [value.clone() for value in saved.outputs(result.model)], files)


def save_all(folder: Path) -> list[Saved]:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(24, 3, 6, 6, generator=draw)
    tokens = {"ids": torch.randint(11, (24, 5), generator=draw), "mask": torch.ones(24, 5)}
    tokens["mask"][:, 4] = 0.0
    pairs = ((Layered, images), (Shuffled, images), (Tokens, tokens))
    return [save_one(build, batch, folder / build.__name__.lower()) for build, batch in pairs]


def rehash(folder: Path) -> None:
    """What whoever changes files on purpose does at last: write a manifest that fits them."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    names = sorted(p.name for p in folder.iterdir() if p.name != "manifest.json" and p.is_file())
    content["files"] = {name: _entry((folder / name).read_bytes()) for name in names}
    path.write_text(seal(content))


def seal(content: dict[str, Any]) -> str:
    """A manifest with the hash of itself."""
    content.pop("sha256", None)
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "sha256": hashlib.sha256(plain.encode()).hexdigest()})


def change(folder: Path, name: str, how: Callable[[Any], Any]) -> None:
    """Change a JSON file and cover it up."""
    content = json.loads((folder / name).read_text())
    changed = how(content)
    changed = content if changed is None else changed
    if name == "manifest.json":
        (folder / name).write_text(seal(changed))
    else:
        (folder / name).write_text(json.dumps(changed))
        rehash(folder)


def _entry(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
