"""``keys``: API keys, made and ended on the database itself."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from batchinfer.cli.connect import open_door, server_options
from batchinfer.cli.console import MISSING, one_line, print_json, print_table
from batchinfer.cli.options import json_option
from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.caller import DEFAULT_TENANT, Role

if TYPE_CHECKING:
    from datetime import datetime

    from batchinfer.jobs.views import KeyView, NewKeyView

_SPAN = re.compile(r"(\d{1,5})([mhd])")


def parse_span(flag: str, text: str) -> timedelta:
    """Read ``90m``, ``24h`` or ``365d``. Raises InvalidSpecError."""
    match = _SPAN.fullmatch(text.strip().lower())
    if match is None:
        raise InvalidSpecError(f"{flag} {text!r} is not a time such as 90m, 24h or 365d")
    return timedelta(**{{"m": "minutes", "h": "hours", "d": "days"}[match[2]]: int(match[1])})


@click.group("keys")
def keys_command() -> None:
    """Make, list, rotate and revoke API keys.

    A key acts for a tenant with a role: viewer looks, submitter submits and steers jobs, admin manages the tenant's
    keys. Once a key was made, the REST API answers nobody without one.
    """


@keys_command.command("create")
@click.option(
    "--tenant",
    metavar="NAME",
    help=f"Whom the key acts for (default: {DEFAULT_TENANT}; on a server, the caller's own).",
)
@click.option("--platform", is_flag=True, help="A key that sees every tenant, for whoever runs the installation.")
@click.option(
    "--role", type=click.Choice([role.value for role in Role]), default=Role.SUBMITTER.value, show_default=True,
    help="What it may do.",
)  # fmt: skip
@click.option("--name", metavar="TEXT", help="A name for people.")
@click.option(
    "--scope", "scopes", multiple=True, metavar="NOUN:VERB",
    help="Only these, such as jobs:read or files:*; may be repeated (default: all that the role may).",
)  # fmt: skip
@click.option("--expires", metavar="TIME", help="Ends after this time: 90m, 24h, 365d (default: never).")
@click.option("--rate", type=click.IntRange(1, 1_000_000), help="Most requests a minute (default: the server's).")
@server_options
@json_option
def create_command(  # noqa: PLR0917 -- click passes them by name
    tenant: str | None,
    platform: bool,
    role: str,
    name: str | None,
    scopes: tuple[str, ...],
    expires: str | None,
    rate: int | None,
    as_json: bool,
) -> None:
    """Make a key and print it: it is shown this once and kept nowhere."""
    seconds = None if expires is None else int(parse_span("--expires", expires).total_seconds())
    with open_door() as door:
        view = door.keys.create(
            tenant=tenant, platform=platform, role=role, name=name, scopes=scopes, expires_in_seconds=seconds,
            rate_per_minute=rate,
        )  # fmt: skip
    _print_new(view, as_json)


def _print_new(view: NewKeyView, as_json: bool) -> None:
    if as_json:
        print_json(view)
        return
    click.echo(view.key)
    whom = "the whole platform" if view.tenant is None else f"tenant {view.tenant}"
    click.echo(f"a {view.role} of {whom}; keep it now, it is not shown again", err=True)


@keys_command.command("ls")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most keys to list.")
@click.option("--after", metavar="KEY", help="Begin behind this key, the last one of the page before.")
@server_options
@json_option
def ls_command(limit: int, after: str | None, as_json: bool) -> None:
    """List keys, ended ones too; secrets are not there to be shown."""
    with open_door() as door:
        page = door.keys.list(limit=limit, after=after)
    if as_json:
        print_json(page)
        return
    titles = ("KEY", "TENANT", "ROLE", "SCOPES", "NAME", "CREATED", "EXPIRES", "LAST USED", "STATE")
    print_table(titles, [_list_row(record) for record in page.data])
    if page.has_more:
        click.echo(f"more: batchinfer keys ls --limit {limit} --after {page.last_id}", err=True)


def _list_row(record: KeyView) -> tuple[str, ...]:
    return (
        record.id,
        record.tenant or "(platform)",
        record.role,
        ",".join(record.scopes) or "all",
        one_line(record.name or MISSING, 30),
        _time(record.created_at),
        _time(record.expires_at),
        _time(record.last_used_at),
        "revoked" if record.revoked_at else f"replaced by {record.replaced_by}" if record.replaced_by else "good",
    )


def _time(moment: datetime | None) -> str:
    return MISSING if moment is None else moment.strftime("%Y-%m-%d %H:%M")


@keys_command.command("rotate")
@click.argument("key_id", metavar="KEY")
@click.option(
    "--overlap", default="24h", show_default=True, metavar="TIME", help="How long the old key lives on: 0m, 90m, 7d."
)
@server_options
@json_option
def rotate_command(key_id: str, overlap: str, as_json: bool) -> None:
    """Make a key that may what this one may, and let the old one end a little later."""
    with open_door() as door:
        seconds = int(parse_span("--overlap", overlap).total_seconds())
        view = door.keys.rotate(key_of(key_id), overlap_seconds=seconds)
    _print_new(view, as_json)


@keys_command.command("revoke")
@click.argument("key_id", metavar="KEY")
@server_options
@json_option
def revoke_command(key_id: str, as_json: bool) -> None:
    """End a key; servers refuse it within two seconds."""
    with open_door() as door:
        record = door.keys.revoke(key_of(key_id))
    if as_json:
        print_json(record)
    else:
        click.echo(f"{record.id} is revoked")


def key_of(text: str) -> str:
    """The id, out of an id or of a whole key: people paste what they have."""
    parts: Any = text.split("_")
    return str(parts[1]) if len(parts) == 3 and parts[0] == "bi" else text
