"""``keys``: API keys, made and ended on the database itself."""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from batchinfer.cli.connect import open_service
from batchinfer.cli.console import MISSING, one_line, print_json, print_table
from batchinfer.cli.options import json_option
from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.caller import DEFAULT_TENANT, Role

if TYPE_CHECKING:
    from datetime import datetime

    from batchinfer.jobs.keys import KeyRecord

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
@click.option("--tenant", default=DEFAULT_TENANT, show_default=True, metavar="NAME", help="Whom the key acts for.")
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
@json_option
def create_command(  # noqa: PLR0917 -- click passes them by name
    tenant: str,
    platform: bool,
    role: str,
    name: str | None,
    scopes: tuple[str, ...],
    expires: str | None,
    rate: int | None,
    as_json: bool,
) -> None:
    """Make a key and print it: it is shown this once and kept nowhere."""
    lifetime = None if expires is None else parse_span("--expires", expires)
    with open_service() as service:
        record, token = service.keys.create(
            service.caller, tenant=None if platform else tenant, role=Role(role), name=name, scopes=scopes,
            lifetime=lifetime, rate_per_minute=rate,
        )  # fmt: skip
    _print_new(record, token, as_json)


def _print_new(record: KeyRecord, token: str, as_json: bool) -> None:
    if as_json:
        print_json(asdict(record) | {"key": token})
        return
    click.echo(token)
    whom = "the whole platform" if record.tenant is None else f"tenant {record.tenant}"
    click.echo(f"a {record.role} of {whom}; keep it now, it is not shown again", err=True)


@keys_command.command("ls")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most keys to list.")
@click.option("--after", metavar="KEY", help="Begin behind this key, the last one of the page before.")
@json_option
def ls_command(limit: int, after: str | None, as_json: bool) -> None:
    """List keys, ended ones too; secrets are not there to be shown."""
    with open_service() as service:
        found = service.keys.list(service.caller, limit=limit + 1, after=after)
    page = found[:limit]
    if as_json:
        print_json({"object": "list", "data": [asdict(record) for record in page], "has_more": len(found) > limit})
        return
    titles = ("KEY", "TENANT", "ROLE", "SCOPES", "NAME", "CREATED", "EXPIRES", "LAST USED", "STATE")
    print_table(titles, [_list_row(record) for record in page])
    if len(found) > limit:
        click.echo(f"more: batchinfer keys ls --limit {limit} --after {page[-1].id}", err=True)


def _list_row(record: KeyRecord) -> tuple[str, ...]:
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
@json_option
def rotate_command(key_id: str, overlap: str, as_json: bool) -> None:
    """Make a key that may what this one may, and let the old one end a little later."""
    with open_service() as service:
        record, token = service.keys.rotate(service.caller, key_of(key_id), overlap=parse_span("--overlap", overlap))
    _print_new(record, token, as_json)


@keys_command.command("revoke")
@click.argument("key_id", metavar="KEY")
@json_option
def revoke_command(key_id: str, as_json: bool) -> None:
    """End a key; servers refuse it within two seconds."""
    with open_service() as service:
        record = service.keys.revoke(service.caller, key_of(key_id))
    if as_json:
        print_json(asdict(record))
    else:
        click.echo(f"{record.id} is revoked")


def key_of(text: str) -> str:
    """The id, out of an id or of a whole key: people paste what they have."""
    parts: Any = text.split("_")
    return str(parts[1]) if len(parts) == 3 and parts[0] == "bi" else text
