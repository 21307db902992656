"""``run``: a job here and now, from the flags to the first results."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchinfer.cli import exit_codes
from batchinfer.cli.connect import load_settings, open_service, set_up_logs
from batchinfer.cli.console import count, print_json
from batchinfer.cli.control import parse_budget
from batchinfer.cli.exit_codes import ExitCode
from batchinfer.cli.jobs import print_status
from batchinfer.cli.machine_options import MACHINE_SETTINGS, machine_options
from batchinfer.cli.options import build_spec, flag_of, given_fields, json_option, spec_options
from batchinfer.cli.progress import choose_display
from batchinfer.cli.results import (
    PREVIEW_ROWS,
    print_error_kinds,
    print_rows,
    print_verified,
    print_where,
    read_preview,
)
from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.status import HELD, JobState

if TYPE_CHECKING:
    from types import FrameType

    from batchinfer.cli.progress import ProgressDisplay
    from batchinfer.jobs.service import JobService
    from batchinfer.jobs.views import JobView
    from batchinfer.settings import Settings
    from batchinfer_workers.embedded import Progress


@click.command("run", epilog=exit_codes.epilog())
@spec_options
@click.option("--limit", type=click.IntRange(1), help="Only the first rows of the input, for a quick look.")
@click.option(
    "--resume", metavar="JOB", help="Go on with this job, as it was submitted; only --budget may be given anew."
)
@click.option("--no-verify", is_flag=True, help="Do not read the results again to prove them whole.")
@machine_options
@json_option
def run_command(resume: str | None, no_verify: bool, as_json: bool, **flags: Any) -> ExitCode:
    """Run a job here and now, and show its first results.

    INPUTS are Parquet or JSONL files, folders or globs, local or s3://. The job is kept in the database like any other:
    Ctrl-C commits what is finished, and `batchinfer run --resume JOB` goes on.
    """
    settings = load_settings(**{name: flags.pop(name) for name in MACHINE_SETTINGS})
    # on a terminal progress is news enough; who sets BATCHINFER_LOG_LEVEL wants to read more
    set_up_logs(settings.log_level if "log_level" in settings.model_fields_set else "warning")
    with open_service(settings, shares_disk=True) as service:
        if resume is None:
            view, _ = service.submit(build_spec(flags), base=Path.cwd())
        else:
            view = _prepare_resume(service, resume, flags)
        if not JobState(view.state).is_terminal:
            _note(f"{view.id} runs here; results go to {view.output}")
            view = _work(settings, service, view.id, choose_display())
        if JobState(view.state).is_terminal and view.error is None:
            _show_results(service, view, as_json=as_json, is_verified=not no_verify)
        elif as_json:
            print_json({"job": view.model_dump(mode="json")})
        else:
            print_status(view)
    return exit_codes.of_job(view.state, view.outcome)


def _note(text: str) -> None:
    click.echo(text, err=True)


def _prepare_resume(service: JobService, job_id: str, flags: dict[str, Any]) -> JobView:
    """Make a held or failed job go on. Raises InvalidSpecError if flags would change what the job was asked to do."""
    given = given_fields(flags)
    budget = parse_budget(given.pop("budget_usd", None))
    if given:
        names = ", ".join(flag_of(field) for field in given)
        raise InvalidSpecError(f"a resumed job runs as it was submitted; leave out {names}, or submit a new job")
    view = service.get(job_id)
    state = JobState(view.state)
    if state in HELD or state is JobState.FAILED or (budget is not None and not state.is_terminal):
        return service.resume(job_id, budget_usd=budget)
    return view


def _work(settings: Settings, service: JobService, job_id: str, display: ProgressDisplay) -> JobView:
    """Work on the job in this process until it ends or is held.

    Raises:
        SystemExit: it was interrupted; what is finished is committed, and a person was told how to resume.
    """
    from batchinfer_workers.embedded import run_embedded

    stop = _Stop(display)
    old = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        run_embedded(settings, job_id, lambda progress: display.update(_live_view(progress)))
    except KeyboardInterrupt:
        view = service.get(job_id)
        done = (view.rows.total or 0) - (view.rows.remaining or 0)
        _note(f"stopped: {count(done)} rows are finished and safe. Go on with: batchinfer run --resume {job_id}")
        raise SystemExit(ExitCode.INTERRUPTED) from None
    finally:
        display.close()
        for number, handler in old.items():
            signal.signal(number, handler)
    return service.get(job_id)


class _Stop:
    """First signal: drain. Second: end at once; leases then expire by themselves."""

    def __init__(self, display: ProgressDisplay) -> None:
        self._display = display
        self._is_stopping = False

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        if self._is_stopping:
            os._exit(128 + signum)
        self._is_stopping = True
        self._display.close()
        _note("stopping: committing finished rows; once more ends at once")
        raise KeyboardInterrupt


def _live_view(progress: Progress) -> JobView:
    """The job's view, with rows that are finished but not committed yet."""
    from batchinfer.jobs.present import job_view
    from batchinfer.jobs.speed import Speed

    speed = Speed(progress.rows_per_second, progress.tokens_per_second, progress.eta_seconds)
    view = job_view(progress.job, speed)
    if progress.rows_total is None:
        return view
    remaining = progress.rows_total - progress.rows_done
    return view.model_copy(update={"rows": view.rows.model_copy(update={"remaining": remaining})})


def _show_results(service: JobService, view: JobView, *, as_json: bool, is_verified: bool) -> None:
    """Print what came of an ended job: first rows, errors, cost, files, proof."""
    results, rows = service.results(view.id), read_preview(service, view.id, PREVIEW_ROWS)
    errors, cost = service.errors(view.id, limit=PREVIEW_ROWS), service.cost(view.id)
    report = service.verify(view.id) if is_verified and results.is_complete else None
    if as_json:
        documents = {"job": view, "results": results, "errors": errors, "cost": cost}
        printed: dict[str, Any] = {name: document.model_dump(mode="json") for name, document in documents.items()}
        printed["rows"] = [row.model_dump(mode="json") for row in rows]
        printed["verify"] = None if report is None else {**asdict(report), "ok": report.ok}
        print_json(printed)
        return
    print_rows(rows)
    click.echo()
    if errors.failed_rows:
        print_error_kinds(errors)
        click.echo()
    print_status(view)
    print_where(results)
    if report is not None:
        print_verified(report)
