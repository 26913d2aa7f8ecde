"""The selectors that experiments compare: all that are registered, or those that the command line names."""

from __future__ import annotations

import argparse

from recoup.algebra.selection.registry import SELECTORS

# Selectors that know what compensation will repair: the paper's own, forward, and ours, backward.
CAP = ("forward", "backward")
RANDOM = "random"
# A few for --smoke: every registered one has a test of its own elsewhere.
SMOKE = ("forward", "backward", "l2", "random")


def selectors_of(options: argparse.Namespace) -> list[str]:
    """Names of selectors."""
    if options.selectors:
        return list(options.selectors)
    return [name for name in SELECTORS if not options.smoke or name in SMOKE]
