"""Mutations of a saved folder, drawn at random: of the structure of JSON, of the bytes of tensors, of the files."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.artefact_folders import Saved, rehash, seal

# How often each is taken: the graph has the most to say.
JSON = {"plan.json": 1, "graph.json": 4, "manifest.json": 1}
BINARY = ("model.safetensors", "samples.safetensors")


def hostile_texts(mark: str) -> list[str]:
    run = f"__import__('os').system('touch {mark}')"
    return [
        run,
        f"x={run}",
        f"x\n    {run}\n",
        f"x: {run}",
        f"a);{run};(b",
        f'weight"), {run}, ("',
        "__class__",
        "__import__",
        "a.__class__.__init__.__globals__",
        "../../../../etc/passwd",
        "lambda",
        "input",
        "",
        "a" * 10_000,
        "\x00",
        "ключ",
        "*",
        "NaN",
        "aten.from_file.default",
        "collections:defaultdict",
        "enum:Enum",
        "node_that_is_not_there",
    ]


TARGETS = [
    *("aten.from_file.default", "aten.set_.source_Storage", "aten.set_.source_Tensor", "aten.resize_.default"),
    *("aten.fill_.Scalar", "aten.zero_.default", "aten.copy_.default", "aten.add.out", "aten.relu.out"),
    *("aten.save.default", "aten.__class__.default", "aten.relu.__class__", "aten.relu", "aten", "", "..", "a.b.c"),
    *("os.system.default", "builtins.eval", "builtins.exec.default", "torch.load", "torch.ops.load_library"),
    *("torchvision.nms.default", "prims.add.default", "prim.device.default", "higher_order.cond.default"),
    *("operator.pow", "operator.mul", "operator.getitem", "operator.attrgetter", "math.floor", "torch.sym_max"),
    *(
        "aten.zeros.default",
        "aten.repeat.default",
        "aten.expand.default",
        "aten.as_strided.default",
        "aten.arange.start",
    ),
    *("aten.relu.default", "aten.sigmoid.default", "aten.t.default", "aten.squeeze_.default", "aten.randn.default"),
    *("aten.nonzero.default", "aten._unsafe_view.default", "aten.empty.memory_format", "aten.matrix_power.default"),
    *("aten.embedding_bag.default", "aten.segment_reduce.default", "aten.item.default", "aten.kron.default"),
]
NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    1000,
    10**6,
    2**31 - 1,
    2**31,
    9_000_000_000,
    2**62,
    2**63 - 1,
    -(2**63),
    2**63,
    10**40,
]
NUMBERS += [0.5, -0.0, 1e-300, 1e308, 3.7, True, False]
ACTIONS = ("value", "number", "number", "number", "text", "delete", "double", "swap", "swap", "key", "nest")
ACTIONS += ("transplant", "transplant", "transplant", "extra", "target", "target")
DAMAGES = ("flip", "flips", "cut", "insert", "zero", "swap", "header", "header", "length", "nan", "tail")
EXCHANGES = ("gone", "more", "empty", "folder", "link", "inside", "pipe", "sparse", "exchange", "loop")
RAW = ["NaN", "Infinity", "-Infinity", "1e999", "1" * 5_000, "-" + "9" * 30, "[" * 2_000 + "]" * 2_000, "[" * 100_000]


class Mutator:
    """One mutant: draws what to change in a folder that is whole before, and changes it."""

    def __init__(self, saved: Saved, draw: random.Random, mark: str) -> None:
        self.saved, self.draw, self.mark = saved, draw, mark
        self.folder = saved.folder
        self.said: list[str] = []

    def mutate(self) -> bool:
        """Change the folder; whether a new manifest covers it up."""
        present = [name for name, often in JSON.items() if name in self.saved.files for _ in range(often)]
        kind = self.draw.choices(("structure", "text", "bytes", "files"), (70, 8, 15, 7))[0]
        if kind == "files":
            return self._files()
        name = self.draw.choice([n for n in BINARY if n in self.saved.files] if kind == "bytes" else present)
        change: Callable[[bytes], bytes] = {"structure": self._structure, "text": self._text, "bytes": self._bytes}[
            kind
        ]
        before = self.saved.files[name]
        after = change(before)
        covers = self.draw.random() < 0.9
        self.said.append(f"{kind} of {name}, {'covered up' if covers else 'as it is'}")
        self._write(name, after, covers)
        return covers or before == after or (name == "manifest.json" and _means_the_same(before, after))

    def _write(self, name: str, data: bytes, covers: bool) -> None:
        path = self.folder / name
        path.write_bytes(data)
        if not covers:
            return
        if name != "manifest.json":
            rehash(self.folder)
            return
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            return
        if isinstance(content, dict):
            try:
                path.write_text(seal(content))
            except (ValueError, RecursionError, TypeError):
                return

    def _structure(self, data: bytes) -> bytes:
        root = json.loads(data)
        for _ in range(self.draw.choices((1, 2, 3), (80, 15, 5))[0]):
            root = self._changed(root)
        return json.dumps(root).encode()

    def _changed(self, root: Any) -> Any:
        places = list(_places(root))
        if not places:
            return self._value()
        # Places deep in long lists of numbers are many and alike: every second draw is among the rest.
        few = [p for p in places if not isinstance(_at(root, p), (int, float)) or len(p) < 3]
        path = self.draw.choice(few if few and self.draw.random() < 0.6 else places)
        holder, key = _at(root, path[:-1]), path[-1]
        old = holder[key]
        action = self.draw.choice(ACTIONS)
        self.said.append(f"{action} at {'.'.join(map(str, path))[:80]}")
        if action == "value":
            holder[key] = self._value()
        elif action == "number":
            is_number = isinstance(old, (int, float)) and self.draw.random() < 0.5
            holder[key] = old + self.draw.choice((-1, 1, 2, 1000)) if is_number else self.draw.choice(NUMBERS)
        elif action == "text":
            holder[key] = self._text_near(old)
        elif action == "delete":
            del holder[key]
        elif action == "double" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(old))
        elif action == "swap":
            other = self.draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            holder[key], holder[other] = holder[other], holder[key]
        elif action == "key" and isinstance(holder, dict):
            holder[self.draw.choice(hostile_texts(self.mark))] = holder.pop(key)
        elif action == "nest":
            for _ in range(self.draw.choice((1, 1, 2, 60, 300))):
                old = self.draw.choice(([old], {"tuple": [old]}, {"node": old}))
            holder[key] = old
        elif action == "transplant":
            holder[key] = copy.deepcopy(_at(root, self.draw.choice(places)))
        elif action == "extra" and isinstance(holder, dict):
            holder[self.draw.choice((*hostile_texts(self.mark), "class", "format", "node"))] = self._value()
        elif action == "target":
            found = root.get("nodes") if isinstance(root, dict) else None
            # A mutant of a mutant may have anything there.
            nodes = [n for n in found if isinstance(n, dict)] if isinstance(found, list) else []
            if nodes:
                self.draw.choice(nodes)["target"] = self.draw.choice(TARGETS)
        return root

    def _value(self) -> Any:
        texts = hostile_texts(self.mark)
        plain: list[Any] = [None, [], {}, [[]], {"a": 1}, [0] * 50_000, {"node": "x"}, {"dtype": "load"}, *NUMBERS]
        plain += [{"dtype": "float16"}, {"device": "meta"}, {"float": "nan"}, {"layout": "sparse_coo"}, {"list": ["*"]}]
        return self.draw.choice(texts if self.draw.random() < 0.3 else plain)

    def _text_near(self, old: Any) -> str:
        if not isinstance(old, str) or not old or self.draw.random() < 0.5:
            return self.draw.choice(hostile_texts(self.mark))
        place = self.draw.randrange(len(old))
        return old[:place] + chr(self.draw.choice((0, 34, 39, 46, 95, 97, 955))) + old[place + 1 :]

    def _text(self, data: bytes) -> bytes:
        text = data.decode()
        places = [place for place in range(len(text)) if text[place].isdigit() and not text[place - 1].isalnum()]
        kind = self.draw.choice(("raw", "raw", "twice", "cut", "flip", "bom", "latin", "empty", "tail"))
        self.said.append(kind)
        place = self.draw.choice(places)
        if kind == "raw":
            return (text[:place] + self.draw.choice(RAW) + text[place + 1 :]).encode()
        if kind == "twice":
            return text.replace('"format"', '"format": 3, "format"', 1).encode()
        if kind == "cut":
            return data[: self.draw.randrange(len(data))]
        if kind == "flip":
            return _flipped(data, self.draw, 1)
        return {"bom": b"\xef\xbb\xbf" + data, "latin": data + b"\xff", "empty": b"", "tail": data + b"{}"}[kind]

    def _bytes(self, data: bytes) -> bytes:
        kind = self.draw.choice(
            ("flip", "flips", "cut", "insert", "zero", "swap", "header", "header", "length", "nan", "tail")
        )
        self.said.append(kind)
        place = self.draw.randrange(len(data))
        if kind in ("flip", "flips"):
            return _flipped(data, self.draw, 1 if kind == "flip" else 100)
        if kind == "cut":
            return data[:place]
        if kind == "insert":
            return data[:place] + self.draw.randbytes(self.draw.choice((1, 4, 8, 1000))) + data[place:]
        if kind == "zero":
            return data[:place] + bytes(min(64, len(data) - place)) + data[place + 64 :]
        if kind == "swap":
            return data[place:] + data[:place]
        if kind == "length":
            return struct.pack("<Q", self.draw.choice((0, 1, 2**20, 2**40, 2**63, 2**64 - 1))) + data[8:]
        if kind == "nan":
            start = max(len(data) - 4 * (1 + self.draw.randrange(20)), 8)
            return data[:start] + b"\x00\x00\xc0\x7f" + data[start + 4 :]
        if kind == "tail":
            return data + bytes(self.draw.choice((1, 8, 10**6)))
        size = struct.unpack("<Q", data[:8])[0]
        header = json.dumps(self._changed(json.loads(data[8 : 8 + size]))).encode()
        return struct.pack("<Q", len(header)) + header + data[8 + size :]

    def _files(self) -> bool:
        name = self.draw.choice(sorted(self.saved.files))
        path = self.folder / name
        kind = self.draw.choice(
            ("gone", "more", "empty", "folder", "link", "inside", "pipe", "sparse", "exchange", "loop")
        )
        covers = self.draw.random() < 0.5
        self.said.append(f"{kind}: {name}, {'covered up' if covers else 'as it is'}")
        if kind == "more":
            (self.folder / self.draw.choice(("evil.py", "graph.json.bak", ".hidden"))).write_text("x")
        elif kind == "exchange":
            other = self.draw.choice(sorted(self.saved.files))
            path.write_bytes(self.saved.files[other])
            (self.folder / other).write_bytes(self.saved.files[name])
            covers = covers or name == other
        elif kind == "sparse":
            with path.open("ab") as file:
                file.truncate(1 << 40)
            return False
        else:
            path.unlink()
            self._put(kind, path)
        if covers and kind not in ("pipe", "folder") and "manifest.json" not in (name, self._other(kind)):
            _try_rehash(self.folder)
            return True
        return kind in ("exchange", "inside") or covers

    def _other(self, kind: str) -> str:
        return "manifest.json" if kind == "exchange" else ""

    def _put(self, kind: str, path: Path) -> None:
        if kind == "empty":
            path.touch()
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to("/etc/passwd")
        elif kind == "inside":
            path.symlink_to(self.folder / "plan.json" if path.name != "plan.json" else self.folder / "report.json")
        elif kind == "loop":
            path.symlink_to(path)
        elif kind == "pipe":
            os.mkfifo(path)


def restore(saved: Saved) -> None:
    """The folder as it was saved."""
    found = {path.name: path for path in saved.folder.iterdir()} if saved.folder.is_dir() else {}
    odd = [path for path in found.values() if path.is_symlink() or not path.is_file() or path.name not in saved.files]
    if odd or len(found) != len(saved.files):
        shutil.rmtree(saved.folder)
        saved.folder.mkdir()
        found = {}
    for name, data in saved.files.items():
        path = saved.folder / name
        if name not in found or path.stat().st_size != len(data) or path.read_bytes() != data:
            path.write_bytes(data)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from _places(part, (*path, key))


def _at(root: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        root = root[step]
    return root


def _flipped(data: bytes, draw: random.Random, count: int) -> bytes:
    changed = bytearray(data)
    for _ in range(count):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _try_rehash(folder: Path) -> None:
    try:
        rehash(folder)
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return


def _means_the_same(before: bytes, after: bytes) -> bool:
    """A manifest has a hash of what it says, not of how it is spelt."""
    try:
        return bool(json.loads(before) == json.loads(after))
    except (ValueError, RecursionError):
        return False
