"""How much each group can lose: within an accuracy tolerance by measuring, or within a budget."""

from recoup.search.binary import Search, Trial, search
from recoup.search.budget import fit_budget
from recoup.search.latency import Latency, keep_within_time
from recoup.search.measured import LEVELS, Allocator, allocator, keep_within
from recoup.search.rounds import keep_in_rounds
from recoup.search.tolerance import search_in_full, search_share

__all__ = [
    "LEVELS", "Allocator", "Latency", "Search", "Trial", "allocator", "fit_budget", "keep_in_rounds", "keep_within",
    "keep_within_time", "search", "search_in_full", "search_share",
]  # fmt: skip
