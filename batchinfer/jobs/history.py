"""What a job and an installation did over time, summed up in the database: for charts, never for decisions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import Float, Integer, cast, func, literal, select

from batchinfer.db.session import read_transaction
from batchinfer.db.tables import Attempt, Part, Shard
from batchinfer.db.types import UtcDateTime
from batchinfer.jobs.usage import GroupBy, UsageQuery, usage_sums

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection, Engine

    from batchinfer.jobs.caller import Caller
    from batchinfer.jobs.usage import UsageSum

NUM_BUCKETS = 48
"""Bars of a chart."""
MAX_SPANS = 400
"""Attempts of a timeline, the latest ones: a chart of more than that shows nothing."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What was committed in one stretch of a job's life."""

    start: datetime
    seconds: float
    num_rows: int = 0
    completion_tokens: int = 0
    metered_nanos: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """One attempt at a shard, as a timeline shows it."""

    attempt_id: int
    shard_index: int
    worker_id: str
    mode: str
    state: str
    started_at: datetime
    ended_at: datetime | None
    done_rows: int
    error: str | None


@dataclass(frozen=True, slots=True)
class DayUse:
    """What was done on one day, in UTC."""

    day: date
    num_rows: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    metered_nanos: int = 0
    overhead_nanos: int = 0

    @property
    def total_nanos(self) -> int:
        """Rows and overhead."""
        return self.metered_nanos + self.overhead_nanos


def committed_over_time(engine: Engine, job_id: str, start: datetime, end: datetime) -> list[Bucket]:
    """A job's committed work in :data:`NUM_BUCKETS` equal stretches from ``start`` to ``end``."""
    width = max((end - start).total_seconds(), 1.0) / NUM_BUCKETS
    with read_transaction(engine) as connection:
        seconds = _seconds_since(connection, Part.created_at, start)
        number = cast(func.floor(seconds / literal(width, Float)), Integer).label("number")
        query = (
            select(number, func.sum(Part.num_rows), func.sum(Part.completion_tokens), func.sum(Part.metered_nanos))
            # by shard: that is what parts are indexed by
            .join(Shard, Shard.id == Part.shard_id)
            .where(Shard.job_id == job_id)
            .group_by(number)
        )
        found = [tuple(int(value) for value in row) for row in connection.execute(query)]
    sums = {index: [0, 0, 0] for index in range(NUM_BUCKETS)}
    for index, *values in found:
        kept = sums[min(max(index, 0), NUM_BUCKETS - 1)]
        kept[:] = [old + new for old, new in zip(kept, values, strict=True)]
    return [Bucket(start + timedelta(seconds=index * width), width, *sums[index]) for index in range(NUM_BUCKETS)]


def latest_spans(engine: Engine, job_id: str) -> list[Span]:
    """The latest attempts of a job, the oldest of them first."""
    query = (
        select(Attempt, Shard.shard_index)
        .join(Shard, Shard.id == Attempt.shard_id)
        .where(Attempt.job_id == job_id)
        .order_by(Attempt.id.desc())
        .limit(MAX_SPANS)
    )
    with read_transaction(engine) as connection:
        rows = list(connection.execute(query))
    return [
        Span(
            row.id, row.shard_index, row.worker_id, row.mode, row.state,
            row.started_at, row.ended_at, row.done_rows, row.error,
        )
        for row in reversed(rows)
    ]  # fmt: skip


def use_by_day(engine: Engine, caller: Caller, *, now: datetime, num_days: int = 30) -> list[DayUse]:
    """What the caller's jobs did on each of the last days, today last; days without work are zeros.

    Overhead that belongs to no job (a loaded engine that idles) is the platform's alone.
    """
    last = now.astimezone(UTC).date()
    first = last - timedelta(days=num_days - 1)
    query = UsageQuery((GroupBy.DAY,), first_day=first, last_day=last)
    sums, _ = usage_sums(engine, query, caller, limit=num_days)
    used = {line.group[0]: line for line in sums}
    return [_day_use(first + timedelta(days=number), used) for number in range(num_days)]


def _day_use(day: date, used: Mapping[str, UsageSum]) -> DayUse:
    line = used.get(day.isoformat())
    if line is None:
        return DayUse(day)
    return DayUse(
        day, line.num_rows, line.prompt_tokens, line.cached_tokens, line.completion_tokens,
        line.metered_nanos, line.overhead_nanos,
    )  # fmt: skip


def _seconds_since(connection: Connection, column: Any, start: datetime) -> Any:
    moment = literal(start, UtcDateTime())
    if connection.dialect.name == "sqlite":
        # a double holds a Julian day to about 40 microseconds: milliseconds are what can be told
        return func.round((func.julianday(column) - func.julianday(moment)) * 86400, 3)
    return func.extract("epoch", column - moment)
