"""Schedules in the database: add, find, pause, remove, and look at their runs. Each method is one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from batchinfer.db.tables import Job, ScheduleRow, ScheduleRunRow
from batchinfer.errors import ConflictError, NotFoundError
from batchinfer.jobs.cron import Calendar, jitter
from batchinfer.jobs.ids import new_id
from batchinfer.jobs.ledger_base import LedgerBase
from batchinfer.jobs.schedule_records import RunKind, RunState, run_record, schedule_record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Row, Select

    from batchinfer.jobs.caller import Caller
    from batchinfer.jobs.schedule_records import RunRecord, ScheduleRecord
    from batchinfer.jobs.schedule_spec import ScheduleSpec


class ScheduleStore(LedgerBase):
    """What people do with schedules; each acts for a caller."""

    def add(self, spec: ScheduleSpec, job: dict[str, Any], *, caller: Caller) -> ScheduleRecord:
        """Write a new schedule; its first run is the next moment of its cron.

        Raises:
            ConflictError: the tenant has one of that name.
        """
        policy, wait_seconds = spec.missing

        def work(connection: Connection, now: datetime) -> ScheduleRecord:
            schedule_id = new_id("sch_")
            calendar = Calendar(spec.cron, spec.tz)
            values = {
                "id": schedule_id, "tenant_id": caller.home, "name": spec.name, "cron": spec.cron, "tz": spec.tz, "job": job,
                "catch_up": spec.catch_up, "overlap": spec.overlap, "max_active": spec.max_active,
                "jitter_seconds": spec.jitter_seconds, "missing_input": policy, "wait_seconds": wait_seconds,
                "is_paused": 0, "created_at": now,
            }  # fmt: skip
            values |= next_fire(calendar, schedule_id, now, spec.jitter_seconds)
            connection.execute(insert(ScheduleRow).values(values))
            return schedule_record(connection.execute(select(ScheduleRow).where(ScheduleRow.id == schedule_id)).one())

        try:
            return self._write(work, again=False)
        except IntegrityError:
            raise ConflictError(
                f"there is a schedule {spec.name!r} already; `batchinfer schedule rm {spec.name}` removes it",
                param="name",
                code="schedule_exists",
            ) from None

    def get(self, name: str, *, caller: Caller) -> ScheduleRecord:
        """One schedule by name or id. Raises NotFoundError."""
        return self._read(lambda connection, _now: schedule_record(_find(connection, name, caller)))

    def schedules(self, *, caller: Caller, limit: int = 100, after: str | None = None) -> list[ScheduleRecord]:
        """Schedules by name; ``after`` is the last id of the page before. Raises NotFoundError."""

        def work(connection: Connection, _now: datetime) -> list[ScheduleRecord]:
            table = ScheduleRow
            query = caller.only(select(table), table.tenant_id).order_by(table.name, table.id).limit(limit)
            if after is not None:
                last = _find(connection, after, caller)
                query = query.where((table.name > last.name) | ((table.name == last.name) & (table.id > last.id)))
            return [schedule_record(row) for row in connection.execute(query)]

        return self._read(work)

    def set_paused(self, name: str, *, is_paused: bool, caller: Caller) -> ScheduleRecord:
        """Hold a schedule, or let it go on: what passed meanwhile is caught up with as its policy says."""

        def work(connection: Connection, _now: datetime) -> ScheduleRecord:
            row = _find(connection, name, caller, lock=True)
            connection.execute(update(ScheduleRow).where(ScheduleRow.id == row.id).values(is_paused=int(is_paused)))
            return schedule_record(_find(connection, row.id, caller))

        return self._write(work)

    def remove(self, name: str, *, caller: Caller) -> ScheduleRecord:
        """Remove a schedule and its runs; jobs stay, and run on. Raises NotFoundError."""

        def work(connection: Connection, _now: datetime) -> ScheduleRecord:
            row = _find(connection, name, caller, lock=True)
            connection.execute(delete(ScheduleRunRow).where(ScheduleRunRow.schedule_id == row.id))
            connection.execute(delete(ScheduleRow).where(ScheduleRow.id == row.id))
            return schedule_record(row)

        return self._write(work)

    def add_runs(
        self,
        name: str,
        dates: Sequence[datetime],
        *,
        kind: RunKind,
        caller: Caller,
        parallel: int | None = None,
        retry: bool = False,
    ) -> tuple[list[RunRecord], int]:
        """Write runs for these logical dates; also says how many dates have one already and are left alone.

        ``retry`` sets those runs going again that were skipped, or failed, or whose job did not succeed. Raises
        NotFoundError.
        """

        def work(connection: Connection, now: datetime) -> tuple[list[RunRecord], int]:
            schedule = _find(connection, name, caller, lock=True)
            backfill_id = new_id("bf_") if kind is RunKind.BACKFILL else None
            made = []
            for date in dates:
                run = insert_run(
                    connection, schedule.id, date, now, kind=kind, backfill_id=backfill_id, parallel=parallel
                )
                if run is None and retry:
                    origin = {"kind": kind, "backfill_id": backfill_id, "parallel": parallel}
                    run = _again(connection, schedule.id, date, now, origin)
                if run is not None:
                    made.append(run_record(run))
            return made, len(dates) - len(made)

        return self._write(work)

    def runs(
        self,
        name: str,
        *,
        caller: Caller,
        state: RunState | None = None,
        limit: int = 20,
        after: str | None = None,
    ) -> list[RunRecord]:
        """Runs of a schedule, the latest logical date first; ``after`` is the last id of the page before.

        Raises:
            NotFoundError: no such schedule or run.
        """

        def work(connection: Connection, _now: datetime) -> list[RunRecord]:
            schedule = _find(connection, name, caller)
            run = ScheduleRunRow
            query = runs_with_jobs().where(run.schedule_id == schedule.id)
            if state is not None:
                query = query.where(run.run_state == state)
            if after is not None:
                last = connection.execute(
                    select(run.logical_date).where(run.schedule_id == schedule.id, run.run_id == after)
                ).scalar_one_or_none()
                if last is None:
                    raise NotFoundError(f"schedule {name} has no run {after}", param="after")
                query = query.where(run.logical_date < last)
            return [run_record(row) for row in connection.execute(query.order_by(run.logical_date.desc()).limit(limit))]

        return self._read(work)


def _find(connection: Connection, name: str, caller: Caller, *, lock: bool = False) -> Row[Any]:
    query = select(ScheduleRow).where((ScheduleRow.name == name) | (ScheduleRow.id == name))
    query = caller.only(query, ScheduleRow.tenant_id)
    rows = connection.execute(query.with_for_update() if lock else query).all()
    if not rows:
        raise NotFoundError(f"no schedule {name}; `batchinfer schedule ls` lists them", param="schedule")
    if len(rows) > 1:
        raise ConflictError(f"several tenants have a schedule {name}; name it by its id", param="schedule")
    return rows[0]


def next_fire(
    calendar: Calendar, schedule_id: str, moment: datetime, jitter_seconds: int
) -> dict[str, datetime | None]:
    """Columns of the first logical date after ``moment``."""
    try:
        at = calendar.after(moment)
    except StopIteration:  # a February 29 beyond the calendar's end
        return {"next_at": None, "due_at": None}
    return {"next_at": at, "due_at": at + jitter(schedule_id, at, jitter_seconds)}


def insert_run(
    connection: Connection,
    schedule_id: str,
    date: datetime,
    now: datetime,
    *,
    kind: RunKind,
    backfill_id: str | None = None,
    parallel: int | None = None,
    reason: str | None = None,
) -> Row[Any] | None:
    """Insert a waiting run of a locked schedule; None if its logical date has one."""
    taken = select(ScheduleRunRow.id).where(
        ScheduleRunRow.schedule_id == schedule_id, ScheduleRunRow.logical_date == date
    )
    if connection.execute(taken).one_or_none() is not None:
        return None
    statement = insert(ScheduleRunRow).values(
        schedule_id=schedule_id, logical_date=date, run_id=new_id("run_"), kind=kind, backfill_id=backfill_id,
        parallel=parallel, run_state=RunState.WAITING, reason=reason, try_number=1, look_at=now, created_at=now,
    )  # fmt: skip
    return connection.execute(statement.returning(*ScheduleRunRow.__table__.columns)).one()


def _again(
    connection: Connection, schedule_id: str, date: datetime, now: datetime, origin: dict[str, Any]
) -> Row[Any] | None:
    """Set a run that came to nothing going again, as part of another backfill; None if it did succeed or is under way."""
    run = ScheduleRunRow
    found = connection.execute(runs_with_jobs().where(run.schedule_id == schedule_id, run.logical_date == date)).one()
    if found.run_state in (RunState.WAITING, RunState.RUNNING):
        return None
    if found.run_state == RunState.DONE and found.job_state == "completed" and found.job_outcome == "succeeded":
        return None
    changes = {
        "run_id": new_id("run_"), "job_id": None,
        "run_state": RunState.WAITING, "reason": None, "try_number": found.try_number + 1, "look_at": now,
        "started_at": None, "ended_at": None, "created_at": now,
    }  # fmt: skip
    statement = update(run).where(run.id == found.id).values(changes | origin)
    return connection.execute(statement.returning(*run.__table__.columns)).one()


def runs_with_jobs() -> Select[Any]:
    """Runs, each with the state and outcome of its job."""
    job = Job
    return select(
        *ScheduleRunRow.__table__.columns, job.state.label("job_state"), job.outcome.label("job_outcome")
    ).outerjoin(job, job.id == ScheduleRunRow.job_id)
