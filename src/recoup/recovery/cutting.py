"""No recovery: what is pruned is only cut off, and every weight that stays is what it was.

ŷ = W_S^T a_S + b
"""

from __future__ import annotations

from torch import Tensor

from recoup.plan import Plan
from recoup.recovery.plans import assemble
from recoup.statistics.calibrate import Calibration
from recoup.surgery.apply import bare_plan


def recover_nothing(calibration: Calibration, keep: Tensor) -> Plan:
    """The plan that keeps `keep`, a mask over all channels, and refits nothing."""
    return assemble(calibration, keep, cut_weights(calibration, keep), {})


def cut_weights(calibration: Calibration, keep: Tensor) -> dict[str, Tensor]:
    """Weights of the layers that lose inputs, at their original size: zero where an input is pruned, else unchanged."""
    return dict(bare_plan(calibration.structure, calibration.parameters, keep).weights)
