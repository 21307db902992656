"""Put a results file's tables into a page, between two marks.

    python -m benchmarks.peers.table benchmarks/results/peers-....json [docs/performance.md]

Without a page the tables are printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.peers.report import markdown

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"


def put(page: str, tables: str) -> str:
    """The page with ``tables`` between its marks.

    Raises:
        ValueError: it has no such marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{tables.strip()}\n{END}{after}"


def main() -> None:
    """Print the tables, or write them into the page."""
    if len(sys.argv) not in {2, 3}:
        raise SystemExit(__doc__)
    tables = markdown(json.loads(Path(sys.argv[1]).read_text()))
    if len(sys.argv) == 2:
        print(tables)
        return
    page = Path(sys.argv[2])
    page.write_text(put(page.read_text(), tables))


if __name__ == "__main__":
    main()
