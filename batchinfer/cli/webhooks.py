"""``webhooks``: who is told when a job ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from batchinfer.cli.connect import open_door, server_options
from batchinfer.cli.console import MISSING, one_line, print_json, print_table
from batchinfer.cli.exit_codes import ExitCode
from batchinfer.cli.options import json_option
from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.caller import DEFAULT_TENANT

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from typing import Any

    from batchinfer.jobs.webhook_views import DeliveryView, WebhookView


@click.group("webhooks")
def webhooks_command() -> None:
    """Tell a URL when jobs end or schedules fail, signed and retried.

    Messages are those of Standard Webhooks: any of its libraries verifies them.
    """


def _tenant_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--tenant", metavar="TENANT", help=f"Whose webhook it is (default: {DEFAULT_TENANT}; on a server, the key's)."
    )(command)


@webhooks_command.command("add")
@click.argument("url")
@click.option(
    "--event", "events", multiple=True, metavar="EVENT", help="Only this one, such as job.failed; may be repeated."
)
@_tenant_option
@server_options
@json_option
def add_command(url: str, events: tuple[str, ...], tenant: str | None, as_json: bool) -> None:
    """Add a webhook and print its secret: it is shown this once."""
    from batchinfer.cli.local import LocalDoor

    with open_door() as door:
        if tenant is None:
            view = door.webhooks.add(url, events=events)
        elif isinstance(door, LocalDoor):
            view = door.webhooks.add(url, events=events, tenant=tenant)
        else:
            raise InvalidSpecError("--tenant is for one's own database; on a server the key says whose webhook it is")
    if as_json:
        print_json(view)
        return
    click.echo(view.secret)
    click.echo(f"{view.id} signs with this secret; keep it now, it is not shown again", err=True)


@webhooks_command.command("ls")
@server_options
@json_option
def ls_command(as_json: bool) -> None:
    """List webhooks and how they do."""
    with open_door() as door:
        found = door.webhooks.list()
    if as_json:
        print_json(found)
        return
    titles = ("WEBHOOK", "TENANT", "STATE", "FAILURES", "EVENTS", "URL")
    print_table(titles, [_row(view) for view in found.data])


def _row(view: WebhookView) -> tuple[str, ...]:
    events = ",".join(view.events) or "all"
    return view.id, view.tenant, view.state, str(view.failures), events, one_line(view.url, 60)


@webhooks_command.command("rm")
@click.argument("webhook_id", metavar="WEBHOOK")
@server_options
@json_option
def rm_command(webhook_id: str, as_json: bool) -> None:
    """Remove a webhook and the list of its deliveries."""
    with open_door() as door:
        view = door.webhooks.remove(webhook_id)
    if as_json:
        print_json(view)
    else:
        click.echo(f"{view.id} is removed")


@webhooks_command.command("enable")
@click.argument("webhook_id", metavar="WEBHOOK")
@server_options
@json_option
def enable_command(webhook_id: str, as_json: bool) -> None:
    """Send again to a webhook that was disabled or is failing."""
    with open_door() as door:
        view = door.webhooks.enable(webhook_id)
    if as_json:
        print_json(view)
    else:
        click.echo(f"{view.id} is {view.state}")


@webhooks_command.command("test")
@click.argument("webhook_id", metavar="WEBHOOK")
@server_options
@json_option
def test_command(webhook_id: str, as_json: bool) -> int:
    """Send webhook.test now; the exit code is 1 if it is not taken."""
    with open_door() as door:
        return _report(door.webhooks.test(webhook_id), as_json)


@webhooks_command.command("redeliver")
@click.argument("webhook_id", metavar="WEBHOOK")
@click.argument("delivery_id", metavar="DELIVERY")
@server_options
@json_option
def redeliver_command(webhook_id: str, delivery_id: str, as_json: bool) -> int:
    """Send a message again now; the exit code is 1 if it is not taken."""
    with open_door() as door:
        return _report(door.webhooks.redeliver(webhook_id, delivery_id), as_json)


def _report(view: DeliveryView, as_json: bool) -> int:
    if as_json:
        print_json(view)
    else:
        click.echo(f"{view.id} is {view.state}: {view.last_error or f'status {view.last_status}'}")
    return ExitCode.OK if view.state == "delivered" else ExitCode.FAILED


@webhooks_command.command("deliveries")
@click.argument("webhook_id", metavar="WEBHOOK")
@click.option("--state", type=click.Choice(["pending", "delivered", "failed"]), help="Only these.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Most deliveries to list.")
@click.option("--after", metavar="DELIVERY", help="Begin behind this one, the last one of the page before.")
@server_options
@json_option
def deliveries_command(webhook_id: str, state: str | None, limit: int, after: str | None, as_json: bool) -> None:
    """List a webhook's deliveries of the last 30 days, newest first."""
    with open_door() as door:
        found = door.webhooks.deliveries(webhook_id, state=state, limit=limit, after=after)
    if as_json:
        print_json(found)
        return
    titles = ("DELIVERY", "EVENT", "STATE", "ATTEMPTS", "ANSWER", "LAST", "NEXT")
    print_table(titles, [_delivery_row(view) for view in found.data])
    if found.has_more:
        click.echo(f"more: batchinfer webhooks deliveries {webhook_id} --after {found.last_id}", err=True)


def _delivery_row(view: DeliveryView) -> tuple[str, ...]:
    answer = view.last_error or (MISSING if view.last_status is None else str(view.last_status))
    times = (_time(view.last_at), _time(view.next_at))
    return (view.id, view.event, view.state, str(view.attempts), one_line(answer, 50), *times)


def _time(moment: datetime | None) -> str:
    return MISSING if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S")
