"""What is noted of a job while it runs: how far unfinished rows are, and which model they run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import select, update

from batchinfer.db.tables import Attempt, Job
from batchinfer.errors import FencedError
from batchinfer.jobs.ledger_base import LedgerBase
from batchinfer.jobs.status import AttemptState

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection


class Progress(LedgerBase):
    """Notes of running attempts."""

    def note_progress(self, attempt_id: int, path: str) -> None:
        """Say where the tokens of the attempt's unfinished rows are; the file named before is of no more use.

        Raises:
            FencedError: the attempt no longer holds the shard; the file is garbage.
        """

        def work(connection: Connection, _now: datetime) -> None:
            changed = connection.execute(
                update(Attempt)
                .where(Attempt.id == attempt_id, Attempt.state == AttemptState.RUNNING)
                .values(progress_path=path)
            ).rowcount
            if not changed:
                raise FencedError(f"attempt {attempt_id} no longer holds its shard; its progress is not kept")

        self._write(work)

    def last_progress(self, attempt_id: int) -> str | None:
        """Where the attempt before this one, of the same shard and generation, left the tokens of unfinished rows."""

        def work(connection: Connection, _now: datetime) -> str | None:
            mine = select(Attempt.shard_id, Attempt.generation).where(Attempt.id == attempt_id).subquery()
            query = (
                select(Attempt.progress_path)
                .join(mine, (Attempt.shard_id == mine.c.shard_id) & (Attempt.generation == mine.c.generation))
                .where(Attempt.id < attempt_id, Attempt.progress_path.is_not(None))
                .order_by(Attempt.id.desc())
                .limit(1)
            )
            return connection.execute(query).scalar_one_or_none()

        return self._read(work)

    def note_model(self, job_id: str, revision: str) -> bool:
        """Say which revision of its model the job's rows run on: kept of the first, compared with by all others.

        False if it is another one than before; the job then carries a warning.
        """

        def work(connection: Connection, now: datetime) -> bool:
            known = connection.execute(select(Job.model_revision).where(Job.id == job_id)).scalar_one_or_none()
            if known == revision:
                return True
            job = self._lock_job(connection, job_id)
            if job.model_revision is None:
                connection.execute(update(Job).where(Job.id == job_id).values(model_revision=revision))
                return True
            if job.model_revision == revision:
                return True
            warning = f"the model's files changed while the job ran: some rows are answers of revision {revision}"
            if warning not in job.warnings:
                connection.execute(update(Job).where(Job.id == job_id).values(warnings=[*job.warnings, warning]))
                self._tell(connection, job_id, now, "model_changed", before=job.model_revision, after=revision)
            return False

        return self._write(work)
