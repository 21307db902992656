"""Table of key indexes: which finished jobs' results may be reused. No rules live here."""

from datetime import datetime

from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from batchinfer.db.tables.base import Base


class KeyIndexRow(Base):
    """The index of a finished job's rows. ``scope`` is what must be equal for its rows to be comparable."""

    __tablename__ = "key_indexes"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40))
    scope: Mapped[str] = mapped_column(String(64))
    path: Mapped[str]
    num_rows: Mapped[int]
    created_at: Mapped[datetime]

    __table_args__ = (Index("ix_key_indexes_scope", "tenant_id", "scope", "created_at"),)
