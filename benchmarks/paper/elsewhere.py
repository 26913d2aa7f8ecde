"""Searches that another experiment has made already: Figures 4 and 7 and Tables I and V have many in common.

A search is known by its network, its images and its method with all fields filled in: the first row of Figure 4, by
steps, is the bottom-up row of Table V. It is taken over as it was measured, command and seconds included.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from benchmarks.paper.cases import Case, Row, read_row
from benchmarks.paper.workbench import method_of, precision_of
from benchmarks.rows import Plain

Search = tuple[Hashable, ...]


def found_elsewhere(cases: Sequence[Case], options: argparse.Namespace, settings: Plain) -> Iterator[Row]:
    """A row for each of the cases whose search has one, made with the same settings, in another file of the folder."""
    known = {search: row for row in _rows_beside(options, settings) if (search := _search_of(row, options))}
    for case in cases:
        row = known.get((*_asked(case, options), precision_of(case, options)))
        if row is not None:
            yield replace(row, case=case)


def _rows_beside(options: argparse.Namespace, settings: Plain) -> Iterator[Row]:
    for path in sorted(options.out.glob("*.json")):
        found = json.loads(path.read_text())
        if found.get("settings") == settings:
            yield from map(read_row, found["rows"])


def _search_of(row: Row, options: argparse.Namespace) -> Search | None:
    """What the row's search is known by; None for what is no search, such as retraining, or came to nothing."""
    is_search = row.case.tolerance is not None and row.case.kept is None and "search" in row.outcome.stages
    return (*_asked(row.case, options), row.stamp.evaluate) if is_search and not row.outcome.note else None


def _asked(case: Case, options: argparse.Namespace) -> Search:
    return case.network, case.data, case.tolerance, repr(method_of(case, options))
