"""Firing schedules, so that each logical date has one run and each run one job, however many tickers look."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, func, or_, select, update

from batchinfer.db.tables import Job, ScheduleRow, ScheduleRunRow
from batchinfer.db.tables.schedules import IS_OPEN, MAY_FIRE, WAITS
from batchinfer.jobs.cron import jitter
from batchinfer.jobs.ledger_jobs import Jobs, _new_job
from batchinfer.jobs.schedule_records import RunKind, RunState, run_record, schedule_record
from batchinfer.jobs.schedule_spec import CatchUp, Overlap
from batchinfer.jobs.schedule_store import insert_run, next_fire
from batchinfer.jobs.status import TERMINAL, JobState
from batchinfer.jobs.webhook_events import Event, tell
from batchinfer.tracing import span, traceparent

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

    from batchinfer.jobs.schedule_records import RunRecord, ScheduleRecord
    from batchinfer.jobs.spec import JobSpec

GRACE = timedelta(minutes=1)
"""A moment that is noticed later than this was missed; ``catch_up`` says what becomes of it."""
CLAIM_SECONDS = 60
"""Whoever looks at a run has it for this long; if they die, another takes it then."""
MAX_FIRED = 100
"""Most runs that one schedule fires in one transaction; the rest comes with the next tick."""
_ENDED = sorted(state.value for state in TERMINAL)

# made once: tickers ask these every second
_DUE = select(ScheduleRow.id).where(MAY_FIRE, ScheduleRow.due_at <= bindparam("now"))
_ANY_ENDED = (
    select(ScheduleRunRow.id).join(Job, Job.id == ScheduleRunRow.job_id).where(IS_OPEN, Job.state.in_(_ENDED)).limit(1)
)
_QUEUE = (ScheduleRunRow.schedule_id, ScheduleRunRow.backfill_id, ScheduleRow.overlap, ScheduleRow.max_active)
_QUEUES = (
    select(*_QUEUE, func.min(ScheduleRunRow.parallel).label("parallel"))
    .join(ScheduleRow, ScheduleRow.id == ScheduleRunRow.schedule_id)
    .where(
        *(WAITS, ScheduleRunRow.look_at <= bindparam("now")),
        or_(ScheduleRow.is_paused == 0, ScheduleRunRow.kind == RunKind.MANUAL),
    )
    .group_by(*_QUEUE)
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A run that this ticker has for :data:`CLAIM_SECONDS`, and its schedule."""

    run: RunRecord
    schedule: ScheduleRecord
    at: datetime


@dataclass(frozen=True, slots=True)
class Launch:
    """What became of a launch: started, or blocked by these jobs' runs, or neither (the run is not ours any more)."""

    is_started: bool = False
    blocked_by: tuple[str, ...] = ()


class Firing(Jobs):
    """What tickers do. The row of the schedule is the lock: under it dates are taken, and runs started."""

    def fire_due(self) -> int:
        """Write a run for each logical date that is due; return how many were written."""

        def due(connection: Connection, now: datetime) -> list[str]:
            return list(connection.scalars(_DUE, {"now": now}))

        return sum(self._fire(schedule_id) for schedule_id in self._read(due))

    def _fire(self, schedule_id: str) -> int:
        return self._write(lambda connection, now: _fire(connection, schedule_id, now))

    def settle(self) -> int:
        """Close runs whose jobs have ended; return how many."""

        def work(connection: Connection, now: datetime) -> int:
            run = ScheduleRunRow
            ended = select(Job.id).where(Job.id == run.job_id, Job.state.in_(_ENDED))
            statement = update(run).where(IS_OPEN, run.run_state == RunState.RUNNING, ended.exists())
            return int(connection.execute(statement.values(run_state=RunState.DONE, ended_at=now)).rowcount)

        return self._write(work) if self._rows(_ANY_ENDED) else 0

    def claim_all(self) -> list[Claim]:
        """Take the next run of each queue (a schedule's own, each backfill's) that is due and has room, or needs none."""
        claims = [self._claim(queue) for queue in self._queues()]
        return [claim for claim in claims if claim is not None]

    def _claim(self, queue: tuple[str, str | None]) -> Claim | None:
        return self._write(lambda connection, now: _claim(connection, queue, now))

    def _queues(self) -> list[tuple[str, str | None]]:
        """Queues in which a run waits that is due and would not be blocked."""

        def work(connection: Connection, now: datetime) -> list[tuple[str, str | None]]:
            found = []
            for row in connection.execute(_QUEUES, {"now": now}):
                room = row.parallel or row.max_active
                is_patient = row.backfill_id is not None or row.overlap == Overlap.QUEUE
                if not is_patient or len(_active(connection, row.schedule_id, row.backfill_id)) < room:
                    found.append((row.schedule_id, row.backfill_id))
            return found

        return self._read(work)

    def postpone(self, claim: Claim, seconds: float, reason: str) -> None:
        """Look at a run again later."""

        def work(connection: Connection, now: datetime) -> None:
            _change(connection, claim, look_at=now + timedelta(seconds=seconds), reason=reason)

        self._write(work)

    def end(self, claim: Claim, state: RunState, reason: str) -> None:
        """Close a run without a job."""

        def work(connection: Connection, now: datetime) -> None:
            is_ended = _change(connection, claim, run_state=state, reason=reason, ended_at=now)
            if is_ended and state is RunState.FAILED:
                data = {
                    "object": "schedule_run", "id": claim.run.run_id, "schedule": claim.schedule.name,
                    "logical_date": claim.run.logical_date.isoformat(), "reason": reason,
                }  # fmt: skip
                tell(connection, claim.schedule.tenant, Event.SCHEDULE_RUN_FAILED, data, now)

        self._write(work)

    def launch(self, claim: Claim, spec: JobSpec, job_id: str) -> Launch:
        """Submit the run's job and mark the run, in one transaction, if there is room for it."""
        values = _new_job(spec, job_id, None, spec.fingerprint()) | {"tenant_id": claim.schedule.tenant}

        def work(connection: Connection, now: datetime) -> Launch:
            schedule = connection.execute(
                select(ScheduleRow).where(ScheduleRow.id == claim.schedule.id).with_for_update()
            ).one_or_none()
            mine = connection.execute(select(ScheduleRunRow).where(ScheduleRunRow.id == claim.run.id)).one_or_none()
            if schedule is None or mine is None or mine.run_id != claim.run.run_id:
                return Launch()
            if mine.job_id == job_id:  # this transaction was committed, and only the word of it was lost
                return Launch(is_started=True)
            if mine.run_state != RunState.WAITING:
                return Launch()
            active = _active(connection, schedule.id, mine.backfill_id)
            if len(active) >= (mine.parallel or schedule.max_active):
                return Launch(blocked_by=tuple(active))
            self._add_job(connection, values, now)
            _change(connection, claim, run_state=RunState.RUNNING, job_id=job_id, started_at=now)
            return Launch(is_started=True)

        with span("submit", job=job_id, model=spec.model, schedule=claim.schedule.name):
            values["traceparent"] = traceparent()
            return self._write(work)


def _fire(connection: Connection, schedule_id: str, now: datetime) -> int:
    """Take the logical dates that are due. What another ticker took meanwhile is not due any more."""
    query = select(ScheduleRow).where(ScheduleRow.id == schedule_id, MAY_FIRE, ScheduleRow.due_at <= now)
    row = connection.execute(query.with_for_update()).one_or_none()
    if row is None:
        return 0
    schedule = schedule_record(row)
    dates, missed, last = _due_dates(schedule, now)
    note = (
        f"{missed} earlier moments passed unnoticed and are left out (catch_up {schedule.catch_up})" if missed else None
    )
    fired = 0
    for date in dates:
        run = insert_run(connection, schedule_id, date, now, kind=RunKind.SCHEDULED, reason=note)
        fired += run is not None
    values = next_fire(schedule.calendar, schedule_id, last, schedule.jitter_seconds)
    connection.execute(update(ScheduleRow).where(ScheduleRow.id == schedule_id).values(values))
    return fired


def _due_dates(schedule: ScheduleRecord, now: datetime) -> tuple[list[datetime], int, datetime]:
    """Logical dates to run, how many are left out, and the last date that is dealt with."""
    calendar = schedule.calendar
    at = schedule.next_at
    assert at is not None
    if schedule.catch_up is not CatchUp.ALL:
        return _latest(schedule, at, now)
    dates: list[datetime] = []
    while len(dates) < MAX_FIRED and at + jitter(schedule.id, at, schedule.jitter_seconds) <= now:
        dates.append(at)
        at = calendar.after(at)
    return dates, 0, dates[-1]


def _latest(schedule: ScheduleRecord, first: datetime, now: datetime) -> tuple[list[datetime], int, datetime]:
    """The latest due date alone, under ``none`` only if it is on time. Years of minutes are not walked through."""
    calendar = schedule.calendar
    at = calendar.before(now + timedelta(microseconds=1))
    while at > first and at + jitter(schedule.id, at, schedule.jitter_seconds) > now:
        at = calendar.before(at)
    at = max(at, first)
    due = at + jitter(schedule.id, at, schedule.jitter_seconds)
    missed = _count_between(schedule, first, at)
    if schedule.catch_up is CatchUp.NONE and now - due > GRACE:
        return [], missed + 1, at
    return [at], missed, at


def _count_between(schedule: ScheduleRecord, first: datetime, last: datetime) -> int:
    """Moments in ``[first, last)``, counted no further than a thousand."""
    count = 0
    for at in schedule.calendar.between(first, last):
        if at >= last or count >= 1000:
            break
        count += 1
    return count


def _claim(connection: Connection, queue: tuple[str, str | None], now: datetime) -> Claim | None:
    """Take the earliest waiting run of a queue, unless somebody else looks at it."""
    schedule_id, backfill_id = queue
    run = ScheduleRunRow
    schedule = connection.execute(select(ScheduleRow).where(ScheduleRow.id == schedule_id)).one_or_none()
    if schedule is None:
        return None
    query = select(run.id).where(WAITS, run.look_at <= now, run.schedule_id == schedule_id)
    query = query.where(run.backfill_id.is_(None) if backfill_id is None else run.backfill_id == backfill_id)
    if schedule.is_paused:
        query = query.where(run.kind == RunKind.MANUAL)
    first = query.order_by(run.logical_date).limit(1).with_for_update(skip_locked=True).scalar_subquery()
    statement = update(run).where(run.id == first, run.run_state == RunState.WAITING, run.look_at <= now)
    claimed = connection.execute(
        statement.values(look_at=now + timedelta(seconds=CLAIM_SECONDS)).returning(*run.__table__.columns)
    ).one_or_none()
    return None if claimed is None else Claim(run_record(claimed), schedule_record(schedule), now)


def _active(connection: Connection, schedule_id: str, backfill_id: str | None) -> list[str]:
    """Jobs of a queue's runs that are at work, the oldest first."""
    run = ScheduleRunRow
    query = select(run.job_id).join(Job, Job.id == run.job_id).where(IS_OPEN, run.schedule_id == schedule_id)
    query = query.where(run.backfill_id.is_(None) if backfill_id is None else run.backfill_id == backfill_id)
    query = query.where(Job.state.not_in([*_ENDED, JobState.CANCELLING.value]))
    return [str(job_id) for job_id in connection.execute(query.order_by(run.logical_date)).scalars()]


def _change(connection: Connection, claim: Claim, **values: Any) -> bool:
    """Change a run that still waits; tell whether it did."""
    run = ScheduleRunRow
    changed = connection.execute(
        update(run)
        .where(run.id == claim.run.id, run.run_id == claim.run.run_id, run.run_state == RunState.WAITING)
        .values(values)
    )
    return bool(changed.rowcount)
