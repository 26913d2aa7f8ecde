"""The errors Recoup raises for what a user can fix: each says what, where and what to do next."""

from __future__ import annotations

import contextlib
import difflib
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

# Characters of a value that a message shows.
MOST_SHOWN = 80


class RecoupError(Exception):
    """Any failure a user can act on; the command line prints it and exits with `exit_code`."""

    exit_code = 1


class UsageError(RecoupError):
    """A request that makes no sense as asked: an unknown name, a tolerance of zero, two budgets at once."""

    exit_code = 2


class CaptureError(RecoupError):
    """The model could not be turned into a graph by `torch.export`."""


class CalibrationError(RecoupError):
    """The calibration or validation batches cannot be used: none, of the wrong shape, not finite, without labels."""


class InputError(RecoupError):
    """A standalone model was called in a way that its graph does not serve."""


class IllConditionedError(RecoupError):
    """A linear system has no trustworthy solution at the ridge that was asked for."""


class VerificationError(RecoupError):
    """The smaller model does not compute what the masked original computes, so it is not returned."""


class BudgetError(RecoupError):
    """No choice of widths meets the budget, because locked channels already cost more."""


class LockedError(RecoupError):
    """Nothing in the model can be pruned, because every group of channels has to stay."""


class ModelError(RecoupError):
    """A model or its weights could not be found, built or loaded."""


class DataError(RecoupError):
    """A data set is missing, incomplete or damaged."""


class TrainingError(RecoupError):
    """Training cannot go on: the loss is not finite, or nothing that trains reaches it."""


class ArtefactError(RecoupError):
    """A saved result cannot be written, read or applied to the model at hand."""


class ResourceError(RecoupError):
    """There is not enough memory or disk for what was asked: how much is needed, and how much is there."""


class RecoupWarning(UserWarning):
    """What to know about a result that is returned all the same."""


def warn(message: str) -> None:
    """Warn at the caller's line: the first one outside this package."""
    inside = (str(Path(__file__).parent), contextlib.__file__)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RecoupWarning, stacklevel=level)


def require_kind(what: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Refuse a value of another type than one of `kind`; `expected` says in words what it should be."""
    if not isinstance(value, kind):
        raise UsageError(f"{what} must be {expected}, got {shown(value)}.")


def shown(value: object) -> str:
    """A value for a message, cut to a readable length, with its type where the text alone may mislead."""
    try:
        text = repr(value)
    except Exception:  # user code
        text = ""
    if not text or len(text) > MOST_SHOWN or "\n" in text:
        text = f"{text[:MOST_SHOWN]} ...".splitlines()[0] if text else "a value"
    return f"the class {value.__name__}" if isinstance(value, type) else f"{text} ({type(value).__name__})"


def told(error: BaseException) -> str:
    """An error of somebody else's for a message of ours: its type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def unknown_name(what: str, name: object, known: Iterable[str], more: str = "") -> UsageError:
    """The error for a name that does not exist: what there is (`more` adds to it), and which one was likely meant."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return UsageError(f"unknown {what} {name!r}; there are {', '.join(names)}{more}.{hint}")
