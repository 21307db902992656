"""``cancel``, ``pause``, ``resume`` and ``retry``: steering jobs."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

import click

from batchinfer.cli.connect import open_jobs, server_options
from batchinfer.cli.console import count, print_json
from batchinfer.cli.jobs import rows_done
from batchinfer.cli.options import json_option
from batchinfer.errors import InvalidSpecError
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from batchinfer.jobs.views import JobView

RETRIABLE = ("errored", "expired", "cancelled")


def parse_budget(text: str | None) -> Decimal | None:
    """Read ``5``, ``0.25`` or ``$1,000``.

    Raises:
        InvalidSpecError: it is no amount above zero.
    """
    if text is None:
        return None
    try:
        amount = Decimal(text.strip().removeprefix("$").replace(",", ""))
    except InvalidOperation:
        amount = Decimal(0)
    if not amount.is_finite() or amount <= 0:
        raise InvalidSpecError(f"--budget {text!r} is not an amount in dollars, such as --budget 5", param="budget_usd")
    return amount


def _print(view: JobView, text: str, as_json: bool) -> None:
    if as_json:
        print_json(view)
    else:
        click.echo(f"{view.id} {text}")


@click.command("cancel")
@click.argument("job_id", metavar="JOB")
@server_options
@json_option
def cancel_command(job_id: str, as_json: bool) -> None:
    """Cancel a job; finished rows are kept.

    Rows that did not run are written as cancelled rows; `batchinfer retry` runs them after all.
    """
    with open_jobs() as service:
        view = service.cancel(job_id)
    _print(view, f"is {view.state}: {rows_done(view)} rows have an outcome and are kept", as_json)


@click.command("pause")
@click.argument("job_id", metavar="JOB")
@server_options
@json_option
def pause_command(job_id: str, as_json: bool) -> None:
    """Pause a job; finished rows are kept."""
    with open_jobs() as service:
        view = service.pause(job_id)
    _print(view, f"is {view.state}; go on with: batchinfer resume {job_id}", as_json)


@click.command("resume")
@click.argument("job_id", metavar="JOB")
@click.option("--budget", metavar="USD", help="A new budget for the whole job, above what it has spent.")
@server_options
@json_option
def resume_command(job_id: str, budget: str | None, as_json: bool) -> None:
    """Resume a paused job, or one whose budget is used up.

    A failed job is tried again. The job runs as it was submitted; finished rows are not run again.
    """
    amount = parse_budget(budget)
    with open_jobs() as service:
        view = service.resume(job_id, budget_usd=amount)
    _print(view, f"is {view.state}; a worker goes on with it (or: batchinfer run --resume {job_id})", as_json)


@click.command("retry")
@click.argument("job_id", metavar="JOB")
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(RETRIABLE),
    help="Only rows that ended so; may be repeated (default: all three).",
)
@server_options
@json_option
def retry_command(job_id: str, statuses: tuple[str, ...], as_json: bool) -> None:
    """Run the rows of a finished job again that did not succeed.

    Rows that succeeded are neither run nor charged again.
    """
    chosen = [RowStatus(status) for status in statuses or RETRIABLE]
    with open_jobs() as service:
        view, num_rows = service.retry(job_id, chosen)
    if as_json:
        print_json({"retried_rows": num_rows, "job": view.model_dump(mode="json")})
    elif num_rows:
        click.echo(f"{job_id} runs {count(num_rows)} rows again (or: batchinfer run --resume {job_id})")
    else:
        click.echo(f"{job_id} has no row that is {' or '.join(chosen)}: nothing to run")
