"""A saved result as what it was saved from, so that it can be saved again with other weights."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recoup.artefact.files import GRAPH, JSON_BYTES, PLAN, REPORT, not_a, read_bytes, read_checked
from recoup.artefact.graph_json import GRAPH_SCHEMA, graph_from_json
from recoup.artefact.manifest import check_files, read_manifest
from recoup.artefact.plan_json import PLAN_SCHEMA, plan_from_json
from recoup.artefact.reading import is_standalone, stored_inputs
from recoup.artefact.schema import MisfitError
from recoup.artefact.writing import save
from recoup.inputs.batches import Inputs
from recoup.plan import Plan
from recoup.report.content import Report
from recoup.report.reading import report_from_json
from recoup.training.record import Finetuned


@dataclass(frozen=True, slots=True, eq=False)
class SavedResult:
    """What a folder holds besides weights; of the plan's weights, only that biases are new to their layers."""

    plan: Plan
    report: Report
    samples: Inputs | None
    original: str
    source: str | None

    def save_finetuned(self, folder: str | Path, finetuned: Finetuned) -> Report:
        """Write a new folder with the trained weights: samples and manifest are made anew, the report has the history.

        Raises:
            ArtefactError: the folder exists or cannot be written.
        """
        report = dataclasses.replace(self.report, finetuned=(*self.report.finetuned, *finetuned.history))
        model: nn.Module = finetuned.model
        save(folder, model, self.plan, report, source=self.source, samples=self.samples, original=self.original)
        return report


def read_result(folder: str | Path) -> SavedResult:
    """What was saved in a folder.

    Raises:
        ArtefactError: a file is missing, damaged, or of another form.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    data = read_checked(folder / PLAN, PLAN_SCHEMA, "a plan")
    try:
        plan = plan_from_json(data)
    except MisfitError as error:
        raise not_a(folder / PLAN, "a plan", error) from error
    added = {name: torch.zeros(shape) for name, shape in data["added"].items()}
    plan = dataclasses.replace(plan, weights=added)
    if is_standalone(folder):
        graph = graph_from_json(read_checked(folder / GRAPH, GRAPH_SCHEMA, "a graph"), (), ())
        plan = dataclasses.replace(plan, graph=graph)
    return SavedResult(plan, _report(folder / REPORT), stored_inputs(folder), manifest.cls, data["source"])


def _report(path: Path) -> Report:
    try:
        data: Any = json.loads(read_bytes(path, JSON_BYTES))
        return report_from_json(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise not_a(path, "a report", error) from error
