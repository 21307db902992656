"""A bench for whole jobs: an embedded worker, SQLite, and the fake engine in its real child process."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.dataset.verify import verify
from batchinfer.db.session import create_db_engine
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.records import JobRecord, RowCounts
from batchinfer.jobs.spec import JobSpec
from batchinfer.settings import Settings
from batchinfer_workers.embedded import run_embedded

if TYPE_CHECKING:
    from pathlib import Path

FAST = {
    "engine_factory": "tests.fakes:create_engine",
    "usd_per_hour": "3.60",  # 1,000 nano-dollars a fake step
    "lease_seconds": 3,
    "heartbeat_seconds": 0.1,
    "tick_seconds": 0.1,
    "checkpoint_rows": 10,
    "checkpoint_pause_seconds": 0,
    "stall_seconds": 1,
    "window_rows": 64,
    "log_level": "warning",
}


class Bench:
    """Writes inputs, runs jobs, reads what came of them."""

    def __init__(self, folder: Path, database_url: str, calls_file: Path) -> None:
        self.folder = folder
        self.database_url = database_url
        self._calls_file = calls_file
        self._engine = create_db_engine(database_url)
        self.ledger = Ledger(self._engine)

    def close(self) -> None:
        self._engine.dispose()

    def settings(self, **overrides: Any) -> Settings:
        return Settings.load(**{**FAST, "database_url": self.database_url, **overrides})

    def write(self, prompts: list[Any] | pa.Table, name: str = "input.parquet") -> str:
        path = self.folder / name
        table = prompts if isinstance(prompts, pa.Table) else pa.table({"prompt": pa.array(prompts, pa.string())})
        pq.write_table(table, path, row_group_size=16)
        return str(path)

    def submit(self, prompts: list[Any] | pa.Table, **spec: Any) -> str:
        inputs = self.write(prompts, spec.pop("file", "input.parquet"))
        values = {"model": "fake", "output": str(self.folder / "out"), "shard_rows": 25, **spec}
        job, _ = self.ledger.submit(JobSpec(inputs=inputs, **values))
        return job.id

    def run(self, job_id: str, on_progress: Any = None, **settings: Any) -> JobRecord:
        return run_embedded(self.settings(**settings), job_id, on_progress)

    def rows(self, job_id: str) -> list[dict[str, Any]]:
        """Result rows as any reader of the output sees them."""
        output = self.ledger.get_job(job_id).output
        assert output is not None
        return pq.read_table(output).to_pylist()

    def calls(self) -> Counter[str]:
        """How often the engine ran each prompt."""
        return Counter(self._calls_file.read_text().splitlines() if self._calls_file.exists() else [])

    def check(self, job_id: str) -> JobRecord:
        """Each input row has one outcome in the files, and files, counters and ledger say the same."""
        job = self.ledger.get_job(job_id)
        assert job.output is not None
        report = verify(job.output)
        assert report.problems == ()
        rows = self.rows(job_id)
        assert [row["row_index"] for row in rows] == list(range(job.num_rows or 0))
        assert RowCounts.of(row["status"] for row in rows) == job.counts
        cost = self.ledger.cost_report(job_id)
        if job.retry_generation == 0:
            assert sum(int(row["cost_usd"].scaleb(9)) for row in rows) == cost.rows_nanos == job.metered_nanos
        assert job.cost_nanos == cost.total_nanos
        assert not self.ledger.attempts(job_id, running_only=True)
        return job


@pytest.fixture
def bench(tmp_path, sqlite_url, monkeypatch):
    calls_file = tmp_path / "calls.txt"
    monkeypatch.setenv("CALLS_FILE", str(calls_file))
    bench = Bench(tmp_path, sqlite_url, calls_file)
    yield bench
    bench.close()


def prompts(count: int, special: dict[int, str | None] | None = None) -> list[str | None]:
    """``count`` different prompts, with some replaced."""
    return [(special or {}).get(row, f"row {row}") for row in range(count)]
