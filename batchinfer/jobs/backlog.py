"""How much work waits, in rows and in device time: what an autoscaler needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import case, func, select

from batchinfer.db.session import read_transaction
from batchinfer.db.tables import CLAIMABLE, RUNNING, Attempt, Job, Part, Shard, WebhookDeliveryRow
from batchinfer.db.tables.webhooks import IS_PENDING

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

RECENT_PARTS = 2000
"""So many of the newest parts say how fast each model goes; a scrape must not read them all."""
ASSUMED_NS_PER_TOKEN = 1_000_000
"""Of a model nobody has run yet, where nothing else ran either: a thousand tokens a second."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is left to do for one model; rows of shards that wait, and of those that workers have."""

    model: str
    waiting_rows: int = 0
    running_rows: int = 0
    device_seconds: float = 0.0
    """Estimated, for both, on one device."""


def backlog(engine: Engine) -> list[Backlog]:
    """What is left of each model that has open shards, by model. Held jobs do not count."""
    left = Shard.todo_rows - Shard.done_rows
    # an estimate is for all rows of a shard; what is left of them has its share
    tokens = func.sum(Shard.est_tokens * left / case((Shard.todo_rows > 0, Shard.todo_rows), else_=1))
    waiting = select(Shard.model, func.sum(left), tokens).where(CLAIMABLE).group_by(Shard.model)
    running = (
        select(Shard.model, func.sum(left), tokens)
        .where(Shard.id.in_(select(Attempt.shard_id).where(RUNNING)), Shard.queue.is_not(None))
        .group_by(Shard.model)
    )
    with read_transaction(engine) as connection:
        waits = {model: (int(rows), float(est or 0)) for model, rows, est in connection.execute(waiting)}
        runs = {model: (int(rows), float(est or 0)) for model, rows, est in connection.execute(running)}
        speeds = _ns_per_token(connection) if waits or runs else {}
    found = []
    for model in sorted({*waits, *runs}):
        (waiting_rows, waiting_tokens), (running_rows, running_tokens) = (
            waits.get(model, (0, 0)),
            runs.get(model, (0, 0)),
        )
        ns = speeds.get(model, speeds.get(None, ASSUMED_NS_PER_TOKEN))
        found.append(Backlog(model, waiting_rows, running_rows, (waiting_tokens + running_tokens) * ns / 1e9))
    return found


def _ns_per_token(connection: Connection) -> dict[str | None, float]:
    """Device time a token of each model lately, prompts included; under None that of all of them."""
    newest = select(func.max(Part.id)).scalar_subquery()
    tokens = Part.prompt_tokens + Part.completion_tokens
    query: Any = (
        select(Job.model, func.sum(Part.device_ns), func.sum(tokens))
        .join(Job, Job.id == Part.job_id)
        .where(Part.id > newest - RECENT_PARTS, tokens > 0)
        .group_by(Job.model)
    )
    sums = [(str(model), float(ns), float(number)) for model, ns, number in connection.execute(query)]
    speeds: dict[str | None, float] = {model: ns / number for model, ns, number in sums}
    if sums:
        speeds[None] = sum(ns for _, ns, _ in sums) / sum(number for _, _, number in sums)
    return speeds


def pending_deliveries(engine: Engine) -> int:
    """Webhooks' messages that are not delivered yet."""
    query = select(func.count()).select_from(WebhookDeliveryRow).where(IS_PENDING)
    with read_transaction(engine) as connection:
        return int(connection.scalar(query) or 0)
