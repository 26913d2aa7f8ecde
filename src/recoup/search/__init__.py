"""How much each group can lose: within an accuracy tolerance by measuring, or within a budget."""

from recoup.search.binary import Search, Trial, search
from recoup.search.budget import fit_budget
from recoup.search.latency import Latency, keep_within_time
from recoup.search.measured import LEVELS, Allocator, allocator, bolder_share, keep_within, search_share

__all__ = [
    "LEVELS", "Allocator", "Latency", "Search", "Trial", "allocator", "bolder_share", "fit_budget", "keep_within",
    "keep_within_time", "search", "search_share",
]  # fmt: skip
