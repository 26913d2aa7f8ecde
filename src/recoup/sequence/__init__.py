"""Recovery in sequence: layer after layer in the network as it is pruned, towards what the original put out."""

from recoup.sequence.refine import refine
from recoup.sequence.refit import recover_in_sequence

__all__ = ["recover_in_sequence", "refine"]
