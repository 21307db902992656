"""``forecast``: what was expected of a job, beside how it came out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from batchinfer.cli.connect import open_jobs, server_options
from batchinfer.cli.console import MISSING, print_json, print_table
from batchinfer.cli.options import json_option

if TYPE_CHECKING:
    from batchinfer.jobs.money_views import Compared


@click.command("forecast")
@click.argument("job_id", metavar="JOB")
@server_options
@json_option
def forecast_command(job_id: str, as_json: bool) -> None:
    """Show what was expected of a job, beside how it came out.

    The forecast is made when the job is planned, from the size of its prompts and from past jobs of the same options.
    """
    with open_jobs() as service:
        report = service.forecast(job_id)
    if as_json:
        print_json(report)
        return
    print_table(
        ("FIGURE", "EXPECTED", "FROM", "TO", "OUTCOME", "OFF BY", "INSIDE"), [_row(one) for one in report.figures]
    )
    click.echo(f"answer length from {report.length_basis}; time and cost from {report.speed_basis}", err=True)


def _row(one: Compared) -> tuple[str, ...]:
    bounds = one.predicted
    return (
        one.what,
        *(_number(one.what, value) for value in (bounds.expected, bounds.low, bounds.high)),
        MISSING if one.actual is None else _number(one.what, one.actual),
        MISSING if one.error is None else f"{one.error:+.1%}",
        MISSING if one.is_covered is None else "yes" if one.is_covered else "no",
    )


def _number(what: str, value: float) -> str:
    if what == "cost_usd":
        return f"${value:.9f}".rstrip("0").rstrip(".")
    return f"{value:,.1f}s" if what == "device_seconds" else f"{value:,.0f}"
