"""Tables of tenants and of the API keys that act for them. No rules live here."""

from datetime import datetime
from typing import Any

from sqlalchemy import Double, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from batchinfer.db.tables.base import Base
from batchinfer.db.types import SafeText


class TenantRow(Base):
    """A tenant. The tenant ``default`` exists without a row.

    Roots are folders or URIs below which the tenant's inputs and outputs must lie; ``weight`` is its share of the workers.
    """

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str | None] = mapped_column(SafeText)
    input_roots: Mapped[list[Any]] = mapped_column(default=list)
    output_roots: Mapped[list[Any]] = mapped_column(default=list)
    weight: Mapped[float] = mapped_column(Double, default=1.0, server_default="1")
    created_at: Mapped[datetime]
    disabled_at: Mapped[datetime | None]


class TenantService(Base):
    """How much a tenant has been served: ``usage`` is a logarithm that ages, see :mod:`batchinfer.jobs.lease_order`.

    ``fair_key`` is the highest of the tenant's shards that were leased.
    """

    __tablename__ = "tenant_service"

    tenant_id: Mapped[str] = mapped_column(String(40), primary_key=True)
    usage: Mapped[float | None] = mapped_column(Double)
    fair_key: Mapped[int] = mapped_column(default=0, server_default="0")


class ApiKeyRow(Base):
    """An API key: its public id, and the digest of its secret. ``tenant_id`` NULL: a key of the whole platform."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(String(40))
    name: Mapped[str | None] = mapped_column(SafeText)
    secret_sha256: Mapped[str] = mapped_column(String(64))
    role: Mapped[str] = mapped_column(String(20))
    scopes: Mapped[list[Any]] = mapped_column(default=list)
    rate_per_minute: Mapped[int | None]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    replaced_by: Mapped[str | None] = mapped_column(String(16))

    __table_args__ = (Index("ix_api_keys_tenant_id", "tenant_id", "created_at"),)
