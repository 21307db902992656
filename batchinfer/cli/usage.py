"""``usage``: what was run and what it cost."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Any

import click

from batchinfer.cli.connect import is_remote, open_door, open_service, server_options
from batchinfer.cli.console import count, print_json, print_table
from batchinfer.cli.options import json_option
from batchinfer.errors import InvalidSpecError

if TYPE_CHECKING:
    from batchinfer.jobs.money_views import UsageLine, UsageView


def _day(flag: str, text: str | None) -> date | None:
    if text is None:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidSpecError(f"{flag} {text!r} is no day such as 2026-11-30") from None


@click.command("usage")
@click.option("--by", "groups", multiple=True, default=("day",), show_default=True, metavar="GROUP[,GROUP]",
              help="One or two of day, tenant, model, job, tag.")  # fmt: skip
@click.option("--from", "first", metavar="DAY", help="First UTC day.")
@click.option("--to", "last", metavar="DAY", help="Last UTC day, included.")
@click.option("--model", metavar="MODEL", help="Only this model.")
@click.option("--tenant", metavar="TENANT", help="Only this tenant.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most lines to show.")
@click.option("--after", metavar="CURSOR", help="Begin behind a page's last line.")
@click.option("--export", "path", metavar="FILE.parquet", help="Write all lines to a Parquet file.")
@server_options
@json_option
def usage_command(  # noqa: PLR0917 -- click passes them by name
    groups: tuple[str, ...],
    first: str | None,
    last: str | None,
    model: str | None,
    tenant: str | None,
    limit: int,
    after: str | None,
    path: str | None,
    as_json: bool,
) -> None:
    """Show what was run and what it cost, by day, tenant, model, job or tag.

    Metered is device time of rows, overhead is device time that no row caused, list is what the tokens cost by the
    price book. A job with two tags counts in both.
    """
    days = {"first_day": _day("--from", first), "last_day": _day("--to", last)}
    if path is not None:
        number = _export(groups, path, model=model, tenant=tenant, **days)
        if as_json:
            print_json({"path": path, "num_lines": number})
        else:
            click.echo(f"{path}: {count(number)} lines")
        return
    with open_door() as door:
        view = door.usage.get(groups, model=model, tenant=tenant, after=after, limit=limit, **days)
    if as_json:
        print_json(view)
        return
    _print(view)
    if view.has_more:
        click.echo(f"more: --after {view.next_after}", err=True)


def _export(groups: tuple[str, ...], path: str, **only: Any) -> int:
    from batchinfer.jobs.usage import UsageQuery, parse_groups

    if is_remote():
        raise InvalidSpecError("--export reads the database itself; a server gives pages: leave it out, or --server")
    try:
        with open_service() as service:
            return service.money.export_usage(UsageQuery(parse_groups(groups), **only), path)
    except OSError as error:
        raise InvalidSpecError(f"--export {path} cannot be written: {error.strerror or error}") from None


def _print(view: UsageView) -> None:
    if not view.data:
        click.echo("nothing was run in this time", err=True)
        return
    titles = [name.upper() for name in view.group_by]
    rows = [(*(getattr(line, name) or "(no job)" for name in view.group_by), *_figures(line)) for line in view.data]
    print_table((*titles, "ROWS", "PROMPT", "CACHED", "GENERATED", "METERED", "OVERHEAD", "LIST", "DEVICE"), rows)


def _figures(line: UsageLine) -> tuple[str, ...]:
    return (
        count(line.num_rows),
        count(line.prompt_tokens),
        count(line.cached_tokens),
        count(line.completion_tokens),
        f"${line.metered_usd:f}",
        f"${line.overhead_usd:f}",
        f"${line.list_usd:f}",
        f"{line.device_seconds:,.1f}s",
    )
