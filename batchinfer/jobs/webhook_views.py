"""What people and programs see of webhooks and their deliveries."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 -- pydantic reads it
from typing import TYPE_CHECKING, Any, Literal

from batchinfer.jobs.views import View

if TYPE_CHECKING:
    from sqlalchemy import Row


class WebhookView(View):
    """A receiver, without its secret."""

    id: str
    object: Literal["webhook"] = "webhook"
    tenant: str
    url: str
    events: list[str]
    """Those that it wants; none: all."""
    state: str
    """``active``; ``failing``: it failed so often that it is tried rarely; ``disabled``: nothing is sent."""
    reason: str | None
    """Why it is disabled."""
    failures: int
    """Failed attempts since the last success."""
    retry_at: datetime | None
    """When a failing one is tried again."""
    created_at: datetime


class NewWebhookView(WebhookView):
    """A receiver that was just made: the only time that its secret is shown."""

    secret: str
    """``whsec_...``: verifies signatures, as Standard Webhooks has them."""


class WebhookList(View):
    """A tenant's receivers, in the order they were made."""

    object: Literal["list"] = "list"
    data: list[WebhookView]
    has_more: bool


class DeliveryView(View):
    """A message on its way to one receiver."""

    id: str
    object: Literal["webhook.delivery"] = "webhook.delivery"
    webhook: str
    message: str
    """The ``webhook-id`` header: the same for each attempt, so that a receiver knows what it has seen."""
    event: str
    state: str
    """``pending``, ``delivered`` or ``failed``."""
    attempts: int
    last_status: int | None
    """HTTP status of the last answer."""
    last_error: str | None
    last_at: datetime | None
    next_at: datetime | None
    created_at: datetime


class DeliveryList(View):
    """A page of deliveries, newest first."""

    object: Literal["list"] = "list"
    data: list[DeliveryView]
    first_id: str | None
    last_id: str | None
    has_more: bool


def webhook_view(row: Row[Any], now: datetime) -> WebhookView:
    """The view of a receiver."""
    is_failing = row.open_until is not None and row.open_until > now
    return WebhookView(
        id=row.id,
        tenant=row.tenant_id,
        url=row.url,
        events=list(row.events),
        state="disabled" if row.disabled_at else "failing" if is_failing else "active",
        reason=row.disabled_reason,
        failures=row.failures,
        retry_at=row.open_until if is_failing and not row.disabled_at else None,
        created_at=row.created_at,
    )


def delivery_view(row: Any, event: str) -> DeliveryView:
    """The view of a delivery."""
    return DeliveryView(
        id=row.id,
        webhook=row.webhook_id,
        message=row.message_id,
        event=event,
        state=row.state,
        attempts=row.num_attempts,
        last_status=row.last_status,
        last_error=row.last_error,
        last_at=row.last_at,
        next_at=row.next_at,
        created_at=row.created_at,
    )
