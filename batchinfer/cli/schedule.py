"""``schedule``: jobs that come back every night."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import ValidationError

from batchinfer.cli.connect import open_door, server_options
from batchinfer.cli.console import MISSING, count, one_line, print_fields, print_json, print_table
from batchinfer.cli.options import given_fields, job_options, json_option
from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.cron import Calendar
from batchinfer.jobs.schedule_records import RunState
from batchinfer.jobs.schedule_spec import CatchUp, Overlap, ScheduleSpec
from batchinfer.jobs.schedules import MAX_PARALLEL

if TYPE_CHECKING:
    from datetime import datetime

    from batchinfer.jobs.schedule_views import RunView, ScheduleView

_POLICIES = ("catch_up", "overlap", "max_active", "jitter", "missing_input")
_ADD_HELP = """Add a schedule. Its paths may have variables, filled in for each run.

\b
{{ logical_date }}              the moment's day, as 2026-03-29 (also: | ds)
{{ logical_date | ds_nodash }}  20260329
{{ logical_date | ts }}         2026-03-29T02:30:00+03:00 (| ts_nodash: 20260329T023000)
{{ logical_date | days(-1) }}   the day before
{{ previous_logical_date }}     the moment before this one; also next_logical_date
{{ run_id }}, {{ schedule }}    the run's id, the schedule's name
"""


def _help(field: str) -> str:
    info = ScheduleSpec.model_fields[field]
    default = "" if info.is_required() else f" (default: {info.default})"
    return f"{(info.description or '').rstrip('.')}{default}."


@click.group("schedule")
def schedule_command() -> None:
    """Run jobs by the clock, each moment exactly once.

    Any running `batchinfer worker` looks after the schedules; three of them fire no run twice.
    """


@schedule_command.command("add", help=_ADD_HELP)
@click.argument("name", metavar="NAME")
@click.option("--cron", required=True, metavar="TEXT", help=_help("cron"))
@click.option("--tz", metavar="ZONE", help=_help("tz"))
@click.option(
    "--input", "inputs", multiple=True, required=True, metavar="PATH", help="What each run reads; may be repeated."
)
@click.option("--catch-up", type=click.Choice([choice.value for choice in CatchUp]), help=_help("catch_up"))
@click.option("--overlap", type=click.Choice([choice.value for choice in Overlap]), help=_help("overlap"))
@click.option("--max-active", type=int, help=_help("max_active"))
@click.option("--jitter", metavar="DURATION", help=_help("jitter"))
@click.option("--missing-input", metavar="POLICY", help=_help("missing_input"))
@job_options
@click.option("--job-name", metavar="TEXT", help="Name of the jobs (default: the schedule's).")
@server_options
@json_option
def add_command(name: str, cron: str, tz: str | None, job_name: str | None, as_json: bool, **flags: Any) -> None:
    """Add a schedule."""
    policies = {field: flags.pop(field) for field in _POLICIES}
    job = given_fields(flags | {"name": job_name})
    job["inputs"] = list(job["inputs"])
    given = {"name": name, "cron": cron, "tz": tz, **policies}
    try:
        spec = ScheduleSpec(job=job, **{field: value for field, value in given.items() if value is not None})
    except ValidationError as error:
        raise _spec_error(error) from None
    if "model" not in job:
        raise InvalidSpecError("--model is missing: a GGUF file, a safetensors folder or a hub id", param="model")
    with open_door() as door:
        view = door.schedules.add(spec, base=Path.cwd())
        num_workers = door.num_workers()
    _print_schedule(view, as_json)
    if num_workers == 0 and not as_json:
        click.echo("no worker is running: start `batchinfer worker`, which looks after schedules", err=True)


def _spec_error(error: ValidationError) -> InvalidSpecError:
    fault = error.errors(include_url=False, include_context=False)[0]
    param = str(fault["loc"][0]) if fault["loc"] else None
    where = f"{param.replace('_', '-')}: " if param else ""
    return InvalidSpecError(where + fault["msg"].removeprefix("Value error, "), param=param)


@schedule_command.command("ls")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most schedules to list.")
@click.option("--after", metavar="SCHEDULE", help="Begin behind this one, the last one of the page before.")
@server_options
@json_option
def ls_command(limit: int, after: str | None, as_json: bool) -> None:
    """List schedules by name, with their next and last runs."""
    with open_door() as door:
        page = door.schedules.list(limit=limit, after=after)
    if as_json:
        print_json(page)
        return
    if not page.data:
        click.echo("no schedules yet; `batchinfer schedule add` makes one", err=True)
        return
    print_table(("NAME", "CRON", "TZ", "NEXT", "LAST", "STATE"), [_list_row(view) for view in page.data])
    if page.has_more:
        click.echo(f"more: batchinfer schedule ls --after {page.last_id}", err=True)


def _list_row(view: ScheduleView) -> tuple[str, ...]:
    calendar = Calendar(view.cron, view.tz)
    following = _local(calendar, view.next_runs[0]) if view.next_runs else MISSING
    last = view.last_run
    return (
        view.name, view.cron, view.tz, "paused" if view.paused else following,
        MISSING if last is None else _local(calendar, last.logical_date), MISSING if last is None else _outcome(last),
    )  # fmt: skip


def _local(calendar: Calendar, moment: datetime) -> str:
    return f"{calendar.local(moment):%Y-%m-%d %H:%M}"


def _outcome(run: RunView) -> str:
    if run.job_state is None:
        return run.state
    return run.job_state if run.job_outcome in (None, "succeeded") else f"{run.job_state} ({run.job_outcome})"


@schedule_command.command("show")
@click.argument("name", metavar="SCHEDULE")
@server_options
@json_option
def show_command(name: str, as_json: bool) -> None:
    """Show one schedule: when, what, next and last runs."""
    with open_door() as door:
        view = door.schedules.get(name)
    _print_schedule(view, as_json)


def _print_schedule(view: ScheduleView, as_json: bool) -> None:
    if as_json:
        print_json(view)
        return
    calendar = Calendar(view.cron, view.tz)
    last = view.last_run
    inputs, output = ", ".join(view.job["inputs"]), view.job.get("output")
    print_fields(
        [
            ("schedule", f"{view.name} ({view.id})"),
            ("when", f"{view.cron} {view.tz}" + (f", jitter {view.jitter}" if view.jitter != "0s" else "")),
            ("next", "paused" if view.paused else ", ".join(_local(calendar, at) for at in view.next_runs)),
            ("last", "" if last is None else f"{_local(calendar, last.logical_date)} {_outcome(last)}"),
            ("reason", "" if last is None or last.reason is None else one_line(last.reason)),
            ("model", view.job["model"]),
            ("input", inputs),
            ("output", output or "<input>.results/<job>"),
            ("catch up", view.catch_up),
            ("overlap", f"{view.overlap}, at most {view.max_active} at work"),
            ("missing input", view.missing_input),
        ]
    )


@schedule_command.command("rm")
@click.argument("name", metavar="SCHEDULE")
@server_options
@json_option
def rm_command(name: str, as_json: bool) -> None:
    """Remove a schedule and the list of its runs; their jobs stay."""
    with open_door() as door:
        view = door.schedules.remove(name)
    if as_json:
        print_json(view)
    else:
        click.echo(f"{view.name} is removed; its jobs stay")


@schedule_command.command("pause")
@click.argument("name", metavar="SCHEDULE")
@server_options
@json_option
def pause_command(name: str, as_json: bool) -> None:
    """Hold a schedule and its backfills; jobs at work go on."""
    with open_door() as door:
        view = door.schedules.pause(name)
    if as_json:
        print_json(view)
    else:
        click.echo(f"{view.name} is paused; go on with: batchinfer schedule resume {view.name}")


@schedule_command.command("resume")
@click.argument("name", metavar="SCHEDULE")
@server_options
@json_option
def resume_command(name: str, as_json: bool) -> None:
    """Let a schedule go on; what passed meanwhile is caught up with as --catch-up says."""
    with open_door() as door:
        view = door.schedules.resume(name)
    _print_schedule(view, as_json)


@schedule_command.command("trigger")
@click.argument("name", metavar="SCHEDULE")
@click.option("--date", "logical_date", metavar="TIME", help="Logical date of the run (default: now).")
@server_options
@json_option
def trigger_command(name: str, logical_date: str | None, as_json: bool) -> None:
    """Run a schedule's job now, paused or not. A worker starts it within seconds."""
    with open_door() as door:
        run = door.schedules.trigger(name, logical_date=logical_date)
    if as_json:
        print_json(run)
    else:
        click.echo(run.id)
        click.echo(f"follow it with: batchinfer schedule runs {name}", err=True)


@schedule_command.command("backfill")
@click.argument("name", metavar="SCHEDULE")
@click.option("--start", required=True, metavar="DATE", help="First day (in the schedule's zone) or ISO 8601 time.")
@click.option("--end", required=True, metavar="DATE", help="Last day, included.")
@click.option(
    "--parallel", type=click.IntRange(1, MAX_PARALLEL), default=1, show_default=True, help="Runs at work at once."
)
@click.option("--retry", is_flag=True, help="Run dates again that were skipped, or failed, or did not wholly succeed.")
@server_options
@json_option
def backfill_command(name: str, *, start: str, end: str, parallel: int, retry: bool, as_json: bool) -> None:
    """Run every moment of a range in the past. Dates that have a run are left alone."""
    with open_door() as door:
        view = door.schedules.backfill(name, start=start, end=end, parallel=parallel, retry=retry)
    if as_json:
        print_json(view)
        return
    note = f"; {count(view.existing)} have a run already" if view.existing else ""
    click.echo(f"{view.schedule} runs {count(len(view.runs))} dates, {parallel} at once{note}")
    click.echo(f"follow them with: batchinfer schedule runs {view.schedule}", err=True)


@schedule_command.command("runs")
@click.argument("name", metavar="SCHEDULE")
@click.option("--state", type=click.Choice([state.value for state in RunState]), help="Only runs in this state.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Most runs to list.")
@click.option("--after", metavar="RUN", help="Begin behind this run, the last one of the page before.")
@server_options
@json_option
def runs_command(name: str, state: str | None, limit: int, after: str | None, as_json: bool) -> None:
    """List a schedule's runs, the latest first: their jobs, or why they have none."""
    with open_door() as door:
        schedule = door.schedules.get(name)
        page = door.schedules.runs(name, state=None if state is None else RunState(state), limit=limit, after=after)
    if as_json:
        print_json(page)
        return
    if not page.data:
        click.echo(f"{schedule.name} has no such run yet", err=True)
        return
    calendar = Calendar(schedule.cron, schedule.tz)
    print_table(("RUN", "DATE", "KIND", "STATE", "JOB", "REASON"), [_run_row(calendar, run) for run in page.data])
    if page.has_more:
        click.echo(f"more: batchinfer schedule runs {schedule.name} --after {page.last_id}", err=True)


def _run_row(calendar: Calendar, run: RunView) -> tuple[str, ...]:
    return (
        run.id, _local(calendar, run.logical_date), run.kind, _outcome(run), run.job_id or MISSING,
        one_line(run.reason or "", 80),
    )  # fmt: skip
