"""Rows on disk: one JSON file per suite, complete after every row."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from benchmarks.zoo.rows import Row, Way, from_json, to_json

Rows = dict[str, dict[Way, Row]]


class Store:
    """The rows of one suite, {network: {way: row}}, written to `path` whenever one comes."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        self.rows: Rows = read(path)

    def has(self, name: str, way: Way) -> bool:
        """Whether that network was done."""
        return way in self.rows.get(name, {})

    def add(self, name: str, way: Way, row: Row) -> None:
        """Keep a row; a file that is being written is never the one that is read."""
        with self._lock:
            self.rows.setdefault(name, {})[way] = row
            plain = {n: {w: to_json(r) for w, r in ways.items()} for n, ways in sorted(self.rows.items())}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps(plain, indent=1) + "\n")
            fresh.replace(self.path)


def read(path: Path) -> Rows:
    """All rows of a suite; none where there is no file yet."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return {name: {way: from_json(way, data) for way, data in ways.items()} for name, ways in found.items()}
