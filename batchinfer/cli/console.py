"""What commands print on stdout: JSON for machines, tables on a terminal, plain lines in a pipe."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from batchinfer.money import format_usd, usd_to_nanos

if TYPE_CHECKING:
    from collections.abc import Sequence
    from decimal import Decimal

    from pydantic import BaseModel

MISSING = "-"
"""Stands where a value is not known (yet)."""


def print_json(document: BaseModel | dict[str, Any], *, is_line: bool = False) -> None:
    """Print one JSON document; on one line if it is one of many."""
    indent = None if is_line else 2
    if isinstance(document, dict):
        click.echo(json.dumps(document, indent=indent, default=str))
    else:
        click.echo(document.model_dump_json(indent=indent))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal; elsewhere one line a row, tab-separated, for ``cut`` and ``awk``."""
    if not sys.stdout.isatty():
        for row in (titles, *rows):
            click.echo("\t".join(one_line(cell) for cell in row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column, title in enumerate(titles):
        # the first column is what people copy: an id in two halves is none
        table.add_column(title, overflow="fold", no_wrap=column == 0)
    for row in rows:
        # Text: what people wrote into prompts and names is never markup
        table.add_row(*(Text(one_line(cell)) for cell in row))
    Console().print(table)


def print_fields(fields: Sequence[tuple[str, str]]) -> None:
    """Print ``name  value`` lines with the values under each other; fields without a value are left out."""
    shown = [(name, value) for name, value in fields if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        click.echo(f"{name:<{width}}  {value}".rstrip())


def one_line(text: str, limit: int | None = None) -> str:
    """``text`` without line breaks and control characters, cut to ``limit`` characters."""
    flat = "".join(character if character.isprintable() else " " for character in text)
    if limit is not None and len(flat) > limit:
        return flat[: limit - 1].rstrip() + "…"
    return flat


def duration(seconds: float | None) -> str:
    """``45s``, ``3m20s``, ``2h05m``, ``3d04h``."""
    if seconds is None:
        return MISSING
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def count(number: int | None) -> str:
    """``1,234,567``."""
    return MISSING if number is None else f"{number:,}"


def rate(per_second: float | None) -> str:
    """``1,234`` from ten up, else one digit after the point."""
    if per_second is None:
        return MISSING
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"


def size(num_bytes: int) -> str:
    """``1.4 MiB``."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def usd(amount: Decimal | None) -> str:
    """``$12.34``; a small amount with two significant digits."""
    return MISSING if amount is None else format_usd(usd_to_nanos(amount))
