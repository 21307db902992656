"""``rows``, ``events`` and ``workers``: a closer look."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from batchinfer.cli.connect import open_door, open_jobs, server_options
from batchinfer.cli.console import MISSING, one_line, print_json, print_table, usd
from batchinfer.cli.options import json_option
from batchinfer.cli.results import print_rows
from batchinfer.jobs.status import HELD, JobState
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from batchinfer.jobs.views import EventView

POLL_SECONDS = 1.0


@click.command("rows")
@click.argument("job_id", metavar="JOB")
@click.option("--status", type=click.Choice([status.value for status in RowStatus]), help="Only rows with this status.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Most rows to show.")
@click.option("--after", type=click.IntRange(-1), default=-1, help="Begin behind this row index.")
@server_options
@json_option
def rows_command(job_id: str, status: str | None, limit: int, after: int, as_json: bool) -> None:
    """Show result rows in input order, also while the job runs."""
    wanted = None if status is None else RowStatus(status)
    with open_jobs() as service:
        page = service.rows(job_id, after=after, status=wanted, limit=limit)
    if as_json:
        print_json(page)
        return
    print_rows(page.data)
    if page.has_more:
        only = "" if status is None else f"--status {status} "
        click.echo(f"more: batchinfer rows {job_id} {only}--limit {limit} --after {page.next_after}", err=True)


@click.command("events")
@click.argument("job_id", metavar="JOB")
@click.option("--after", type=click.IntRange(0), default=0, help="Begin behind this event.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most events at once.")
@click.option("--follow", is_flag=True, help="Go on until the job ends or is held.")
@server_options
@json_option
def events_command(job_id: str, after: int, limit: int, follow: bool, as_json: bool) -> None:
    """Show what happened to a job, oldest first.

    With --json --follow: one JSON document a line.
    """
    with open_jobs() as service:
        while follow:
            state = JobState(service.get(job_id).state)
            page = service.events(job_id, after=after, limit=limit)
            for event in page.data:
                after = event.id
                if as_json:
                    print_json(event, is_line=True)
                else:
                    click.echo("\t".join(_row(event)))
            is_still = state.is_terminal or state in HELD or state is JobState.FAILED
            if is_still and not page.has_more:
                return
            time.sleep(0 if page.has_more else POLL_SECONDS)
        page = service.events(job_id, after=after, limit=limit)
    if as_json:
        print_json(page)
        return
    print_table(("EVENT", "TIME", "KIND", "DETAILS"), [_row(event) for event in page.data])
    if page.has_more:
        click.echo(f"more: batchinfer events {job_id} --limit {limit} --after {page.data[-1].id}", err=True)


def _row(event: EventView) -> tuple[str, ...]:
    return str(event.id), event.at.isoformat(timespec="seconds"), event.kind, one_line(json.dumps(event.data), 120)


@click.command("workers")
@click.option("--backlog", is_flag=True, help="Show the work that waits instead, and how many workers it wants.")
@click.option(
    "--target-seconds",
    type=click.FloatRange(0, 7 * 86400, min_open=True),
    default=600.0,
    show_default=True,
    help="With --backlog: time within which the work should be done.",
)
@server_options
@json_option
def workers_command(backlog: bool, target_seconds: float, as_json: bool) -> None:
    """List workers: where they run, with which model, and whether they give signs of life."""
    if backlog:
        _print_backlog(target_seconds, as_json)
        return
    with open_door() as door:
        found = door.workers.list()
    if as_json:
        print_json(found)
        return
    if not found.data:
        click.echo("no worker is running: start `batchinfer worker`", err=True)
        return
    rows = [
        (
            worker.id,
            worker.hostname,
            worker.device,
            ", ".join(worker.models) or MISSING,
            ", ".join(worker.pools),
            usd(worker.usd_per_hour),
            "silent" if not worker.is_alive else "alive" if worker.is_healthy else "unhealthy",
            worker.last_seen_at.isoformat(timespec="seconds"),
        )
        for worker in found.data
    ]
    print_table(("WORKER", "HOST", "DEVICE", "MODELS", "POOLS", "PER HOUR", "STATE", "LAST SEEN"), rows)
    for worker in found.data:
        if worker.is_alive and worker.fault:
            click.echo(f"{worker.id} takes no shards: {worker.fault}", err=True)


def _print_backlog(target_seconds: float, as_json: bool) -> None:
    with open_door() as door:
        queue = door.workers.queue(target_seconds=target_seconds)
    if as_json:
        print_json(queue)
        return
    rows = [
        (
            lane.model,
            lane.pool,
            lane.device_kind or MISSING,
            str(lane.waiting_rows),
            str(lane.running_rows),
            f"{lane.device_seconds:.0f}" + ("" if lane.is_measured else " (guess)"),
            str(lane.workers),
            str(lane.workers_wanted),
        )
        for lane in queue.data
    ]
    print_table(("MODEL", "POOL", "KIND", "WAITING", "RUNNING", "DEVICE S", "WORKERS", "WANTED"), rows)
