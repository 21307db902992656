"""Budgets: what a tenant may spend in a month, over all of its jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import delete, insert, select

from batchinfer.db.tables import BudgetRow, Job
from batchinfer.errors import InvalidSpecError, NotFoundError
from batchinfer.jobs.ledger_base import LedgerBase
from batchinfer.jobs.ledger_usage import month_of
from batchinfer.jobs.spending import EVERY_MONTH, in_flight_nanos, spent_in
from batchinfer.jobs.status import JobState

if TYPE_CHECKING:
    from datetime import datetime
    from typing import Any

    from sqlalchemy import Connection, Row

_MONTH = re.compile(r"2\d{3}-(0[1-9]|1[0-2])")
MAX_HELD = 100
"""Most ids of held jobs that a budget names."""


@dataclass(frozen=True, slots=True)
class BudgetRecord:
    """A tenant's budget and how it stands. Money in nano-dollars."""

    tenant_id: str
    month: str | None
    """``2026-11``; None is every month that has no budget of its own."""
    limit_nanos: int
    spent_month: str
    """The month that the figures below are of."""
    spent_nanos: int
    in_flight_nanos: int
    """Reported by running attempts and not booked yet."""
    held_jobs: tuple[str, ...]
    """Jobs of the tenant that wait in ``budget_exhausted``, at most :data:`MAX_HELD`."""


class Budgets(LedgerBase):
    """Set, list and remove budgets. A job's own budget is part of the job, see ``change``."""

    def set_budget(self, tenant_id: str, limit_nanos: int, month: str | None = None) -> BudgetRecord:
        """Set what a tenant may spend in a month (None: in every month without its own). Raises InvalidSpecError."""
        key = _month_key(month)

        def work(connection: Connection, now: datetime) -> BudgetRecord:
            mine = (BudgetRow.tenant_id == tenant_id) & (BudgetRow.month == key)
            connection.execute(delete(BudgetRow).where(mine))
            values = {"tenant_id": tenant_id, "month": key, "limit_nanos": limit_nanos, "updated_at": now}
            connection.execute(insert(BudgetRow).values(values))
            return _record(connection, connection.execute(select(BudgetRow).where(mine)).one(), now)

        return self._write(work)

    def remove_budget(self, tenant_id: str, month: str | None = None) -> None:
        """Take a budget away. Raises NotFoundError."""
        key = _month_key(month)

        def work(connection: Connection, _now: datetime) -> None:
            mine = (BudgetRow.tenant_id == tenant_id) & (BudgetRow.month == key)
            if not connection.execute(delete(BudgetRow).where(mine)).rowcount:
                raise NotFoundError(
                    f"tenant {tenant_id} has no budget for {month or 'every month'}; `batchinfer budget ls` lists them",
                    param="tenant",
                )

        self._write(work)

    def list_budgets(self, tenant_id: str | None = None, *, limit: int = 1000) -> list[BudgetRecord]:
        """Budgets of a tenant or of all, by tenant and month."""

        def work(connection: Connection, now: datetime) -> list[BudgetRecord]:
            query = select(BudgetRow).order_by(BudgetRow.tenant_id, BudgetRow.month).limit(limit)
            if tenant_id is not None:
                query = query.where(BudgetRow.tenant_id == tenant_id)
            return [_record(connection, row, now) for row in connection.execute(query).all()]

        return self._read(work)

    def in_flight_nanos(self, job_id: str) -> int:
        """What a job's running attempts have used and not committed, in nano-dollars."""
        return self._read(lambda connection, _now: in_flight_nanos(connection, job_id=job_id))


def _month_key(month: str | None) -> str:
    if month is None:
        return EVERY_MONTH
    if not _MONTH.fullmatch(month):
        raise InvalidSpecError(f"month {month!r} is not YYYY-MM, such as 2026-11", param="month")
    return month


def _record(connection: Connection, row: Row[Any], now: datetime) -> BudgetRecord:
    month = row.month or month_of(now)
    is_now = month == month_of(now)
    held = select(Job.id).where(Job.tenant_id == row.tenant_id, Job.state == JobState.BUDGET_EXHAUSTED)
    return BudgetRecord(
        tenant_id=row.tenant_id,
        month=row.month or None,
        limit_nanos=row.limit_nanos,
        spent_month=month,
        spent_nanos=spent_in(connection, row.tenant_id, month),
        in_flight_nanos=in_flight_nanos(connection, tenant_id=row.tenant_id) if is_now else 0,
        held_jobs=tuple(connection.execute(held.order_by(Job.id).limit(MAX_HELD)).scalars()) if is_now else (),
    )
