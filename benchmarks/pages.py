"""Blocks of pages that are made from measurements: what stands between `<!-- name -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from pathlib import Path


def replace_table(text: str, name: str, table_text: str) -> str:
    """Put a table between the comments `<!-- name -->` and `<!-- end -->`."""
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{table_text}\n{match[2]}", text)


def publish(table_text: str, name: str, page: Path | None) -> None:
    """Print a table, and put it into its place of a page."""
    print(table_text)
    if page is not None:
        page.write_text(replace_table(page.read_text(), name, table_text))
