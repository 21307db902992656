"""``budget``: what tenants may spend in a month."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from batchinfer.cli.connect import open_door, server_options
from batchinfer.cli.console import MISSING, print_fields, print_json, print_table, usd
from batchinfer.cli.options import json_option
from batchinfer.cli.price import amount
from batchinfer.jobs.caller import DEFAULT_TENANT
from batchinfer.money import nanos_to_usd

if TYPE_CHECKING:
    from batchinfer.jobs.money_views import BudgetView

_MONTH = click.option("--month", metavar="YYYY-MM", help="One month (default: every month without its own budget).")
_TENANT = click.option("--tenant", default=DEFAULT_TENANT, show_default=True, metavar="TENANT", help="Whose budget.")


@click.group("budget")
def budget_command() -> None:
    """Limit what tenants may spend in a month.

    A budget counts metered cost, rows and overhead, in UTC months. Once it is reached, no further shard of the tenant's
    jobs is handed out: they wait as budget_exhausted, and go on with `batchinfer resume` after a raise. A job's own
    budget is set with `submit --budget`, `change --budget` and `resume --budget`.
    """


@budget_command.command("set")
@click.argument("limit", metavar="USD")
@_TENANT
@_MONTH
@server_options
@json_option
def set_command(limit: str, tenant: str, month: str | None, as_json: bool) -> None:
    """Set or raise a budget, and show how it stands."""
    nanos = amount("USD", limit)
    with open_door() as door:
        view = door.budgets.set(tenant, nanos_to_usd(nanos), month)
    if as_json:
        print_json(view)
        return
    print_fields(
        [
            ("tenant", view.tenant),
            ("month", view.month or "every month"),
            ("limit", usd(view.limit_usd)),
            (f"spent in {view.spent_month}", usd(view.spent_usd)),
            ("in flight", usd(view.in_flight_usd) if view.in_flight_usd else ""),
            ("over by", usd(view.overrun_usd) if view.overrun_usd else ""),
        ]
    )
    if view.held_jobs and not view.is_spent:
        click.echo(f"held jobs go on with: batchinfer resume {view.held_jobs[0]}", err=True)


@budget_command.command("ls")
@click.option("--tenant", metavar="TENANT", help="Only this tenant's.")
@server_options
@json_option
def ls_command(tenant: str | None, as_json: bool) -> None:
    """List budgets and how they stand this month."""
    with open_door() as door:
        found = door.budgets.list(tenant)
    if as_json:
        print_json(found)
        return
    if not found.data:
        click.echo("no budget is set: `batchinfer budget set USD`", err=True)
        return
    print_table(
        ("TENANT", "MONTH", "LIMIT", "SPENT", "IN FLIGHT", "LEFT", "OVER", "HELD JOBS"), [_row(v) for v in found.data]
    )


def _row(view: BudgetView) -> tuple[str, ...]:
    return (
        view.tenant,
        view.month or f"every ({view.spent_month})",
        usd(view.limit_usd),
        usd(view.spent_usd),
        usd(view.in_flight_usd),
        usd(view.remaining_usd),
        usd(view.overrun_usd) if view.overrun_usd else MISSING,
        str(len(view.held_jobs)),
    )


@budget_command.command("rm")
@_TENANT
@_MONTH
@server_options
@json_option
def rm_command(tenant: str, month: str | None, as_json: bool) -> None:
    """Take a budget away. Jobs that it held wait for `batchinfer resume`."""
    with open_door() as door:
        door.budgets.remove(tenant, month)
    if as_json:
        print_json({"tenant": tenant, "month": month, "removed": True})
    else:
        click.echo(f"{tenant} has no budget for {month or 'every month'} any more")
