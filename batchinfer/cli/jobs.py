"""``ls``, ``status`` and ``watch``: how jobs stand."""

from __future__ import annotations

import shlex
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from batchinfer.cli import exit_codes
from batchinfer.cli.connect import open_jobs, server_options
from batchinfer.cli.console import MISSING, count, duration, one_line, print_fields, print_json, print_table, rate, usd
from batchinfer.cli.options import json_option
from batchinfer.cli.progress import choose_display
from batchinfer.jobs.spec import parse_tag
from batchinfer.jobs.status import HELD, TERMINAL, JobState

if TYPE_CHECKING:
    from batchinfer.cli.exit_codes import ExitCode
    from batchinfer.cli.progress import ProgressDisplay
    from batchinfer.jobs.door import JobDoor
    from batchinfer.jobs.views import EngineUse, JobView

POLL_SECONDS = 1.0
WAITING = frozenset(set(JobState) - TERMINAL - HELD)
"""States in which a worker is needed."""


@click.command("ls")
@click.option("--state", type=click.Choice([state.value for state in JobState]), help="Only jobs in this state.")
@click.option("--model", metavar="MODEL", help="Only jobs of this model.")
@click.option("--name", metavar="TEXT", help="Only jobs of this name.")
@click.option("--tag", metavar="KEY=VALUE", help="Only jobs with this tag.")
@click.option("--tenant", metavar="TENANT", help="Only this tenant's jobs.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Most jobs to list.")
@click.option("--after", metavar="JOB", help="Begin behind this job, the last one of the page before.")
@server_options
@json_option
def ls_command(  # noqa: PLR0917 -- click passes them by name
    state: str | None,
    model: str | None,
    name: str | None,
    tag: str | None,
    tenant: str | None,
    limit: int,
    after: str | None,
    as_json: bool,
) -> None:
    """List jobs, newest first: those to which all that is asked for applies."""
    wanted = None if state is None else JobState(state)
    with open_jobs() as service:
        page = service.list_jobs(
            state=wanted, model=model, name=name, tag=parse_tag(tag), tenant=tenant, limit=limit, after=after
        )
    if as_json:
        print_json(page)
        return
    asked = {"state": state, "model": model, "name": name, "tag": tag, "tenant": tenant}
    filters = {field: value for field, value in asked.items() if value is not None}
    if not page.data:
        said = ", ".join(f"{field} {one_line(value)}" for field, value in filters.items())
        click.echo(f"no job has {said}" if said else "no jobs yet; `batchinfer run` makes one", err=True)
        return
    titles = ("JOB", "NAME", "STATE", "ROWS", "ERRORS", "COST", "AGE", "MODEL")
    print_table(titles, [_list_row(view) for view in page.data])
    if page.has_more:
        same = "".join(f"--{field} {shlex.quote(value)} " for field, value in filters.items())
        click.echo(f"more: batchinfer ls {same}--limit {limit} --after {page.last_id}", err=True)


def _list_row(view: JobView) -> tuple[str, ...]:
    age = (datetime.now(UTC) - view.created_at).total_seconds()
    return (
        view.id,
        one_line(view.name or MISSING, 30),
        _state(view),
        rows_done(view),
        count(view.rows.errored),
        usd(view.cost.metered_usd + view.cost.overhead_usd),
        duration(age),
        one_line(view.model.rstrip("/").rpartition("/")[2], 40),
    )


def _state(view: JobView) -> str:
    """The state, and of an ended job its outcome: completed alone would look green."""
    return f"{view.state} ({view.outcome})" if view.outcome else view.state


def rows_done(view: JobView) -> str:
    """``12/64``."""
    if view.rows.total is None or view.rows.remaining is None:
        return MISSING
    return f"{count(view.rows.total - view.rows.remaining)}/{count(view.rows.total)}"


@click.command("status")
@click.argument("job_id", metavar="JOB")
@server_options
@json_option
def status_command(job_id: str, as_json: bool) -> None:
    """Show one job: state, rows, speed, cost."""
    with open_jobs() as service:
        view, num_workers = service.get(job_id), service.num_workers()
    if as_json:
        print_json(view)
        return
    print_status(view)
    if JobState(view.state) in WAITING and num_workers == 0:
        click.echo(f"no worker is running: start `batchinfer worker`, or `batchinfer run --resume {job_id}`", err=True)


def print_status(view: JobView) -> None:
    """Print a job for people."""
    rows = {name: number for name, number in view.rows.model_dump().items() if name != "total" and number}
    print_fields(
        [
            ("job", view.id + (f"  ({one_line(view.name)})" if view.name else "")),
            ("state", _state(view)),
            *([("waits for", view.waits_for)] if view.waits_for else []),
            ("error", f"{view.error.code}: {one_line(view.error.message)}" if view.error else ""),
            ("model", view.model),
            ("input", ", ".join(view.inputs)),
            ("output", view.output),
            ("tags", ", ".join(f"{key}={value}" for key, value in view.tags.items())),
            ("rows", f"{rows_done(view)}  " + ", ".join(f"{count(number)} {name}" for name, number in rows.items())),
            ("tokens", _tokens(view)),
            ("speed", _speed(view)),
            *(("engine", _engine(engine)) for engine in view.engines[-1:]),
            ("cost", _cost(view)),
            ("reused", _reused(view)),
            ("drift", _drift(view)),
            ("deadline", _deadline(view)),
            *(("warning", one_line(warning)) for warning in view.warnings),
            ("next", _next_step(view)),
        ]
    )


def _deadline(view: JobView) -> str:
    if view.deadline is None:
        return ""
    chance = view.progress.deadline_probability
    return view.deadline.isoformat() + ("" if chance is None else f"  (in time with a probability of {chance:.0%})")


def _tokens(view: JobView) -> str:
    usage = view.usage
    prompt = f"{count(usage.prompt_tokens)} prompt ({count(usage.cached_tokens)} cached)"
    return f"{prompt}, {count(usage.completion_tokens)} generated"


def _speed(view: JobView) -> str:
    progress = view.progress
    if progress.tokens_per_second is None:
        return ""
    eta = f", ETA {duration(progress.eta_seconds)}" if progress.eta_seconds is not None else ""
    return f"{rate(progress.rows_per_second)} rows/s, {rate(progress.tokens_per_second)} tokens/s{eta}"


def _engine(engine: EngineUse) -> str:
    """How well the latest engine was used, and where its time went."""
    parts = [f"{rate(engine.tokens_per_second)} tokens/s in steps of {engine.mean_batch_size:.0f} rows"]
    if engine.roofline_share is not None:
        parts.append(f"{engine.roofline_share:.0%} of the device's roofline")
    if engine.reuse is not None:
        parts.append(f"{engine.reuse:.0%} of the shareable prompt tokens reused")
    if engine.preemptions:
        parts.append(f"{count(engine.preemptions)} preemptions")
    largest = sorted(engine.time_split.items(), key=lambda item: -item[1])[:3]
    if largest:
        parts.append("time: " + ", ".join(f"{kind} {share:.0%}" for kind, share in largest))
    return "; ".join(parts)


def _cost(view: JobView) -> str:
    cost = view.cost
    text = f"{usd(cost.metered_usd + cost.overhead_usd)} metered"
    if cost.overhead_usd:
        text += f" (rows {usd(cost.metered_usd)}, overhead {usd(cost.overhead_usd)})"
    if cost.list_usd is not None:
        text += f", {usd(cost.list_usd)} at list price"
    return text + (f", budget {usd(cost.budget_usd)}" if cost.budget_usd is not None else "")


def _reused(view: JobView) -> str:
    reuse = view.reuse
    if reuse is None:
        return ""
    share = "" if reuse.hit_rate is None else f" ({reuse.hit_rate:.1%} of the answers)"
    listed = "" if reuse.saved_list_usd is None else f", {usd(reuse.saved_list_usd)} at list price"
    return f"{count(reuse.rows)} rows{share}, saved {usd(reuse.saved_usd)} metered{listed}"


def _drift(view: JobView) -> str:
    if view.drift is None:
        return ""
    drift = view.drift
    verdict = "  ABOVE THE THRESHOLD" if drift.is_above else ""
    return (
        f"mean KL {drift.kl_mean:.5f}, 99 % below {drift.kl_p99:.4f}, agreement {100 * drift.agreement:.2f} % "
        f"over {count(drift.tokens_compared)} tokens of {count(drift.rows_compared)} rows{verdict}"
    )


def _next_step(view: JobView) -> str:
    """What a person may want to do now."""
    if view.state == JobState.BUDGET_EXHAUSTED:
        return f"batchinfer resume {view.id} --budget USD"
    if view.state in (JobState.PAUSED, JobState.FAILED):
        return f"batchinfer resume {view.id}"
    if view.rows.errored and JobState(view.state).is_terminal:
        return f"batchinfer errors {view.id}"
    return ""


@click.command("watch", epilog=exit_codes.epilog())
@click.argument("job_id", metavar="JOB")
@server_options
@json_option
def watch_command(job_id: str, as_json: bool) -> ExitCode:
    """Follow a job until it stands still or ends.

    With --json: one JSON document a line, each time something changed.
    """
    with open_jobs() as service:
        view = follow(service, job_id, choose_display(as_json_lines=as_json))
    if not as_json:
        print_status(view)
    return exit_codes.of_job(view.state, view.outcome)


def follow(service: JobDoor, job_id: str, display: ProgressDisplay, poll_seconds: float = POLL_SECONDS) -> JobView:
    """Poll a job and show it until it ends or is held; return its last view."""
    try:
        while True:
            view = service.get(job_id)
            display.update(view)
            state = JobState(view.state)
            if state.is_terminal or state in HELD:
                return view
            time.sleep(poll_seconds)
    finally:
        display.close()
