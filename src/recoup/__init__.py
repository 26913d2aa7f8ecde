"""Recoup makes a trained PyTorch network smaller and faster without retraining.

>>> result = recoup.prune(model, calibration, validation=batches, tolerance=1.0)    # doctest: +SKIP
>>> result.model, result.report                                                     # doctest: +SKIP
"""

from recoup.algebra.selection import Layer, Problem, Ranking, Selector
from recoup.artefact import load
from recoup.calibrate import Calibration, calibrate
from recoup.errors import (
    ArtefactError,
    BudgetError,
    CalibrationError,
    CaptureError,
    DataError,
    IllConditionedError,
    LockedError,
    ModelError,
    RecoupError,
    UsageError,
    VerificationError,
)
from recoup.evaluate import accuracy, divergence
from recoup.plan import Plan
from recoup.prune import Result, inspect, prune, trace
from recoup.recover import compensate, select
from recoup.report.content import Report
from recoup.search import Search, search
from recoup.settings import PRESETS, Budget, Settings
from recoup.structure.surgery import apply
from recoup.version import __version__

__all__ = [
    "PRESETS",
    "ArtefactError",
    "Budget",
    "BudgetError",
    "Calibration",
    "CalibrationError",
    "CaptureError",
    "DataError",
    "IllConditionedError",
    "Layer",
    "LockedError",
    "ModelError",
    "Plan",
    "Problem",
    "Ranking",
    "RecoupError",
    "Report",
    "Result",
    "Search",
    "Selector",
    "Settings",
    "UsageError",
    "VerificationError",
    "__version__",
    "accuracy",
    "apply",
    "calibrate",
    "compensate",
    "divergence",
    "inspect",
    "load",
    "prune",
    "search",
    "select",
    "trace",
]
