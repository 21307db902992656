"""Use cases of schedules, for the CLI and the REST API."""

from __future__ import annotations

from datetime import UTC, datetime, time
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from batchinfer.errors import ConflictError, InvalidSpecError
from batchinfer.jobs.caller import Caller
from batchinfer.jobs.ids import new_id
from batchinfer.jobs.paths import check_model_exists, resolve_paths
from batchinfer.jobs.planner import check_stage_templates
from batchinfer.jobs.schedule_records import RunKind, RunState
from batchinfer.jobs.schedule_spec import MissingInput, check_templates, frozen_job, parse_job, render_job, utc_now
from batchinfer.jobs.schedule_store import ScheduleStore
from batchinfer.jobs.schedule_template import variables
from batchinfer.jobs.schedule_views import BackfillView, RunList, RunView, ScheduleList, ScheduleView

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sqlalchemy import Engine

    from batchinfer.jobs.cron import Calendar
    from batchinfer.jobs.schedule_records import RunRecord, ScheduleRecord
    from batchinfer.jobs.schedule_spec import ScheduleSpec
    from batchinfer.jobs.service import JobService

MAX_BACKFILL = 1000
"""Most logical dates of one backfill."""
MAX_PARALLEL = 100
NEXT_RUNS = 3


class ScheduleService:
    """What people do with schedules. It acts for its ``caller``: other tenants' schedules are not there.

    ``shares_disk``: workers see the same local files as this process, so that a missing model is refused at once.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        caller: Caller | None = None,
        shares_disk: bool = False,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.store = ScheduleStore(engine)
        self._caller = caller or Caller.operator()
        self._shares_disk = shares_disk
        self._now = now

    @classmethod
    def of(cls, service: JobService) -> Self:
        """The schedules beside a service's jobs, for the same caller."""
        return cls(service.engine, caller=service.caller, shares_disk=service.shares_disk)

    def add(self, spec: ScheduleSpec, *, base: Path | None) -> ScheduleView:
        """Make a schedule. ``base`` is where relative paths start, see :func:`~batchinfer.jobs.paths.resolve_paths`.

        Raises:
            InvalidSpecError: the cron, the zone, a template or a field of the job is wrong.
            ModelError: a model given as a path is not there.
            ConflictError: there is one of that name.
        """
        calendar = spec.calendar()
        check_templates(spec.job)
        job = _absolute(spec.job, base)
        date = calendar.after(self._now())
        sample = render_job(job, variables(calendar, date, run_id=new_id("run_"), schedule=spec.name))
        if sample.stages:
            check_stage_templates(sample)
        if self._shares_disk:
            check_model_exists(sample.model)
        clean = spec.model_copy(update={"cron": calendar.cron})
        return self._view(self.store.add(clean, frozen_job(job, sample), caller=self._caller))

    def get(self, name: str) -> ScheduleView:
        """One schedule by name or id. Raises NotFoundError."""
        return self._view(self.store.get(name, caller=self._caller))

    def list(self, *, limit: int = 20, after: str | None = None) -> ScheduleList:
        """A page of schedules by name. Raises NotFoundError."""
        found = self.store.schedules(caller=self._caller, limit=limit + 1, after=after)
        views = [self._view(schedule) for schedule in found[:limit]]
        return ScheduleList(
            data=views,
            first_id=views[0].id if views else None,
            last_id=views[-1].id if views else None,
            has_more=len(found) > limit,
        )

    def pause(self, name: str) -> ScheduleView:
        """Hold a schedule: nothing is fired, what waits goes on waiting; jobs run on. Raises NotFoundError."""
        return self._view(self.store.set_paused(name, is_paused=True, caller=self._caller))

    def resume(self, name: str) -> ScheduleView:
        """Let a schedule go on; what passed meanwhile is caught up with as its policy says. Raises NotFoundError."""
        return self._view(self.store.set_paused(name, is_paused=False, caller=self._caller))

    def remove(self, name: str) -> ScheduleView:
        """Remove a schedule and its runs; jobs stay. Raises NotFoundError."""
        return self._view(self.store.remove(name, caller=self._caller), has_runs=False)

    def trigger(self, name: str, *, logical_date: str | None = None) -> RunView:
        """Run now, for this moment or another, paused or not.

        Raises:
            NotFoundError: no such schedule.
            ConflictError: the logical date has a run.
        """
        schedule = self.store.get(name, caller=self._caller)
        date = self._now() if logical_date is None else parse_date(logical_date, schedule.calendar)
        made, _ = self.store.add_runs(schedule.id, [date], kind=RunKind.MANUAL, caller=self._caller)
        if not made:
            raise ConflictError(
                f"schedule {schedule.name} has a run for {date.isoformat()} already; "
                f"`batchinfer schedule backfill {schedule.name} --retry` runs one again that failed",
                param="logical_date",
                code="run_exists",
            )
        return run_view(schedule.name, made[0])

    def backfill(self, name: str, *, start: str, end: str, parallel: int = 1, retry: bool = False) -> BackfillView:
        """Run every logical date from ``start`` to ``end``, both included, at most ``parallel`` at once.

        Dates that have a run are left alone; with ``retry`` only those that succeeded or are under way.

        Raises:
            NotFoundError: no such schedule.
            InvalidSpecError: no date in the range, too many, one in the future, or a bad ``parallel``.
        """
        if not 1 <= parallel <= MAX_PARALLEL:
            raise InvalidSpecError(f"parallel is 1 to {MAX_PARALLEL}, not {parallel}", param="parallel")
        schedule = self.store.get(name, caller=self._caller)
        calendar = schedule.calendar
        first, last = parse_date(start, calendar), parse_date(end, calendar, is_end=True)
        dates = list(islice(calendar.between(first, min(last, self._now())), MAX_BACKFILL + 1))
        if not dates:
            raise InvalidSpecError(
                f"no moment of {schedule.cron} lies between {start} and {end} and before now", param="end"
            )
        if len(dates) > MAX_BACKFILL:
            raise InvalidSpecError(
                f"more than {MAX_BACKFILL} runs from {start} to {end}; take a shorter range", param="end"
            )
        made, existing = self.store.add_runs(
            schedule.id, dates, kind=RunKind.BACKFILL, caller=self._caller, parallel=parallel, retry=retry
        )
        return BackfillView(
            id=made[0].backfill_id if made else None,
            schedule=schedule.name,
            runs=[run_view(schedule.name, run) for run in made],
            existing=existing,
        )

    def runs(self, name: str, *, state: RunState | None = None, limit: int = 20, after: str | None = None) -> RunList:
        """A page of runs, the latest logical date first. Raises NotFoundError."""
        schedule = self.store.get(name, caller=self._caller)
        found = self.store.runs(schedule.id, caller=self._caller, state=state, limit=limit + 1, after=after)
        views = [run_view(schedule.name, run) for run in found[:limit]]
        return RunList(
            data=views,
            first_id=views[0].id if views else None,
            last_id=views[-1].id if views else None,
            has_more=len(found) > limit,
        )

    def _view(self, schedule: ScheduleRecord, *, has_runs: bool = True) -> ScheduleView:
        last = self.store.runs(schedule.id, caller=self._caller, limit=1) if has_runs else []
        wait = f":{schedule.wait_seconds}s" if schedule.missing_input is MissingInput.WAIT else ""
        return ScheduleView(
            id=schedule.id,
            name=schedule.name,
            cron=schedule.cron,
            tz=schedule.tz,
            catch_up=schedule.catch_up,
            overlap=schedule.overlap,
            max_active=schedule.max_active,
            jitter=f"{schedule.jitter_seconds}s",
            missing_input=f"{schedule.missing_input}{wait}",
            paused=schedule.is_paused,
            next_runs=[] if schedule.is_paused else _next_runs(schedule),
            last_run=run_view(schedule.name, last[0]) if last else None,
            job=schedule.job,
            created_at=schedule.created_at,
        )


def _next_runs(schedule: ScheduleRecord) -> list[datetime]:
    if schedule.next_at is None:
        return []
    found = [schedule.next_at]
    while len(found) < NEXT_RUNS:
        found.append(schedule.calendar.after(found[-1]))
    return found


def run_view(schedule: str, run: RunRecord) -> RunView:
    """The view of one run."""
    return RunView(
        id=run.run_id,
        schedule=schedule,
        logical_date=run.logical_date,
        kind=run.kind,
        backfill_id=run.backfill_id,
        state=run.state,
        reason=run.reason,
        job_id=run.job_id,
        job_state=run.job_state,
        job_outcome=run.job_outcome,
        try_number=run.try_number,
        created_at=run.created_at,
        started_at=run.started_at,
        ended_at=run.ended_at,
    )


def parse_date(text: str, calendar: Calendar, *, is_end: bool = False) -> datetime:
    """Read ``2026-03-29`` (a day in the schedule's zone, all of it where it is an end) or an ISO 8601 time.

    Raises:
        InvalidSpecError: it is neither.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidSpecError(
            f"{text!r} is no date such as 2026-03-29 and no ISO 8601 time", param="logical_date"
        ) from None
    if len(text) == len("2026-03-29") and is_end:
        moment = datetime.combine(moment.date(), time.max)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=calendar.tz)
    return moment.astimezone(UTC)


def _absolute(job: dict[str, Any], base: Path | None) -> dict[str, Any]:
    """The job with its paths absolute, templates and all; a default output is chosen by each run."""
    plain = {
        key: job[key] for key in ("inputs", "output", "model", "adapter", "adapter_folder") if job.get(key) is not None
    }
    spec = resolve_paths(parse_job(plain), base=base, job_id="job", must_exist=False)
    made = {**job, "inputs": list(spec.inputs), "model": spec.model}
    made |= {key: getattr(spec, key) for key in ("adapter", "adapter_folder") if job.get(key) is not None}
    return made | ({"output": spec.output} if job.get("output") else {})
