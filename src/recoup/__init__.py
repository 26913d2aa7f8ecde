"""Recoup makes a trained PyTorch network smaller and faster without retraining.

>>> result = recoup.prune(model, calibration, validation=batches, tolerance=1.0)    # doctest: +SKIP
>>> result.model, result.report                                                     # doctest: +SKIP

The steps of `prune` are public too: trace, split, calibrate, rank, allocate, recover, apply, verify. Errors that a user
can mend are in `recoup.errors`, all of them a `RecoupError`.
"""

from recoup._prune import Result, inspect, prune
from recoup.algebra.selection import Layer, Problem, Ranking, Selector
from recoup.allocation.goal import Allocation, Goal
from recoup.artefact.reading import load
from recoup.config import Budget
from recoup.errors import RecoupError, RecoupWarning
from recoup.inputs.split import Split, split
from recoup.judge.accuracy import accuracy, divergence
from recoup.judge.perplexity import perplexity
from recoup.methods.best import Best, Fast
from recoup.methods.paper import Paper, Released
from recoup.methods.registry import allocate, recover
from recoup.plan import Plan
from recoup.recovery.choose import Recovered
from recoup.report.content import Report
from recoup.statistics.calibrate import Calibration, calibrate
from recoup.statistics.rank import rank
from recoup.statistics.rotation import rotate
from recoup.surgery.apply import apply
from recoup.surgery.verify import verify
from recoup.tracing.trace import Traced, trace
from recoup.training.loop import finetune
from recoup.training.record import Finetuned
from recoup.training.settings import Training
from recoup.version import __version__

__all__ = [
    "Allocation",
    "Best",
    "Budget",
    "Calibration",
    "Fast",
    "Finetuned",
    "Goal",
    "Layer",
    "Paper",
    "Plan",
    "Problem",
    "Ranking",
    "RecoupError",
    "RecoupWarning",
    "Recovered",
    "Released",
    "Report",
    "Result",
    "Selector",
    "Split",
    "Traced",
    "Training",
    "__version__",
    "accuracy",
    "allocate",
    "apply",
    "calibrate",
    "divergence",
    "finetune",
    "inspect",
    "load",
    "perplexity",
    "prune",
    "rank",
    "recover",
    "rotate",
    "split",
    "trace",
    "verify",
]
