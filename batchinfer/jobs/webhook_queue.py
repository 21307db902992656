"""Deliveries that are due: claimed by one sender each, and settled by how the attempt went."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, delete, or_, select, update

from batchinfer.db.tables import WebhookDeliveryRow, WebhookMessageRow, WebhookRow
from batchinfer.db.tables.webhooks import IS_PENDING
from batchinfer.jobs.ledger_base import LedgerBase

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy import Connection, Row

RETRY_SECONDS = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Waits after failed attempts, as Standard Webhooks advises: the last attempt comes after about three days."""
JITTER = 0.2
CLAIM_SECONDS = 60
"""A sender that dies has a delivery for this long; it is more than an attempt takes."""
BREAK_AFTER = 5
"""Failures in a row after which a receiver is spared."""
FIRST_BREAK_SECONDS, LONGEST_BREAK_SECONDS = 60, 3600
DISABLE_AFTER = timedelta(days=5)
"""A receiver that has failed for so long, every time, is not asked any more."""
KEEP = timedelta(days=30)
GONE = 410

_NOW = bindparam("now", type_=WebhookDeliveryRow.__table__.c.next_at.type)
_DUE_FIRST = (
    select(WebhookDeliveryRow.id)
    .join(WebhookRow, WebhookRow.id == WebhookDeliveryRow.webhook_id)
    .where(
        *(IS_PENDING, WebhookDeliveryRow.next_at <= _NOW),
        *(WebhookRow.disabled_at.is_(None), or_(WebhookRow.open_until.is_(None), WebhookRow.open_until <= _NOW)),
    )
    .order_by(WebhookDeliveryRow.next_at)
    .limit(1)
)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A delivery that this sender has for :data:`CLAIM_SECONDS`."""

    id: str
    webhook_id: str
    message_id: str
    attempt: int
    """1 the first time."""
    url: str
    secret: str
    body: str


@dataclass(frozen=True, slots=True)
class Answer:
    """How an attempt went: a status, or what kept it from getting one."""

    status: int | None = None
    error: str | None = None
    retry_after_seconds: float = 0.0

    @property
    def is_success(self) -> bool:
        """Whether the receiver has the message."""
        return self.status is not None and 200 <= self.status < 300


def retry_seconds(attempt: int, spread: Callable[[float, float], float] = random.uniform) -> float | None:
    """How long to wait after the failure of this attempt, with jitter; None: that was the last."""
    if attempt > len(RETRY_SECONDS):
        return None
    return RETRY_SECONDS[attempt - 1] * spread(1 - JITTER, 1 + JITTER)


def break_seconds(failures: int) -> int:
    """How long a receiver is spared after so many failures in a row; 0: not at all."""
    if failures < BREAK_AFTER:
        return 0
    doublings = min(failures - BREAK_AFTER, 16)
    return min(FIRST_BREAK_SECONDS << doublings, LONGEST_BREAK_SECONDS)


class WebhookQueue(LedgerBase):
    """What senders do; any number of them at once."""

    def claim(self, delivery_id: str | None = None) -> Claimed | None:
        """Take the delivery that is due first, or this one, whether it is due or not."""

        def work(connection: Connection, now: datetime) -> Claimed | None:
            row, hook = WebhookDeliveryRow, WebhookRow
            best = select(row.id).join(hook, hook.id == row.webhook_id).where(row.id == delivery_id, IS_PENDING)
            chosen = (_DUE_FIRST if delivery_id is None else best).with_for_update(skip_locked=True, of=row)
            taken = connection.execute(
                update(row)
                .where(row.id == chosen.scalar_subquery(), row.state == "pending")
                .values(next_at=now + timedelta(seconds=CLAIM_SECONDS), num_attempts=row.num_attempts + 1)
                .returning(row.id, row.webhook_id, row.message_id, row.num_attempts),
                {"now": now},
            ).one_or_none()
            return None if taken is None else _claimed(connection, taken, now)

        # senders look every second and mostly find nothing, which should not cost a transaction that locks
        if delivery_id is None and not self._read(_is_due):
            return None
        return self._write(work)

    def settle(self, claimed: Claimed, answer: Answer) -> None:
        """Keep how an attempt went: done, again later, or given up; and what that says of the receiver."""

        def work(connection: Connection, now: datetime) -> None:
            hook = connection.execute(
                select(WebhookRow).where(WebhookRow.id == claimed.webhook_id).with_for_update()
            ).one_or_none()
            if hook is None:
                return
            values: dict[str, Any] = {"last_at": now, "last_status": answer.status, "last_error": answer.error}
            values |= _after(claimed, answer, now)
            row = WebhookDeliveryRow
            # a redelivery that was asked for meanwhile counts its attempts anew: leave it alone
            mine = update(row).where(row.id == claimed.id, row.num_attempts == claimed.attempt, row.state == "pending")
            connection.execute(mine.values(values))
            connection.execute(update(WebhookRow).where(WebhookRow.id == hook.id).values(_health(hook, answer, now)))

        self._write(work)

    def forget_old(self) -> int:
        """Drop messages that nobody asks for any more; return how many."""

        def work(connection: Connection, now: datetime) -> int:
            old = select(WebhookMessageRow.id).where(WebhookMessageRow.created_at < now - KEEP).limit(10_000)
            ids = list(connection.scalars(old))
            if ids:
                connection.execute(delete(WebhookDeliveryRow).where(WebhookDeliveryRow.message_id.in_(ids)))
                connection.execute(delete(WebhookMessageRow).where(WebhookMessageRow.id.in_(ids)))
            return len(ids)

        return self._write(work)


def _is_due(connection: Connection, now: datetime) -> bool:
    return connection.execute(_DUE_FIRST, {"now": now}).one_or_none() is not None


def _claimed(connection: Connection, taken: Any, now: datetime) -> Claimed:
    hook = connection.execute(select(WebhookRow).where(WebhookRow.id == taken.webhook_id)).one()
    body = connection.execute(
        select(WebhookMessageRow.body).where(WebhookMessageRow.id == taken.message_id)
    ).scalar_one()
    if hook.failures >= BREAK_AFTER:
        # half open: one attempt tells whether it is back; the others wait for what comes of it
        pause = now + timedelta(seconds=CLAIM_SECONDS)
        connection.execute(update(WebhookRow).where(WebhookRow.id == hook.id).values(open_until=pause))
    return Claimed(taken.id, hook.id, taken.message_id, taken.num_attempts, hook.url, hook.secret, body)


def _after(claimed: Claimed, answer: Answer, now: datetime) -> dict[str, Any]:
    if answer.is_success:
        return {"state": "delivered", "next_at": None}
    wait = retry_seconds(claimed.attempt)
    if wait is None or answer.status == GONE:
        return {"state": "failed", "next_at": None}
    return {"next_at": now + timedelta(seconds=max(wait, min(answer.retry_after_seconds, RETRY_SECONDS[-1])))}


def _health(hook: Row[Any], answer: Answer, now: datetime) -> dict[str, Any]:
    if answer.is_success:
        return {"failures": 0, "failing_since": None, "open_until": None}
    failures, since = hook.failures + 1, hook.failing_since or now
    pause = break_seconds(failures)
    values: dict[str, Any] = {
        "failures": failures,
        "failing_since": since,
        "open_until": now + timedelta(seconds=pause) if pause else None,
    }
    if answer.status == GONE:
        return values | {"disabled_at": now, "disabled_reason": "it answered 410 Gone"}
    if now - since > DISABLE_AFTER:
        reason = f"it has failed since {since.isoformat()}, {failures} times"
        return values | {"disabled_at": now, "disabled_reason": reason}
    return values
