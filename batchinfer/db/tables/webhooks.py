"""Tables of webhooks: who is told, what there is to tell, and how each telling went. No rules live here."""

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from batchinfer.db.tables.base import Base
from batchinfer.db.types import SafeText

# Partial index: see batchinfer.db.tables.jobs.
IS_PENDING = text("state = 'pending'")


class WebhookRow(Base):
    """A receiver. ``secret`` signs; ``events`` are those that it wants, none: all.

    ``failures`` counts failed attempts since the last success, which came at or before ``failing_since``; while
    ``open_until`` lies ahead nothing is sent.
    """

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(String(30), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40))
    url: Mapped[str]
    secret: Mapped[str]
    events: Mapped[list[Any]] = mapped_column(default=list)
    failures: Mapped[int] = mapped_column(default=0)
    failing_since: Mapped[datetime | None]
    open_until: Mapped[datetime | None]
    disabled_at: Mapped[datetime | None]
    disabled_reason: Mapped[str | None] = mapped_column(SafeText)
    created_at: Mapped[datetime]

    __table_args__ = (Index("ix_webhooks_tenant_id", "tenant_id", "id"),)


class WebhookMessageRow(Base):
    """Something to tell, written in the transaction in which it happened. ``body`` is sent to the byte."""

    __tablename__ = "webhook_messages"

    id: Mapped[str] = mapped_column(String(30), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40))
    event: Mapped[str] = mapped_column(String(40))
    body: Mapped[str]
    created_at: Mapped[datetime]

    __table_args__ = (Index("ix_webhook_messages_created_at", "created_at"),)


class WebhookDeliveryRow(Base):
    """A message on its way to a receiver. ``state`` is pending, delivered or failed."""

    __tablename__ = "webhook_deliveries"

    id: Mapped[str] = mapped_column(String(30), primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    message_id: Mapped[str] = mapped_column(ForeignKey("webhook_messages.id", ondelete="CASCADE"))
    state: Mapped[str] = mapped_column(String(20))
    num_attempts: Mapped[int] = mapped_column(default=0)
    next_at: Mapped[datetime | None]
    last_at: Mapped[datetime | None]
    last_status: Mapped[int | None]
    last_error: Mapped[str | None] = mapped_column(SafeText)
    created_at: Mapped[datetime]

    __table_args__ = (
        Index("ix_webhook_deliveries_next_at", "next_at", sqlite_where=IS_PENDING, postgresql_where=IS_PENDING),
        Index("ix_webhook_deliveries_webhook_id", "webhook_id", "id"),
        Index("ix_webhook_deliveries_message_id", "message_id"),
    )
