"""``results``, ``errors``, ``cost`` and ``verify``: what came of a job."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchinfer.cli import exit_codes
from batchinfer.cli.connect import open_jobs, server_options
from batchinfer.cli.console import MISSING, count, one_line, print_fields, print_json, print_table, size, usd
from batchinfer.cli.exit_codes import ExitCode
from batchinfer.cli.options import json_option
from batchinfer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.dataset.verify import VerifyReport
    from batchinfer.jobs.door import JobDoor
    from batchinfer.jobs.views import CostView, ErrorPage, PreviewRow, ResultsView

PREVIEW_ROWS = 5


@click.command("results")
@click.argument("job_id", metavar="JOB")
@click.option("--head", type=click.IntRange(0, 1000), default=PREVIEW_ROWS, show_default=True, help="Rows to show.")
@click.option("--download", metavar="FOLDER", type=click.Path(path_type=Path), help="Copy the result files there.")
@server_options
@json_option
def results_command(job_id: str, head: int, download: Path | None, as_json: bool) -> None:
    """Say where a job's results are, and show the first rows.

    The folder is a Parquet data set at every moment, also while the job runs.
    """
    with open_jobs() as service:
        view = service.results(job_id)
        rows = read_preview(service, job_id, head)
        copies = [] if download is None else service.download(job_id, download)
    if as_json:
        document = {**view.model_dump(mode="json"), "rows": [row.model_dump(mode="json") for row in rows]}
        print_json(document | ({} if download is None else {"downloaded": [str(path) for path in copies]}))
        return
    print_rows(rows)
    print_where(view)
    if download is not None:
        click.echo(f"copied {count(len(copies))} {'file' if len(copies) == 1 else 'files'} to {download}")


def read_preview(service: JobDoor, job_id: str, limit: int) -> list[PreviewRow]:
    """The first rows; none, and a word on stderr, where another machine has the files."""
    if not limit:
        return []
    try:
        return service.preview(job_id, limit)
    except InputError as error:
        click.echo(str(error), err=True)
        return []


def print_rows(rows: Sequence[PreviewRow]) -> None:
    """Print result rows, each on two lines at most."""
    for row in rows:
        prompt = one_line(row.prompt or "", 100)
        click.echo(f"[{row.row_index}] {prompt}")
        if row.status == "succeeded":
            click.echo(f"    -> {one_line(row.output or '', 160)}")
        else:
            reason = f"{row.error_code}: {row.error_message}" if row.error_code else ""
            click.echo(f"    -> {row.status} {one_line(reason, 150)}".rstrip())


def print_where(view: ResultsView) -> None:
    """Print where the files are."""
    rows, num_bytes = sum(file.num_rows for file in view.files), sum(file.num_bytes for file in view.files)
    if not view.files:
        click.echo(f"no results yet; they will be in {view.output}")
        return
    files = "1 file" if len(view.files) == 1 else f"{count(len(view.files))} files"
    progress = "" if view.is_complete else " so far"
    click.echo(f"results: {view.output}  ({files}, {count(rows)} rows, {size(num_bytes)}{progress})")


@click.command("errors")
@click.argument("job_id", metavar="JOB")
@click.option("--code", help="Only rows with this code.")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="Most rows to show.")
@click.option("--offset", type=click.IntRange(0), default=0, help="Rows to skip.")
@server_options
@json_option
def errors_command(job_id: str, code: str | None, limit: int, offset: int, as_json: bool) -> None:
    """Show the error rows of a job by code, with what to do.

    A bounded number of rows is kept as samples; the result files have all of them.
    """
    with open_jobs() as service:
        page = service.errors(job_id, limit=limit, offset=offset, code=code)
    if as_json:
        print_json(page)
        return
    if not page.failed_rows:
        click.echo(f"{job_id} has no row that failed")
        return
    print_error_kinds(page)
    print_table(
        ("ROW", "STATUS", "CODE", "MESSAGE"),
        [(str(row.row_index), row.status, row.code, one_line(row.message, 160)) for row in page.data],
    )
    if page.has_more:
        click.echo(f"more: batchinfer errors {job_id} --offset {offset + limit}", err=True)


def print_error_kinds(page: ErrorPage) -> None:
    """Print how many rows failed, why, and what to do about each kind."""
    noun = "row" if page.failed_rows == 1 else "rows"
    click.echo(f"{count(page.failed_rows)} {noun} did not succeed:")
    for kind in page.kinds:
        advice = kind.advice.replace("batchinfer retry JOB", f"batchinfer retry {page.job_id}")
        click.echo(f"  {kind.code} ({count(kind.num_samples)}): {kind.meaning} {advice}")


@click.command("cost")
@click.argument("job_id", metavar="JOB")
@server_options
@json_option
def cost_command(job_id: str, as_json: bool) -> None:
    """Show what a job has cost, metered and at list price."""
    with open_jobs() as service:
        view = service.cost(job_id)
    if as_json:
        print_json(view)
    else:
        print_cost(view)


def print_cost(view: CostView) -> None:
    """Print a cost report: rows and overhead sum exactly to the total."""
    usage = view.usage
    print_fields(
        [
            ("rows", f"${view.rows_usd:f}"),
            *((f"overhead: {kind}", f"${amount:f}") for kind, amount in view.overhead_usd.items()),
            ("metered total", f"${view.metered_total_usd:f}  ({view.device_seconds:,.1f} s of device time)"),
            ("list price", MISSING if view.list_usd is None else f"${view.list_usd:f}"),
            ("budget", "" if view.budget_usd is None else f"${view.budget_usd:f}"),
            ("over budget", f"${view.overrun_usd:f}" if view.overrun_usd else ""),
            (
                "in flight",
                f"${view.in_flight_usd:f}  (used by running shards, not booked yet)" if view.in_flight_usd else "",
            ),
            ("tokens", f"{count(usage.prompt_tokens)} prompt, {count(usage.completion_tokens)} generated"),
            ("per million tokens", usd(view.usd_per_million_tokens)),
        ]
    )


@click.command("verify", epilog=exit_codes.epilog())
@click.argument("target", metavar="JOB_OR_PATH")
@click.option("--no-input", is_flag=True, help="Do not compare with the input files.")
@server_options
@json_option
def verify_command(target: str, no_input: bool, as_json: bool) -> ExitCode:
    """Prove that every input row has exactly one outcome.

    Reads the manifest and every result file, and compares them with the input where it is still there.
    """
    report = _verify(target, check_input=not no_input)
    if as_json:
        print_json({**asdict(report), "ok": report.ok})
    else:
        print_verified(report)
    return ExitCode.OK if report.ok else ExitCode.FAILED


def _verify(target: str, *, check_input: bool) -> VerifyReport:
    """Verify a job's output, or a path, for which no database is needed."""
    if target.startswith("job_") and "/" not in target:
        with open_jobs() as service:
            return service.verify(target, check_input=check_input)
    from batchinfer.dataset.verify import verify

    return verify(target, check_input=check_input)


def print_verified(report: VerifyReport) -> None:
    """Print the verdict, and each problem."""
    counts = ", ".join(f"{count(number)} {status}" for status, number in report.counts.items() if number)
    if report.ok:
        compared = "and the input's columns are unchanged" if report.input_checked else "(input not compared)"
        click.echo(f"verified: {count(report.num_rows)} rows, one outcome each ({counts}), {compared}")
        return
    click.echo(f"NOT verified: {report.output}")
    for problem in report.problems:
        click.echo(f"  {problem}")
