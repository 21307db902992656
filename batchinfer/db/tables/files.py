"""Tables of uploaded and written files, and of the batches that the OpenAI door made jobs of. No rules live here."""

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from batchinfer.db.tables.base import Base
from batchinfer.db.types import SafeText

HAS_EXPIRY = text("expires_at IS NOT NULL")


class StoredFile(Base):
    """A file that clients name by its id. ``location`` is a path or URI under the server's files root.

    ``job_id`` is the batch whose output or errors it holds.
    """

    __tablename__ = "files"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40))
    filename: Mapped[str] = mapped_column(SafeText)
    purpose: Mapped[str] = mapped_column(String(20))
    num_bytes: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    location: Mapped[str]
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]

    __table_args__ = (
        Index("ix_files_tenant_id", "tenant_id", "id"),
        Index("ix_files_sha256", "tenant_id", "sha256"),
        Index("ix_files_expires_at", "expires_at", sqlite_where=HAS_EXPIRY, postgresql_where=HAS_EXPIRY),
    )


class FileUse(Base):
    """A job that reads a file: while it has not ended, the file stays."""

    __tablename__ = "file_uses"

    file_id: Mapped[str] = mapped_column(String(40), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)


class Batch(Base):
    """What the OpenAI door knows of a job beyond the job: the job holds everything that decides how it runs.

    ``model`` is the name in the request lines, which the server may know under another one. ``faults`` are the lines
    that planning refused.
    """

    __tablename__ = "batches"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40))
    endpoint: Mapped[str] = mapped_column(String(40))
    input_file_id: Mapped[str] = mapped_column(String(40))
    completion_window: Mapped[str] = mapped_column(String(20))
    model: Mapped[str]
    labels: Mapped[dict[str, Any]]
    output_expires_s: Mapped[int | None]
    faults: Mapped[list[Any]] = mapped_column(default=list)

    __table_args__ = (Index("ix_batches_tenant_id", "tenant_id", "job_id"),)
