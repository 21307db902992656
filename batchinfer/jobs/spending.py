"""What tenants have spent in a month, and whether that is more than they may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import func, select

from batchinfer.db.tables import RUNNING, Attempt, BudgetRow, Job, UsageRow
from batchinfer.jobs.ledger_usage import ALL, month_of
from batchinfer.money import NS_PER_HOUR

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

EVERY_MONTH = ""
"""Stands for each month that has no budget of its own."""


@dataclass(frozen=True, slots=True)
class Overspend:
    """A tenant that has reached its budget for a month (``2026-11``)."""

    month: str
    limit_nanos: int
    spent_nanos: int


def spent_in(connection: Connection, tenant_id: str, month: str) -> int:
    """What a tenant has spent in a UTC month, rows and overhead, in nano-dollars. Reads a row a day and model."""
    row = UsageRow
    query = select(func.coalesce(func.sum(row.metered_nanos + row.overhead_nanos), 0)).where(
        row.dimension == ALL, row.tenant_id == tenant_id, row.key == "", row.day.between(f"{month}-01", f"{month}-31")
    )
    return int(connection.execute(query).scalar_one())


def tenant_overspend(connection: Connection, tenant_id: str, now: datetime) -> Overspend | None:
    """The budget that a tenant has reached this month, or None."""
    month = month_of(now)
    query = select(BudgetRow.limit_nanos).where(
        BudgetRow.tenant_id == tenant_id, BudgetRow.month.in_((month, EVERY_MONTH))
    )
    # a month of its own comes before every month
    limit = connection.execute(query.order_by(BudgetRow.month.desc()).limit(1)).scalar_one_or_none()
    if limit is None or (spent := spent_in(connection, tenant_id, month)) < limit:
        return None
    return Overspend(month, limit, spent)


def tenant_overspend_of_job(connection: Connection, job_id: str, now: datetime) -> Overspend | None:
    """The same for the tenant of a job whose rows are to run; None where they are only to be closed."""
    query = select(Job.tenant_id).where(
        Job.id == job_id, Job.closing.is_(None), Job.deadline_at.is_(None) | (Job.deadline_at > now)
    )
    tenant = connection.execute(query).scalar_one_or_none()
    return None if tenant is None else tenant_overspend(connection, tenant, now)


def in_flight_nanos(connection: Connection, *, job_id: str | None = None, tenant_id: str | None = None) -> int:
    """Device time that running attempts have reported and not committed: what a spent budget may still be exceeded by."""
    unpaid = Attempt.metered_ns - Attempt.device_ns
    query = select(unpaid, Attempt.nanos_per_hour).where(RUNNING, unpaid > 0)
    if job_id is not None:
        query = query.where(Attempt.job_id == job_id)
    if tenant_id is not None:
        query = query.where(Attempt.job_id.in_(select(Job.id).where(Job.tenant_id == tenant_id)))
    return sum(ns * rate // NS_PER_HOUR for ns, rate in connection.execute(query))
