"""Status polls against one ``batchinfer serve`` process, while jobs of its database go on.

    python -m benchmarks.api [--clients 50] [--rate 1000] [--seconds 10] [--conditional] [--json]

Starts a server on a database of its own (SQLite unless ``--database-url`` names an empty, migrated PostgreSQL), fills it
with jobs, commits parts of them all the time as workers do, and lets clients poll ``GET /v1/jobs/{id}`` over connections
that stay open. With a ``--rate`` polls are due at fixed times and latency counts from then, so that a server that lags
is not spared; without one (0) each client asks again at once. CPU time is the server's alone, read before and after.
Clients and committing workers are processes of their own, but share the machine with the server: the rate is a lower
bound of what it does alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
import uvloop

from batchinfer.jobs.leases import PartCommit, ShardPlan
from batchinfer.jobs.records import RowCounts
from batchinfer.jobs.service import JobService
from batchinfer.jobs.spec import JobSpec
from batchinfer.types import Usage
from benchmarks.machine import machine
from benchmarks.poll_client import PollClient, Polls

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized
    from multiprocessing.synchronize import Event

WORKER = "benchmark"
COMMITS_A_SECOND = 20
"""Parts committed a second while clients poll: what a few busy workers do."""
ROWS_A_SHARD = 1_000_000
WARM_SECONDS = 1.0
"""Polls before those that count: statements are compiled, threads started, answers kept."""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a run."""

    clients: int
    asked_rate: float
    jobs: int
    conditional: bool
    database: str
    requests: int
    seconds: float
    rate: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    server_cpu_ms_per_request: float
    server_cpu_share: float
    """Cores that the server kept busy."""
    clients_cpu_ms_per_request: float
    """What is to be taken off the machine's cores before they can be said to be the server's."""
    bytes_per_answer: float
    statuses: dict[int, int]
    commits: int
    """Parts that workers committed in that time."""


class Server:
    """``batchinfer serve`` as a process; a context manager that gives its port."""

    def __init__(self, database_url: str, home: Path) -> None:
        program = [sys.executable, "-c", "from batchinfer.cli.main import main; main()"]
        environment = os.environ | {"BATCHINFER_DATABASE_URL": database_url, "BATCHINFER_HOME": str(home)}
        # a file: reading a line a request would cost the clients more than their polls do
        self._log = home / "serve.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen([*program, "serve", "--port", "0"], env=environment, stderr=log)

    def __enter__(self) -> int:
        while self.process.poll() is None:
            head, is_there, _ = self._log.read_text().partition("/v1/jobs, documentation")
            if is_there:
                return int(head.rpartition(":")[2])
            time.sleep(0.05)
        raise RuntimeError(f"the server ended before it served: {self._log.read_text()[-2000:]}")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def cpu_seconds(self) -> float:
        """CPU time that it has used."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)


class Workers:
    """A process that leases shards and commits parts, as running workers do; a context manager."""

    def __init__(self, database_url: str, num_jobs: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._commits, self._stopping = spawn.Value("i", -1), spawn.Event()
        arguments = (database_url, num_jobs, self._commits, self._stopping)
        self._process = spawn.Process(target=_work, args=arguments, daemon=True)

    @property
    def commits(self) -> int:
        """Parts committed so far; -1 before it has its leases."""
        return int(self._commits.value)

    def __enter__(self) -> Self:
        self._process.start()
        while self.commits < 0 and self._process.is_alive():
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._process.join()

    def check(self) -> None:
        """Refuse to report of jobs that stood still. Raises RuntimeError."""
        if not self._process.is_alive():
            raise RuntimeError("the process that commits parts has ended; its error is above")


def _work(database_url: str, num_jobs: int, commits: Synchronized[int], stopping: Event) -> None:
    service = JobService.connect(database_url, "memory://")
    ledger = service.ledger
    leases = [lease for _ in range(num_jobs) if (lease := ledger.lease_shard(WORKER, lease_seconds=3600)) is not None]
    commits.value = 0
    while not stopping.wait(1 / COMMITS_A_SECOND):
        lease = leases[commits.value % len(leases)]
        part = PartCommit(
            path=f"/part-{commits.value}", num_rows=10, counts=RowCounts(succeeded=10), usage=Usage(900, 100, 200),
            device_ns=10**7,
        )  # fmt: skip
        ledger.commit_part(lease.attempt_id, part)
        commits.value += 1
    service.close()


def fill(service: JobService, folder: Path, num_jobs: int) -> list[str]:
    """Jobs that run; their ids. A tenth of them go on while clients poll."""
    path = folder / "prompts.parquet"
    path.write_bytes(b"PAR1")
    ids = []
    service.ledger.register_worker(WORKER, hostname="h", pid=1, nanos_per_hour=1)
    for number in range(num_jobs):
        spec = JobSpec(inputs=(str(path),), model="org/name", output=f"/out/{number}", name=f"job {number}")
        job, _ = service.ledger.submit(spec)
        lease = service.ledger.lease_planning(WORKER)
        assert lease is not None
        shards = [ShardPlan(0, 0, ROWS_A_SHARD, est_tokens=ROWS_A_SHARD)]
        service.ledger.commit_plan(
            job.id, lease.token, num_rows=ROWS_A_SHARD, fingerprint={}, warnings=[], output=f"/out/{number}",
            shards=shards,
        )  # fmt: skip
        ids.append(job.id)
    return ids


async def _poll_all(port: int, job_ids: list[str], seconds: float, options: argparse.Namespace) -> Polls:
    polls = Polls()
    period = options.clients / options.rate if options.rate else 0.0
    clients = []
    for number in range(options.clients):
        mine = job_ids[number % len(job_ids) :: options.clients] or job_ids
        client = PollClient(mine, polls, period=period, is_conditional=options.conditional)
        await asyncio.get_running_loop().create_connection(lambda client=client: client, "127.0.0.1", port)
        clients.append(client)
    started = time.perf_counter()
    for number, client in enumerate(clients):
        # due times lie evenly between each other, as those of strangers do
        client.start(started + number * period / options.clients, started + seconds)
    await asyncio.gather(*(client.done for client in clients))
    return polls


def measure(options: argparse.Namespace) -> Report:
    """One run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = options.database_url or f"sqlite:///{folder / 'b.db'}"
        service = JobService.connect(url, "memory://")
        job_ids = fill(service, folder, options.jobs)
        service.close()
        server = Server(url, folder)
        with server as port, Workers(url, max(1, options.jobs // 10)) as workers:
            uvloop.run(_poll_all(port, job_ids, WARM_SECONDS, options))
            cpu, own, commits, started = server.cpu_seconds(), time.process_time(), workers.commits, time.perf_counter()
            polls = uvloop.run(_poll_all(port, job_ids, options.seconds, options))
            seconds, cpu, own = time.perf_counter() - started, server.cpu_seconds() - cpu, time.process_time() - own
            commits = workers.commits - commits
            workers.check()
    times = sorted(polls.milliseconds)
    number = len(times)
    return Report(
        clients=options.clients, asked_rate=options.rate, jobs=options.jobs, conditional=options.conditional,
        database=url.partition(":")[0], requests=number, seconds=round(seconds, 2), rate=round(number / seconds, 1),
        p50_ms=round(times[number // 2], 2), p95_ms=round(times[number * 95 // 100], 2),
        p99_ms=round(times[number * 99 // 100], 2), max_ms=round(times[-1], 2),
        server_cpu_ms_per_request=round(cpu * 1e3 / number, 3), server_cpu_share=round(cpu / seconds, 2),
        clients_cpu_ms_per_request=round(own * 1e3 / number, 3), bytes_per_answer=round(polls.num_bytes / number, 1), statuses=polls.statuses, commits=commits,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.api", description="Status polls against one server process.")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument(
        "--rate", type=float, default=1000.0, help="polls a second of all clients; 0: as fast as it goes"
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--conditional", action="store_true", help="send If-None-Match, as a polite client does")
    parser.add_argument("--database-url", help="an empty, migrated PostgreSQL; default: SQLite in a temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if min(options.clients, options.jobs) < 1 or options.seconds <= 0 or options.rate < 0:
        parser.error("--clients and --jobs begin at 1, --seconds above 0, --rate at 0")
    report = asdict(measure(options))
    if options.json:
        print(json.dumps({"machine": machine(), "report": report}))
        return
    for name, value in report.items():
        print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
