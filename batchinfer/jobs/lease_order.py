"""Which shard a worker gets next: the one statement that claims, and the fair share between tenants that it reads.

Shards wait in *lanes*: one for each (queue, needs, tenant), in which they lie in order in the index ``ix_shards_claim``.
The claim looks at the head of each lane, one index probe each, takes the best lane, and then its first shard that nobody
else is claiming. Lanes are few (models x pools x tenants with waiting work), shards may be millions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Boolean, Text, bindparam, func, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from batchinfer.db.tables import CLAIMABLE, Shard, TenantRow, TenantService
from batchinfer.db.types import UtcDateTime
from batchinfer.jobs.status import ShardState

if TYPE_CHECKING:
    from sqlalchemy import BindParameter, ColumnElement, Connection, Row, Update

EVERYONE = ""
"""The queue of shards that need no engine any more: any worker may close them."""
RUN_LENGTH = 4
"""Neighbouring shards of a job that go one after the other before another job's turn: their prompts begin alike."""
HALF_LIFE_S = 1800.0
"""After this time, service that a tenant has had counts half."""
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_DUE = "(retry_at IS NULL OR retry_at <= :now)"
_WAITS = f"state = 'pending' AND queue IS NOT NULL AND {_DUE}"
_ORDER = "queue, needs, tenant_id, turn, pressure, rank, fair_key, job_id, shard_index"


def _next_lane(behind: str) -> str:
    # a queue behind another is not NULL, and the databases know; said once more, SQLite would search for that instead
    return f"(SELECT id FROM shards WHERE state = 'pending' AND {behind} AND {_DUE} ORDER BY {_ORDER} LIMIT 1)"  # noqa: S608 -- constants


_HEADS = "id, queue, needs, tenant_id, turn, pressure, rank, fair_key, job_id"

_LANES = f"""lanes({_HEADS}) AS (
  SELECT {_HEADS} FROM (SELECT {_HEADS} FROM shards WHERE {_WAITS} ORDER BY {_ORDER} LIMIT 1) AS first_head
  UNION ALL
  SELECT {", ".join(f"head.{column}" for column in _HEADS.split(", "))}
  FROM lanes JOIN shards AS head ON head.id = coalesce(
    {_next_lane("tenant_id > lanes.tenant_id AND needs = lanes.needs AND queue = lanes.queue")},
    {_next_lane("needs > lanes.needs AND queue = lanes.queue")},
    {_next_lane("queue > lanes.queue")}
  )
)"""  # noqa: S608 -- constants

_BEST = """best AS (
  SELECT lanes.queue AS q, lanes.needs AS n, lanes.tenant_id AS t, turn AS u, pressure AS p, rank AS r
  FROM lanes LEFT JOIN tenant_service AS service ON service.tenant_id = lanes.tenant_id
  WHERE queue = '' OR ((:any_model OR queue IN :models) AND (:any_needs OR needs IN :offers))
  ORDER BY turn, pressure, rank, CASE WHEN queue IN :loaded THEN 0 ELSE 1 END,
    coalesce(service.usage, -1e300), lanes.fair_key, job_id
  LIMIT 1
)"""

_NEAR = f"""SELECT id FROM shards
  WHERE {_WAITS} AND job_id = :near_job AND shard_index > :near_index
    AND queue IN :loaded
    AND turn = (SELECT u FROM best) AND pressure = (SELECT p FROM best) AND rank = (SELECT r FROM best)
  ORDER BY shard_index LIMIT 1"""  # noqa: S608 -- constants

_HEAD = f"""SELECT id FROM shards
  WHERE {_WAITS} AND queue = (SELECT q FROM best) AND needs = (SELECT n FROM best) AND tenant_id = (SELECT t FROM best)
  ORDER BY {_ORDER} LIMIT 1"""  # noqa: S608 -- constants

_FREE = f"""SELECT id FROM shards
  WHERE {_WAITS} AND EXISTS (SELECT 1 FROM best)
    AND (queue = '' OR ((:any_model OR queue IN :models) AND (:any_needs OR needs IN :offers)))
  ORDER BY {_ORDER} LIMIT 1"""  # noqa: S608 -- constants

_OF_JOB = f"SELECT id FROM shards WHERE {_WAITS} AND job_id = :near_job ORDER BY {_ORDER} LIMIT 1"  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True)
class Offer:
    """What a worker can do, and what it would rather do.

    ``models`` and ``needs`` None: anything. ``loaded`` models go before others, and ``near`` (a job and a shard's index)
    before other jobs, where turn, deadline pressure and priority are equal: give them within a quantum only, since they
    go before the fair share.
    """

    models: tuple[str, ...] | None = None
    needs: tuple[str, ...] | None = None
    loaded: tuple[str, ...] = ()
    near: tuple[str, int] | None = None
    job_id: str | None = None
    """Only this job's shards, whatever they need."""


ANYTHING = Offer()


def claim_statement(now: datetime, offer: Offer = ANYTHING, *, dialect: str) -> Update:
    """The one statement that claims a shard. Two workers never get the same.

    Conditions repeat the partial index's word for word, so that the first match in index order ends each search.
    """
    lock = " FOR UPDATE SKIP LOCKED" if dialect == "postgresql" else ""
    if offer.job_id is not None:
        choice = _OF_JOB + lock
    else:
        ways = [_HEAD + lock]
        if offer.near is not None:
            ways.insert(0, _NEAR + lock)
        if lock:
            # others are claiming all that the best lane has: take what is free rather than nothing
            ways.append(_FREE + lock)
        found = ", ".join(f"({way})" for way in ways)
        choice = f"WITH RECURSIVE {_LANES}, {_BEST} SELECT " + (f"coalesce({found})" if len(ways) > 1 else found)
    return (
        update(Shard)
        .where(text(f"shards.id = ({choice})").bindparams(*_bound(choice, now, offer)))
        .values(state=ShardState.LEASED, num_attempts=Shard.num_attempts + 1, retry_at=None)
        .returning(Shard)
    )


def _bound(sql: str, now: datetime, offer: Offer) -> list[BindParameter[Any]]:
    near_job, near_index = offer.near or (offer.job_id, -1)
    values: list[BindParameter[Any]] = [
        bindparam("now", now, type_=UtcDateTime()),
        bindparam("any_model", offer.models is None, type_=Boolean()),
        bindparam("any_needs", offer.needs is None, type_=Boolean()),
        bindparam("models", list(offer.models or ()), type_=Text(), expanding=True),
        bindparam("offers", list(offer.needs or ()), type_=Text(), expanding=True),
        bindparam("loaded", list(offer.loaded), type_=Text(), expanding=True),
        bindparam("near_job", near_job, type_=Text()),
        bindparam("near_index", near_index, type_=BigInteger()),
    ]
    return [value for value in values if f":{value.key}" in sql]


# -- fair share -------------------------------------------------------------------------------------------------------
def charge(connection: Connection, shard: Row[Any], now: datetime) -> None:
    """Note that a shard's tenant has been served. Last in a transaction: all claims for a tenant wait for this row."""
    service = _lock_service(connection, shard.tenant_id)
    cost = max(1, shard.est_tokens) * (shard.todo_rows - shard.done_rows) / max(1, shard.row_end - shard.row_start)
    added = _age(now) + math.log2(max(1.0, cost) / (service.weight or 1.0))
    connection.execute(
        update(TenantService)
        .where(TenantService.tenant_id == shard.tenant_id)
        .values(usage=_log2_sum(service.usage, added), fair_key=max(service.fair_key, shard.fair_key))
    )


def join(connection: Connection, *, tenant: str, queue: str, needs: str, rank: int, now: datetime) -> int:
    """A job's shards are about to wait; return the ``fair_key`` at which they begin.

    Among the jobs of its tenant it begins where the others stand: neither behind all that waits nor before it. A tenant
    that had nothing waiting begins where the least served of the others stands: being away earns no arrears.
    """
    waiting = {row.tenant_id: row.usage for row in connection.execute(_WAITING, {"now": now})}
    service = _lock_service(connection, tenant)
    if waiting and tenant not in waiting:
        least = min(usage if usage is not None else -math.inf for usage in waiting.values())
        if math.isfinite(least) and (service.usage is None or service.usage < least):
            connection.execute(update(TenantService).where(TenantService.tenant_id == tenant).values(usage=least))
    lane = (Shard.queue == queue, Shard.needs == needs, Shard.tenant_id == tenant)
    order = (Shard.turn == 1, Shard.pressure == 0, Shard.rank == rank)
    first = connection.execute(select(func.min(Shard.fair_key)).where(CLAIMABLE, *lane, *order)).scalar_one()
    return int(service.fair_key if first is None else first)


def rejoin(connection: Connection, job: Row[Any], shards: ColumnElement[bool], now: datetime) -> None:
    """Shards of a job that was held, or that run again, do not catch up on the turns that the job has missed."""
    of_job = (Shard.job_id == job.id) & shards
    head = select(Shard.fair_key, Shard.needs).where(of_job).order_by(Shard.fair_key).limit(1)
    first = connection.execute(head).one_or_none()
    if first is None:
        return
    begin = join(connection, tenant=job.tenant_id, queue=job.model, needs=first.needs, rank=-job.priority, now=now)
    if begin > first.fair_key:
        moved = Shard.fair_key + (begin - first.fair_key)
        connection.execute(update(Shard).where(of_job).values(fair_key=moved))


_WAITING = text(
    f"WITH RECURSIVE {_LANES} SELECT DISTINCT lanes.tenant_id, service.usage FROM lanes "  # noqa: S608 -- constants
    "LEFT JOIN tenant_service AS service ON service.tenant_id = lanes.tenant_id"
).bindparams(bindparam("now", type_=UtcDateTime()))


def _lock_service(connection: Connection, tenant: str) -> Any:
    query = (
        select(TenantService.usage, TenantService.fair_key, TenantRow.weight)
        .select_from(TenantService)
        .outerjoin(TenantRow, TenantRow.id == TenantService.tenant_id)
        .where(TenantService.tenant_id == tenant)
        .with_for_update(of=TenantService)
    )
    found = connection.execute(query).one_or_none()
    if found is None:
        dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
        connection.execute(dialect.insert(TenantService).values(tenant_id=tenant).on_conflict_do_nothing())
        found = connection.execute(query).one()
    return found


def _age(now: datetime) -> float:
    """Half-lives since a fixed moment.

    Service is kept as the base-2 logarithm of its sum, in that moment's worth: all of it ages alike, so that the order of
    tenants changes only when one of them is served.
    """
    return (now - _EPOCH).total_seconds() / HALF_LIFE_S


def _log2_sum(one: float | None, other: float) -> float:
    if one is None:
        return other
    high, low = max(one, other), min(one, other)
    return high + math.log2(1.0 + 2.0 ** max(-1000.0, low - high))
