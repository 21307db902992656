"""Money: overhead, and a job's sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import func, select

from batchinfer.db.tables import LedgerEntry
from batchinfer.jobs.ledger_base import LedgerBase
from batchinfer.jobs.ledger_rows import usage
from batchinfer.jobs.records import CostReport

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

ROWS = "rows"
"""Kind of the entries that rows pay; all other kinds are overhead."""


class Costs(LedgerBase):
    """The append-only ledger of money: each entry has a unique source, so nothing is booked twice."""

    def add_overhead(
        self, job_id: str | None, source_id: str, *, kind: str, device_ns: int, nanos: int, worker_id: str | None = None
    ) -> bool:
        """Book device time that no row caused (``load``, ``idle``, ``lost``); False if the source is booked already.

        Raises:
            NotFoundError: no such job.
        """

        def work(connection: Connection, now: datetime) -> bool:
            if job_id is not None:
                self._lock_job(connection, job_id)
            return self._charge_overhead(
                connection, job_id, now,
                source_id=source_id, kind=kind, device_ns=device_ns, nanos=nanos, worker_id=worker_id,
            )  # fmt: skip

        return self._write(work)

    def cost_report(self, job_id: str) -> CostReport:
        """Sums over the job's ledger entries. Raises NotFoundError."""

        def work(connection: Connection, _now: datetime) -> CostReport:
            job = self._find_job(connection, job_id)
            entry = LedgerEntry
            sums = select(
                entry.kind, func.sum(entry.nanos), func.sum(entry.list_nanos), func.sum(entry.device_ns)
            ).where(entry.job_id == job_id)
            # sums of 64-bit integers are decimals on PostgreSQL
            kinds = {
                kind: (int(n), int(ls), int(ns)) for kind, n, ls, ns in connection.execute(sums.group_by(entry.kind))
            }
            return CostReport(
                rows_nanos=kinds.get(ROWS, (0, 0, 0))[0],
                overhead_nanos={kind: nanos for kind, (nanos, _, _) in sorted(kinds.items()) if kind != ROWS},
                list_nanos=sum(listed for _, listed, _ in kinds.values()),
                device_ns=sum(device_ns for _, _, device_ns in kinds.values()),
                usage=usage(job),
            )

        return self._read(work)
