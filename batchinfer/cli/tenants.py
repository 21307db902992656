"""``tenants``: who shares this installation."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from batchinfer.cli.connect import open_service
from batchinfer.cli.console import MISSING, one_line, print_fields, print_json, print_table
from batchinfer.cli.options import json_option

if TYPE_CHECKING:
    from batchinfer.jobs.tenants import TenantRecord


@click.group("tenants")
def tenants_command() -> None:
    """Add, list and change tenants.

    Each tenant sees its own jobs and nothing else. Whatever is made without a tenant belongs to `default`.
    """


def _print(record: TenantRecord, as_json: bool) -> None:
    if as_json:
        print_json(asdict(record))
        return
    print_fields(
        [
            ("tenant", record.id),
            ("name", one_line(record.name or "")),
            ("inputs", ", ".join(record.input_roots) or "as the installation's"),
            ("outputs", ", ".join(record.output_roots) or "as the installation's"),
            ("weight", f"{record.weight:g}"),
            ("disabled", record.disabled_at.isoformat() if record.disabled_at else ""),
        ]
    )


_ROOTS = "A folder or URI below which {} must lie; may be repeated, replaces those before."


_WEIGHT = "Its share of the workers while others have work, too: 2 gets twice as much as 1."


@tenants_command.command("add")
@click.argument("tenant", metavar="TENANT")
@click.option("--name", metavar="TEXT", help="A name for people.")
@click.option("--input-root", "input_roots", multiple=True, metavar="PATH", help=_ROOTS.format("its inputs"))
@click.option("--output-root", "output_roots", multiple=True, metavar="PATH", help=_ROOTS.format("its outputs"))
@click.option("--weight", type=float, default=1.0, show_default=True, help=_WEIGHT)
@json_option
def add_command(  # noqa: PLR0917 -- click passes them by name
    tenant: str,
    name: str | None,
    input_roots: tuple[str, ...],
    output_roots: tuple[str, ...],
    weight: float,
    as_json: bool,
) -> None:
    """Add a tenant: 1 to 40 of a-z, 0-9 and -."""
    with open_service() as service:
        record = service.tenants.add(
            service.caller, tenant, name=name, input_roots=input_roots, output_roots=output_roots, weight=weight
        )
    _print(record, as_json)


@tenants_command.command("ls")
@json_option
def ls_command(as_json: bool) -> None:
    """List tenants."""
    with open_service() as service:
        records = service.tenants.list(service.caller, limit=10_000)
    if as_json:
        print_json({"object": "list", "data": [asdict(record) for record in records], "has_more": False})
        return
    rows = [
        (
            record.id,
            one_line(record.name or MISSING, 30),
            ", ".join(record.input_roots) or MISSING,
            ", ".join(record.output_roots) or MISSING,
            f"{record.weight:g}",
            "disabled" if record.disabled_at else "good",
        )
        for record in records
    ]
    print_table(("TENANT", "NAME", "INPUTS", "OUTPUTS", "WEIGHT", "STATE"), rows)


@tenants_command.command("set")
@click.argument("tenant", metavar="TENANT")
@click.option("--name", metavar="TEXT", help="A name for people.")
@click.option("--input-root", "input_roots", multiple=True, metavar="PATH", help=_ROOTS.format("its inputs"))
@click.option("--output-root", "output_roots", multiple=True, metavar="PATH", help=_ROOTS.format("its outputs"))
@click.option("--no-roots", is_flag=True, help="Forget the roots: the installation's count again.")
@click.option("--weight", type=float, help=_WEIGHT)
@click.option("--disable/--enable", "is_disabled", default=None, help="Refuse, or take again, all of its keys.")
@json_option
def set_command(  # noqa: PLR0917 -- click passes them by name
    tenant: str,
    name: str | None,
    input_roots: tuple[str, ...],
    output_roots: tuple[str, ...],
    no_roots: bool,
    weight: float | None,
    is_disabled: bool | None,
    as_json: bool,
) -> None:
    """Change what is given, and show the tenant."""
    with open_service() as service:
        record = service.tenants.change(
            service.caller,
            tenant,
            name=name,
            input_roots=input_roots if input_roots or no_roots else None,
            output_roots=output_roots if output_roots or no_roots else None,
            weight=weight,
            is_disabled=is_disabled,
        )
    _print(record, as_json)
