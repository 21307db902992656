"""Use cases of webhooks, for the CLI and the REST API."""

from __future__ import annotations

import base64
import secrets
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, func, insert, select, update

from batchinfer.db.tables import WebhookDeliveryRow, WebhookMessageRow, WebhookRow
from batchinfer.errors import ConflictError, InvalidSpecError, NotFoundError
from batchinfer.jobs.ids import new_id
from batchinfer.jobs.ledger_base import LedgerBase
from batchinfer.jobs.safe_url import check_url
from batchinfer.jobs.webhook_events import Event, post
from batchinfer.jobs.webhook_views import (
    DeliveryList,
    DeliveryView,
    NewWebhookView,
    WebhookList,
    WebhookView,
    delivery_view,
    webhook_view,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Row

    from batchinfer.jobs.caller import Caller
    from batchinfer.jobs.safe_url import IpNetwork

MAX_WEBHOOKS = 20
"""Most receivers of a tenant: each is a row in the transaction that ends a job."""
SECRET_BYTES = 32
CHOOSABLE = tuple(event.value for event in Event if event is not Event.TEST)


def url_schemes(allowed: Sequence[IpNetwork]) -> tuple[str, ...]:
    """``https`` on the internet; in one's own house plain ``http``, too."""
    return ("https", "http") if allowed else ("https",)


class Webhooks(LedgerBase):
    """The receivers of a database. Each method acts for a caller: other tenants' receivers are not there."""

    def add(
        self, caller: Caller, url: str, *, events: Sequence[str] = (), allowed: Sequence[IpNetwork] = ()
    ) -> NewWebhookView:
        """Make a receiver. ``allowed`` are networks of one's own that may be reached besides the public internet.

        Raises:
            InvalidSpecError: a URL that is not to be asked (``unsafe_url``), or an unknown event.
            ConflictError: the tenant has too many.
        """
        if unknown := sorted(set(events) - set(CHOOSABLE)):
            raise InvalidSpecError(f"no event {unknown[0]!r}; there are {', '.join(CHOOSABLE)}", param="events")
        check_url(url, allowed=allowed, schemes=url_schemes(allowed))
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
        values = {
            "id": new_id("wh_"), "tenant_id": caller.home, "url": url, "secret": secret,
            "events": sorted(set(events)), "failures": 0,
        }  # fmt: skip

        def work(connection: Connection, now: datetime) -> NewWebhookView:
            mine = select(func.count()).select_from(WebhookRow).where(WebhookRow.tenant_id == caller.home)
            if (connection.scalar(mine) or 0) >= MAX_WEBHOOKS:
                raise ConflictError(f"there are {MAX_WEBHOOKS} webhooks already; remove one first")
            connection.execute(insert(WebhookRow).values(values | {"created_at": now}))
            view = webhook_view(_find(connection, caller, str(values["id"])), now)
            return NewWebhookView(**view.model_dump(), secret=secret)

        return self._write(work, again=False)

    def list(self, caller: Caller) -> WebhookList:
        """All receivers of the caller, oldest first."""

        def work(connection: Connection, now: datetime) -> list[WebhookView]:
            query = caller.only(select(WebhookRow), WebhookRow.tenant_id).order_by(WebhookRow.id)
            return [webhook_view(row, now) for row in connection.execute(query)]

        return WebhookList(data=self._read(work), has_more=False)

    def get(self, caller: Caller, webhook_id: str) -> WebhookView:
        """One receiver. Raises NotFoundError."""
        return self._read(lambda connection, now: webhook_view(_find(connection, caller, webhook_id), now))

    def remove(self, caller: Caller, webhook_id: str) -> WebhookView:
        """Forget a receiver and its deliveries. Raises NotFoundError."""

        def work(connection: Connection, now: datetime) -> WebhookView:
            view = webhook_view(_find(connection, caller, webhook_id), now)
            connection.execute(delete(WebhookDeliveryRow).where(WebhookDeliveryRow.webhook_id == webhook_id))
            connection.execute(delete(WebhookRow).where(WebhookRow.id == webhook_id))
            return view

        return self._write(work)

    def enable(self, caller: Caller, webhook_id: str) -> WebhookView:
        """Forget that a receiver failed: what waits is sent soon. Raises NotFoundError."""

        def work(connection: Connection, now: datetime) -> WebhookView:
            _find(connection, caller, webhook_id)
            clean = dict.fromkeys(("failing_since", "open_until", "disabled_at", "disabled_reason"))
            known = update(WebhookRow).where(WebhookRow.id == webhook_id)
            connection.execute(known.values(failures=0, **clean))
            waiting = update(WebhookDeliveryRow).where(
                WebhookDeliveryRow.webhook_id == webhook_id, WebhookDeliveryRow.state == "pending"
            )
            connection.execute(waiting.values(next_at=now))
            return webhook_view(_find(connection, caller, webhook_id), now)

        return self._write(work)

    def post_test(self, caller: Caller, webhook_id: str) -> DeliveryView:
        """Write a test message for a receiver. Raises NotFoundError."""

        def work(connection: Connection, now: datetime) -> DeliveryView:
            row = _find(connection, caller, webhook_id)
            data = {"object": "webhook", "id": row.id, "tenant": row.tenant_id}
            [delivery] = post(connection, [row.id], row.tenant_id, Event.TEST, data, now=now)
            return _delivery(connection, caller, webhook_id, delivery)

        return self._write(work, again=False)

    def deliveries(
        self, caller: Caller, webhook_id: str, *, state: str | None = None, limit: int = 20, after: str | None = None
    ) -> DeliveryList:
        """A page of deliveries, newest first. Raises NotFoundError."""

        def work(connection: Connection, _now: datetime) -> list[DeliveryView]:
            _find(connection, caller, webhook_id)
            row = WebhookDeliveryRow
            query = (
                select(row, WebhookMessageRow.event)
                .join(WebhookMessageRow, WebhookMessageRow.id == row.message_id)
                .where(row.webhook_id == webhook_id)
            )
            if state is not None:
                query = query.where(row.state == state)
            if after is not None:
                query = query.where(row.id < after)
            found = connection.execute(query.order_by(row.id.desc()).limit(limit + 1))
            return [delivery_view(one, one.event) for one in found]

        views = self._read(work)
        page = views[:limit]
        return DeliveryList(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=len(views) > limit,
        )

    def delivery(self, caller: Caller, webhook_id: str, delivery_id: str) -> DeliveryView:
        """One delivery. Raises NotFoundError."""
        return self._read(lambda connection, _now: _delivery(connection, caller, webhook_id, delivery_id))

    def redeliver(self, caller: Caller, webhook_id: str, delivery_id: str) -> DeliveryView:
        """Send a message again, with its old id, whatever became of it. Raises NotFoundError."""

        def work(connection: Connection, now: datetime) -> DeliveryView:
            _delivery(connection, caller, webhook_id, delivery_id)
            again = update(WebhookDeliveryRow).where(WebhookDeliveryRow.id == delivery_id)
            connection.execute(again.values(state="pending", num_attempts=0, next_at=now))
            return _delivery(connection, caller, webhook_id, delivery_id)

        return self._write(work)


def _find(connection: Connection, caller: Caller, webhook_id: str) -> Row[Any]:
    query = caller.only(select(WebhookRow).where(WebhookRow.id == webhook_id), WebhookRow.tenant_id)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFoundError(f"no webhook {webhook_id}; `batchinfer webhooks ls` lists them", param="webhook_id")
    return row


def _delivery(connection: Connection, caller: Caller, webhook_id: str, delivery_id: str) -> DeliveryView:
    _find(connection, caller, webhook_id)
    row = WebhookDeliveryRow
    query = (
        select(row, WebhookMessageRow.event)
        .join(WebhookMessageRow, WebhookMessageRow.id == row.message_id)
        .where(row.id == delivery_id, row.webhook_id == webhook_id)
    )
    found = connection.execute(query).one_or_none()
    if found is None:
        raise NotFoundError(f"webhook {webhook_id} has no delivery {delivery_id}", param="delivery_id")
    return delivery_view(found, found.event)
