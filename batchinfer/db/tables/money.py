"""Tables of money that belong to no single job: usage by day, prices of devices, budgets, forecasts. No rules live here."""

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from batchinfer.db.tables.base import Base


class UsageRow(Base):
    """What the ledger's entries of a UTC day add up to, written in the entries' own transactions.

    ``dimension`` ``all`` has one row a tenant and model, ``job`` one a job (``key`` is its id), ``tag`` one a tag of
    the jobs (``key`` is ``name=value``, as it was when the money was spent). ``tenant_id`` and ``model`` are empty for
    what belongs to no job. ``metered_nanos`` are rows, ``overhead_nanos`` the rest.
    """

    __tablename__ = "usage_days"

    dimension: Mapped[str] = mapped_column(String(4), primary_key=True)
    day: Mapped[str] = mapped_column(String(10), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    num_rows: Mapped[int] = mapped_column(default=0)
    prompt_tokens: Mapped[int] = mapped_column(default=0)
    cached_tokens: Mapped[int] = mapped_column(default=0)
    completion_tokens: Mapped[int] = mapped_column(default=0)
    metered_nanos: Mapped[int] = mapped_column(default=0)
    overhead_nanos: Mapped[int] = mapped_column(default=0)
    list_nanos: Mapped[int] = mapped_column(default=0)
    saved_nanos: Mapped[int] = mapped_column(default=0)
    device_ns: Mapped[int] = mapped_column(default=0)

    __table_args__ = (
        Index("ix_usage_days_key", "dimension", "key", "day"),
        Index("ix_usage_days_tenant_id", "dimension", "tenant_id", "key", "day"),
    )


class DevicePriceRow(Base):
    """What an hour of a kind of device costs from a moment on, in nano-dollars."""

    __tablename__ = "device_prices"

    device: Mapped[str] = mapped_column(primary_key=True)
    valid_from: Mapped[datetime] = mapped_column(primary_key=True)
    nanos_per_hour: Mapped[int]


class BudgetRow(Base):
    """What a tenant may spend in a UTC month, metered. ``month`` is ``2026-11``; empty is every month without its own."""

    __tablename__ = "budgets"

    tenant_id: Mapped[str] = mapped_column(String(40), primary_key=True)
    month: Mapped[str] = mapped_column(String(7), primary_key=True)
    limit_nanos: Mapped[int]
    updated_at: Mapped[datetime]


class ForecastRow(Base):
    """What was expected of a job when it was planned, and how it came out. ``scope`` is equal for jobs that are alike."""

    __tablename__ = "forecasts"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40))
    scope: Mapped[str] = mapped_column(String(64))
    model: Mapped[str]
    predicted: Mapped[dict[str, Any]]
    outcome: Mapped[dict[str, Any] | None]
    finished_at: Mapped[datetime | None]

    __table_args__ = (
        Index("ix_forecasts_scope", "tenant_id", "scope", "finished_at"),
        Index("ix_forecasts_model", "tenant_id", "model", "finished_at"),
    )
