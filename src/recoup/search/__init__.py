"""How much each group can lose: within an accuracy tolerance by measuring, or within a plain budget by counting."""

from recoup.search.binary import Search, Trial, search
from recoup.search.budget import fit_budget

__all__ = ["Search", "Trial", "fit_budget", "search"]
