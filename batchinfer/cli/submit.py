"""``submit``: hand a job to the workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchinfer.cli import exit_codes
from batchinfer.cli.connect import open_jobs, server_options
from batchinfer.cli.console import print_json
from batchinfer.cli.exit_codes import ExitCode
from batchinfer.cli.jobs import follow, print_status
from batchinfer.cli.options import build_spec, given_fields, json_option, spec_options
from batchinfer.cli.progress import choose_display

if TYPE_CHECKING:
    from batchinfer.jobs.door import JobDoor


@click.command("submit", epilog=exit_codes.epilog())
@spec_options
@click.option("--limit", type=click.IntRange(1), help="Only the first rows of the input.")
@click.option("--idempotency-key", metavar="TEXT", help="The same key again gives the same job, not a second one.")
@click.option("--wait", is_flag=True, help="Wait until the job ends; then the exit code says how.")
@server_options
@json_option
def submit_command(idempotency_key: str | None, wait: bool, as_json: bool, **flags: Any) -> ExitCode:
    """Hand a job to the workers and print its id.

    INPUTS are Parquet or JSONL files, folders or globs, local or s3://. A `batchinfer worker` on the same database
    runs the job; `batchinfer watch JOB` follows it.
    """
    spec = build_spec(flags)
    with open_jobs() as service:
        view, is_new = service.submit(spec, base=Path.cwd(), idempotency_key=idempotency_key, body=given_fields(flags))
        if wait:
            return _wait(service, view.id, as_json)
        num_workers = service.num_workers()
    if as_json:
        print_json(view)
        return ExitCode.OK
    click.echo(view.id)
    note = "submitted" if is_new else "submitted before, under the same key"
    click.echo(f"{note}; follow it with: batchinfer watch {view.id}", err=True)
    if num_workers == 0:
        click.echo("no worker is running: start `batchinfer worker`", err=True)
    return ExitCode.OK


def _wait(service: JobDoor, job_id: str, as_json: bool) -> ExitCode:
    view = follow(service, job_id, choose_display())
    if as_json:
        print_json(view)
    else:
        print_status(view)
    return exit_codes.of_job(view.state, view.outcome)
