"""Rows on disk: one JSON file per suite, complete after every row."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from benchmarks.zoo.rows import Row, Side, from_json, to_json

Rows = dict[str, dict[Side, Row]]


class Store:
    """The rows of one suite, {network: {side: row}}, written to `path` whenever one comes."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        self.rows: Rows = read(path)

    def has(self, name: str, side: Side) -> bool:
        """Whether that network was done."""
        return side in self.rows.get(name, {})

    def add(self, name: str, side: Side, row: Row) -> None:
        """Keep a row; a file that is being written is never the one that is read."""
        with self._lock:
            self.rows.setdefault(name, {})[side] = row
            plain = {n: {s: to_json(r) for s, r in sides.items()} for n, sides in sorted(self.rows.items())}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps(plain, indent=1) + "\n")
            fresh.replace(self.path)


def read(path: Path) -> Rows:
    """All rows of a suite; none where there is no file yet."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return {name: {side: from_json(side, data) for side, data in sides.items()} for name, sides in found.items()}
