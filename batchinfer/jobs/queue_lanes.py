"""How much work waits, for whoever decides how many workers there shall be: autoscalers, metrics, people."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, func, select

from batchinfer.db.session import read_transaction
from batchinfer.db.tables import CLAIMABLE, RUNNING, Attempt, Job, Part, Shard, Worker
from batchinfer.jobs.lease_order import EVERYONE
from batchinfer.jobs.needs import DEFAULT_POOL, describe_needs, needs_of
from batchinfer.jobs.queries import RECENT_PARTS
from batchinfer.jobs.serving import Serves
from batchinfer.jobs.status import JobState
from batchinfer.jobs.views import QueueLane

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection, Engine, Row

    from batchinfer.jobs.records import JobRecord

WORKER_SILENCE = timedelta(minutes=2)
"""A worker that is silent for longer is not counted as alive."""
DEFAULT_DEVICE_NS = 1_000_000
"""Device time of a token where nothing has run lately, in nanoseconds: a guess, until the first part."""

_RUNNING_OF = select(Attempt.id).where(Attempt.job_id == bindparam("job_id"), RUNNING).limit(1)
_ALIVE = select(Worker.serves, Worker.models, Worker.stats).where(Worker.last_seen_at >= bindparam("since"))


def queue_lanes(engine: Engine, now: datetime, *, target_seconds: float = 600.0) -> list[QueueLane]:
    """Waiting and running work by model, pool and kind of hardware; one row also for what living workers have loaded.

    Reads an index and the running attempts; its cost grows with the number of waiting shards, not of rows or jobs.
    """
    with read_transaction(engine) as connection:
        waiting, running = _waiting(connection), _running(connection)
        serving = _serving(_alive(connection, now - WORKER_SILENCE))
        cost = _device_ns_per_token(connection) if waiting or running else {}
    lanes = dict.fromkeys((*waiting, *running, *_loaded_lanes(serving)))
    found = []
    for model, needs in sorted(lanes):
        wait, run = waiting.get((model, needs), (0, 0, 0)), running.get((model, needs), (0, 0, 0))
        ns = cost.get(model)
        seconds = (wait[2] + run[2]) * (ns or cost.get(None, DEFAULT_DEVICE_NS)) / 1e9
        shards = wait[0] + run[0]
        pool, _, kind = needs.partition("/")
        found.append(
            QueueLane(
                model=model, pool=pool or DEFAULT_POOL, device_kind=kind or None,
                waiting_shards=wait[0], waiting_rows=wait[1], waiting_tokens=wait[2],
                running_shards=run[0], running_rows=run[1], running_tokens=run[2],
                device_seconds=round(seconds, 3),
                is_measured=ns is not None,
                workers=sum(serves.can_serve(model, needs) for serves, _ in serving),
                workers_wanted=min(shards, max(1, -int(-seconds // target_seconds))) if shards else 0,
            )
        )  # fmt: skip
    return found


def why_it_waits(source: Engine | Connection, job: JobRecord, now: datetime) -> str | None:
    """Why none of a job's shards runs though they could, for people; None if that is not so."""
    if job.state not in (JobState.VALIDATING, JobState.QUEUED, JobState.IN_PROGRESS) or job.closing is not None:
        return None
    needs = needs_of(job.spec.pool, job.spec.device_kind)
    with read_transaction(source) as connection:
        if connection.execute(_RUNNING_OF, {"job_id": job.id}).one_or_none() is not None:
            return None
        workers = _alive(connection, now - WORKER_SILENCE)
    serving = _serving(workers)
    if not serving:
        ill = "the device of each live worker is not well, see `batchinfer workers`"
        return ill if workers else "no worker is running: start `batchinfer worker`"
    if job.state is JobState.VALIDATING:
        return "a worker has yet to read its input"
    if any(serves.can_serve(job.model, needs) or serves.job_id == job.id for serves, _ in serving):
        return "the workers that serve it have not come to it yet"
    return (
        f"no live worker serves {job.model}{describe_needs(needs)}; "
        f"start `batchinfer worker{_flags(job.spec.pool, job.spec.device_kind)}`"
    )


def _flags(pool: str | None, device_kind: str | None) -> str:
    flags = {"--pool": pool, "--device-kind": device_kind}
    return "".join(f" {flag} {value}" for flag, value in flags.items() if value)


def _waiting(connection: Connection) -> dict[tuple[str, str], tuple[int, int, int]]:
    rows = Shard.todo_rows - Shard.done_rows
    query = (
        select(Shard.model, Shard.needs, func.count(), func.sum(rows), func.sum(_tokens_left()))
        .where(CLAIMABLE, Shard.queue != EVERYONE)
        .group_by(Shard.model, Shard.needs)
    )
    return {(model, needs): (int(n), int(r), int(t)) for model, needs, n, r, t in connection.execute(query)}


def _running(connection: Connection) -> dict[tuple[str, str], tuple[int, int, int]]:
    rows = Shard.todo_rows - Shard.done_rows
    held = select(Attempt.shard_id).where(RUNNING)
    query = (
        select(Shard.model, Shard.needs, func.count(), func.sum(rows), func.sum(_tokens_left()))
        .where(Shard.id.in_(held))
        .group_by(Shard.model, Shard.needs)
    )
    return {(model, needs): (int(n), int(r), int(t)) for model, needs, n, r, t in connection.execute(query)}


def _tokens_left() -> ColumnElement[Any]:
    return Shard.est_tokens * (Shard.todo_rows - Shard.done_rows) / (Shard.row_end - Shard.row_start)


def _device_ns_per_token(connection: Connection) -> dict[str | None, float]:
    """Device time of a computed token in the newest parts, by model; under None that of all models together."""
    newest = select(func.max(Part.id)).scalar_subquery()
    tokens = Part.prompt_tokens - Part.cached_tokens + Part.completion_tokens
    query: Any = (
        select(Job.model, func.sum(Part.device_ns), func.sum(tokens))
        .join(Job, Job.id == Part.job_id)
        .where(Part.id > newest - RECENT_PARTS, Part.device_ns > 0, tokens > 0)
        .group_by(Job.model)
    )
    sums = [(str(model), float(ns), float(number)) for model, ns, number in connection.execute(query)]
    speeds: dict[str | None, float] = {model: ns / number for model, ns, number in sums}
    if sums:
        speeds[None] = sum(ns for _, ns, _ in sums) / sum(number for _, _, number in sums)
    return speeds


def _alive(connection: Connection, since: datetime) -> Sequence[Row[Any]]:
    return connection.execute(_ALIVE, {"since": since}).all()


def _serving(workers: Sequence[Row[Any]]) -> list[tuple[Serves, tuple[str, ...]]]:
    """Of living workers those that take shards: their device is well."""
    well = [row for row in workers if not row.stats.get("device_fault")]
    return [(Serves.from_json(row.serves), tuple(row.models)) for row in well]


def _loaded_lanes(serving: list[tuple[Serves, tuple[str, ...]]]) -> list[tuple[str, str]]:
    """Idle models that are loaded: an autoscaler must see that their work is 0, not that there is no such thing."""
    return [(model, serves.home) for serves, loaded in serving for model in loaded]
