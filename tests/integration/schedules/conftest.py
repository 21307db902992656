"""A schedule on a real database, under a clock of our own; jobs are played through the ledger."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.db.session import create_db_engine
from batchinfer.jobs.dispatch import NullDispatcher
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.schedule_firing import Firing
from batchinfer.jobs.schedule_runner import ScheduleRunner
from batchinfer.jobs.schedule_spec import ScheduleSpec
from batchinfer.jobs.schedule_store import ScheduleStore
from batchinfer.jobs.schedules import ScheduleService
from batchinfer.jobs.status import JobState


class Clock:
    """Time that moves when it is told to."""

    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now

    def pass_(self, **span):
        self.now += timedelta(**span)


class Bench:
    """Schedules, tickers and jobs on one database."""

    def __init__(self, url, folder):
        self.url, self.folder = url, folder
        self.engine = create_db_engine(url)
        self.clock = Clock(datetime(2026, 1, 1, 12, 0, tzinfo=UTC))
        self.ledger = Ledger(self.engine, clock=self.clock)
        self.service = self.acting_for(None)

    def acting_for(self, caller):
        service = ScheduleService(self.engine, caller=caller, now=self.clock)
        service.store = ScheduleStore(self.engine, clock=self.clock)
        return service

    def runner(self):
        """A ticker of its own, as each worker has one."""
        return ScheduleRunner(Firing(self.engine, clock=self.clock), self.ledger, NullDispatcher())

    def tick(self):
        self.runner().tick()

    def input(self, day, rows=1):
        """The input of a day."""
        path = self.folder / f"in-{day}.parquet"
        pq.write_table(pa.table({"prompt": [f"row {row} of {day}" for row in range(rows)]}), path)
        return path

    def always_there(self):
        path = self.folder / "in.parquet"
        pq.write_table(pa.table({"prompt": ["x"]}), path)
        return str(path)

    def add(self, name="nightly", **fields):
        job = {
            "inputs": [self.always_there()],
            "output": str(self.folder / "out-{{ logical_date | ts_nodash }}-{{ run_id }}"),
            "model": "org/name",
        }
        job |= fields.pop("job", {})
        values = {"cron": "30 2 * * *", **fields}
        return self.service.add(ScheduleSpec(name=name, job=job, **values), base=self.folder)

    def runs(self, name="nightly", **query):
        """Oldest first."""
        return self.service.runs(name, limit=100, **query).data[::-1]

    def jobs(self):
        """Oldest first."""
        return self.ledger.list_jobs()[::-1]

    def complete(self, job_id):
        """Play an empty job to its end."""
        lease = self.ledger.lease_planning("w", job_id=job_id)
        self.ledger.commit_plan(
            job_id, lease.token, num_rows=0, fingerprint={}, warnings=[], output=lease.job.output, shards=[]
        )
        final = self.ledger.lease_finalizing("w", job_id=job_id)
        assert self.ledger.finish(job_id, final.token, "/m").state is JobState.COMPLETED


@pytest.fixture
def bench(database_url, tmp_path):
    bench = Bench(database_url, tmp_path)
    yield bench
    bench.engine.dispose()
