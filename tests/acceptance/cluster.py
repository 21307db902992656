"""Real worker processes for acceptance tests: started, killed, stopped and continued like on a bad night."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.dataset.verify import verify
from batchinfer.db.session import create_db_engine
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.records import RowCounts
from batchinfer.types import Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.jobs.records import JobRecord

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "import sys; from batchinfer.cli.main import main; main(sys.argv[1:])"]
PATIENCE_SECONDS = 150.0
"""How long a state may take to come about before the test gives up on it."""


class Cluster:
    """Workers on one database and broker, with short leases and the fake engine."""

    def __init__(self, folder: Path, database_url: str, broker_url: str, **settings: Any) -> None:
        self.folder = folder
        self.calls_file = folder / "calls.txt"
        values = {
            "DATABASE_URL": database_url, "BROKER_URL": broker_url, "HOME": folder / "home",
            "ENGINE_FACTORY": "tests.fakes:create_engine", "LEASE_SECONDS": 2.5, "HEARTBEAT_SECONDS": 0.4,
            "TICK_SECONDS": 0.3, "CHECKPOINT_ROWS": 20, "CHECKPOINT_PAUSE_SECONDS": 0, "WINDOW_ROWS": 40, **settings,
        }  # fmt: skip
        self.environment = {
            **os.environ,
            **{f"BATCHINFER_{name}": str(value) for name, value in values.items()},
            # the program of this checkout, whatever is installed
            "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "workers")),
            "CALLS_FILE": str(self.calls_file),
        }
        self._workers: list[subprocess.Popen[bytes]] = []
        self._engine = create_db_engine(database_url)
        self.ledger = Ledger(self._engine, retry_seconds=30)

    def start_worker(self, *command: str) -> subprocess.Popen[bytes]:
        """Start ``batchinfer worker`` (or another command); its log goes to a file in the folder."""
        with (self.folder / f"worker-{len(self._workers)}.log").open("wb") as log:
            worker = subprocess.Popen(
                command or [*COMMAND, "worker"],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._workers.append(worker)
        return worker

    def run_cli(self, *arguments: str) -> str:
        """Run another ``batchinfer`` command to its end; its output."""
        done = subprocess.run(
            [*COMMAND, *arguments], cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait until something is so; its value."""
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while not (found := condition()):
            assert time.monotonic() < give_up_at, f"waited in vain until {what}\n{self.logs()}"
            time.sleep(0.05)
        return found

    def wait_for_rows(self, job_id: str, count: int) -> None:
        self.wait(f"{count} rows are committed", lambda: self.ledger.get_job(job_id).counts.total >= count)

    def wait_until_ended(self, job_id: str) -> JobRecord:
        self.wait(f"{job_id} has ended", lambda: self.ledger.get_job(job_id).state.is_terminal)
        return self.ledger.get_job(job_id)

    def logs(self) -> str:
        """The last lines of each worker's log."""
        tails = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("worker-*.log"))]
        return "\n".join(tails)

    def calls(self) -> Counter[str]:
        """How often the engines ran each prompt."""
        return Counter(self.calls_file.read_text().splitlines())

    def close(self) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGCONT)
                worker.kill()
                worker.wait()
        self._engine.dispose()


def write_prompts(path: Path, prompts: list[str]) -> None:
    pq.write_table(pa.table({"prompt": prompts, "number": range(len(prompts))}), path, row_group_size=500)


def check_books(ledger: Ledger, job: JobRecord) -> None:
    """Verify the files, recount rows, tokens and money from them, and compare with counters, parts and ledger."""
    assert job.output is not None
    assert verify(job.output).problems == ()
    rows = pq.read_table(job.output).to_pylist()
    assert [row["row_index"] for row in rows] == [row["number"] for row in rows] == list(range(job.num_rows or 0))
    assert RowCounts.of(row["status"] for row in rows) == job.counts
    tokens = (
        sum(row["usage"][name] for row in rows) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    assert Usage(*tokens) == job.usage
    parts = [part for shard in ledger.shards(job.id) for part in ledger.parts(shard.id)]
    assert sum(part.num_rows for part in parts) == job.num_rows
    report = ledger.cost_report(job.id)
    nanos = sum(int(row["cost_usd"].scaleb(9)) for row in rows)
    assert nanos == sum(part.metered_nanos for part in parts) == report.rows_nanos == job.metered_nanos
    assert job.cost_nanos == report.total_nanos
    assert not ledger.attempts(job.id, running_only=True)
