"""Writes the generated pages beside this file; ``--check`` only says whether they are up to date."""  # noqa: INP001 -- a script, run by its path

import sys
from pathlib import Path

from batchinfer.cli.reference import PAGES

FOLDER = Path(__file__).parent


def main() -> int:
    """Write the pages, or check them; 1 if a page is out of date."""
    is_check = sys.argv[1:] == ["--check"]
    stale = [name for name, text in PAGES.items() if not _is_current(FOLDER / name, text())]
    for name in [] if is_check else stale:
        (FOLDER / name).write_text(PAGES[name](), encoding="utf-8")
    if is_check and stale:
        sys.stderr.write(f"out of date: {', '.join(stale)}; run `make docs`\n")
        return 1
    return 0


def _is_current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
