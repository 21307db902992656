"""What webhooks are told of. Messages are written in the transaction in which it happens: an outbox.

Hence a message is never sent of what was rolled back, and never lost of what was committed.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select

from batchinfer.db.tables import WebhookDeliveryRow, WebhookMessageRow, WebhookRow
from batchinfer.jobs.ids import new_id
from batchinfer.jobs.status import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Row


class Event(StrEnum):
    """What happened."""

    JOB_COMPLETED = "job.completed"
    JOB_FAILED = "job.failed"
    JOB_CANCELLED = "job.cancelled"
    JOB_EXPIRED = "job.expired"
    JOB_BUDGET_EXHAUSTED = "job.budget_exhausted"
    JOB_DRIFT = "job.drift"
    """The sentinel found answers further from the reference than the job's threshold; told once a job, which goes on."""
    SCHEDULE_RUN_FAILED = "schedule.run_failed"
    """A run of a schedule ended without a job; a job of a schedule that fails is ``job.failed``."""
    TEST = "webhook.test"
    """Somebody tries a webhook; sent to that one, whatever it wants."""


STATE_EVENTS = {
    JobState.COMPLETED: Event.JOB_COMPLETED,
    JobState.FAILED: Event.JOB_FAILED,
    JobState.CANCELLED: Event.JOB_CANCELLED,
    JobState.EXPIRED: Event.JOB_EXPIRED,
    JobState.BUDGET_EXHAUSTED: Event.JOB_BUDGET_EXHAUSTED,
}
_COUNTS = ("succeeded", "errored", "expired", "cancelled", "skipped", "deduplicated", "filtered")


def tell_of_job(
    connection: Connection, job: Row[Any], state: JobState, now: datetime, changed: Mapping[str, Any]
) -> None:
    """Tell that a locked job has come to ``state``; ``changed`` are the columns that change with it."""
    event = STATE_EVENTS.get(state)
    if event is None:
        return
    receivers = _receivers(connection, job.tenant_id, event)
    if not receivers:
        return
    values: dict[str, Any] = {**job._mapping, **changed}  # noqa: SLF001 -- SQLAlchemy's public name for a row as a mapping
    error = None
    if state is JobState.FAILED:
        error = {"code": values["error_code"], "message": values["error_message"]}
    data = {
        "object": "job",
        "id": job.id,
        "tenant": job.tenant_id,
        "name": job.name,
        "tags": job.tags,
        "model": job.model,
        "state": state.value,
        "outcome": values["outcome"],
        "error": error,
        "rows": {"total": job.num_rows} | {name: values[f"rows_{name}"] for name in _COUNTS},
        "output": values["output"],
    }
    post(connection, receivers, job.tenant_id, event, data, now=now)


def tell(connection: Connection, tenant: str, event: Event, data: Mapping[str, Any], now: datetime) -> None:
    """Tell a tenant's receivers of anything else."""
    if receivers := _receivers(connection, tenant, event):
        post(connection, receivers, tenant, event, data, now=now)


def post(
    connection: Connection,
    receivers: Sequence[str],
    tenant: str,
    event: Event,
    data: Mapping[str, Any],
    *,
    now: datetime,
) -> list[str]:
    """Write one message and a delivery for each receiver; return the deliveries' ids."""
    message_id = new_id("msg_")
    body = json.dumps({"type": event, "timestamp": now.isoformat(), "data": data}, separators=(",", ":"), default=str)
    message = {"id": message_id, "tenant_id": tenant, "event": event, "body": body, "created_at": now}
    connection.execute(insert(WebhookMessageRow).values(message))
    deliveries = [
        {
            "id": new_id("dlv_"), "webhook_id": receiver, "message_id": message_id,
            "state": "pending", "num_attempts": 0, "next_at": now, "created_at": now,
        }
        for receiver in receivers
    ]  # fmt: skip
    connection.execute(insert(WebhookDeliveryRow), deliveries)
    return [str(delivery["id"]) for delivery in deliveries]


def _receivers(connection: Connection, tenant: str, event: Event) -> list[str]:
    query = select(WebhookRow.id, WebhookRow.events)
    found = connection.execute(query.where(WebhookRow.tenant_id == tenant, WebhookRow.disabled_at.is_(None)))
    return [row.id for row in found if not row.events or event in row.events]
