"""What sequential recovery asks of a method."""

from __future__ import annotations

from recoup.config import SequentialMethod
from recoup.errors import UsageError
from recoup.statistics.calibrate import Calibration


def sequential_method(calibration: Calibration) -> SequentialMethod:
    """The calibration's method, if it refits layers in sequence.

    Raises:
        UsageError: it refits them in one pass only.
    """
    method = calibration.method
    if not isinstance(method, SequentialMethod):
        raise UsageError(f"{type(method).__name__} refits layers in one pass. Calibrate with Best() or Fast().")
    return method
