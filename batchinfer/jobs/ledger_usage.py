"""Usage by day: what each ledger entry adds, in the entry's own transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy.dialects import postgresql, sqlite

from batchinfer.db.tables import UsageRow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from sqlalchemy import Connection, Row

AMOUNTS = (
    "num_rows", "prompt_tokens", "cached_tokens", "completion_tokens",
    "metered_nanos", "overhead_nanos", "list_nanos", "saved_nanos", "device_ns",
)  # fmt: skip
"""Columns that add up."""
KEYS = ("dimension", "day", "tenant_id", "key", "model")
ALL, JOB, TAG = "all", "job", "tag"
"""Dimensions of :class:`~batchinfer.db.tables.UsageRow`."""


def day_of(moment: datetime) -> str:
    """The UTC day that a moment is in, such as ``2026-11-30``."""
    return moment.strftime("%Y-%m-%d")


def month_of(moment: datetime) -> str:
    """The UTC month that a moment is in, such as ``2026-11``."""
    return moment.strftime("%Y-%m")


def count_usage(connection: Connection, job: Row[Any] | None, now: datetime, **amounts: int) -> None:
    """Add amounts of :data:`AMOUNTS` to the day's rows of a job, or of no job.

    Rows are touched in one order, so that two transactions never wait for each other.
    """
    values = [keys | dict.fromkeys(AMOUNTS, 0) | amounts for keys in _rows(job, day_of(now))]
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    statement = dialect.insert(UsageRow)
    added = {name: getattr(UsageRow, name) + statement.excluded[name] for name in AMOUNTS}
    connection.execute(statement.on_conflict_do_update(index_elements=KEYS, set_=added), values)


def _rows(job: Row[Any] | None, day: str) -> Iterator[dict[str, Any]]:
    """Keys of the rows that a job's amounts go to."""
    if job is None:
        yield {"dimension": ALL, "day": day, "tenant_id": "", "key": "", "model": ""}
        return
    keys = {"day": day, "tenant_id": job.tenant_id, "model": job.model}
    yield keys | {"dimension": ALL, "key": ""}
    yield keys | {"dimension": JOB, "key": job.id}
    for tag in sorted(f"{name}={value}" for name, value in job.tags.items()):
        # what PostgreSQL cannot hold, and no one could ask for
        yield keys | {"dimension": TAG, "key": tag.replace("\0", "\ufffd").encode(errors="replace").decode()}
