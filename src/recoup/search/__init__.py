"""How much each group can lose: within an accuracy tolerance by measuring, or within a budget."""

from recoup.search.binary import Search, Trial, search
from recoup.search.budget import fit_budget
from recoup.search.measured import Allocator, allocator, bolder_share, keep_within, search_share

__all__ = [
    "Allocator", "Search", "Trial", "allocator", "bolder_share", "fit_budget", "keep_within", "search", "search_share",
]  # fmt: skip
