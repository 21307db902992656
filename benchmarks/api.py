"""Status polls against one ``batchinfer serve`` process, while jobs of its database go on.

    python -m benchmarks.api [--clients 50] [--rate 1000] [--seconds 10] [--conditional] [--json]

Starts a server on a database of its own (SQLite unless ``--database-url`` names an empty, migrated PostgreSQL), fills it
with jobs, commits parts of them all the time as workers do, and lets clients poll ``GET /v1/jobs/{id}`` over connections
that stay open. With a ``--rate`` polls are due at fixed times and latency counts from then, so that a server that lags
is not spared; without one (0) each client asks again at once. CPU time is the server's alone, read before and after.
Clients and writer share the machine with the server: the rate is a lower bound of what it does alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

from batchinfer.jobs.leases import PartCommit, ShardPlan
from batchinfer.jobs.records import RowCounts
from batchinfer.jobs.service import JobService
from batchinfer.jobs.spec import JobSpec
from batchinfer.types import Usage
from benchmarks.machine import machine

if TYPE_CHECKING:
    from batchinfer.jobs.leases import Lease

WORKER = "benchmark"
COMMITS_A_SECOND = 20
"""Parts committed a second while clients poll: what a few busy workers do."""
ROWS_A_SHARD = 1_000_000


@dataclass(slots=True)
class Polls:
    """What clients saw."""

    milliseconds: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    num_bytes: int = 0


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
    bytes_per_answer: float
    statuses: dict[int, int]
    commits: int


class Server:
    """``batchinfer serve`` as a process; a context manager."""

    def __init__(self, database_url: str, home: Path) -> None:
        program = [sys.executable, "-c", "from batchinfer.cli.main import main; main()"]
        environment = os.environ | {"BATCHINFER_DATABASE_URL": database_url, "BATCHINFER_HOME": str(home)}
        self.process = subprocess.Popen(
            [*program, "serve", "--port", "0"], env=environment, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> int:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "batchinfer serves http" in line:
                # whoever does not read what a process says stops it in the end
                threading.Thread(target=self.process.stderr.read, daemon=True).start()
                return int(line.split("/v1")[0].rpartition(":")[2])
        raise RuntimeError("the server ended before it served; run `batchinfer serve` to see why")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def cpu_seconds(self) -> float:
        """CPU time that it has used."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)


class Workers:
    """Leases shards and commits parts in a thread, as running workers do; a context manager."""

    def __init__(self, service: JobService, num_jobs: int) -> None:
        self._ledger = service.ledger
        self._leases = [lease for _ in range(num_jobs) if (lease := self._lease()) is not None]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._commit)
        self.commits = 0

    def _lease(self) -> Lease | None:
        return self._ledger.lease_shard(WORKER, lease_seconds=3600)

    def _commit(self) -> None:
        while not self._stopping.wait(1 / COMMITS_A_SECOND):
            lease = self._leases[self.commits % len(self._leases)]
            part = PartCommit(
                path=f"/part-{self.commits}", num_rows=10, counts=RowCounts(succeeded=10), usage=Usage(900, 100, 200),
                device_ns=10**7,
            )  # fmt: skip
            self._ledger.commit_part(lease.attempt_id, part)
            self.commits += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()


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


async def _answer(reader: asyncio.StreamReader) -> tuple[int, str | None, int]:
    """Status, ETag and size of the body of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    status = int(lines[0].split()[1])
    length = int(headers.get("content-length", 0))
    if length:
        await reader.readexactly(length)
    return status, headers.get("etag"), length


async def poll(  # noqa: PLR0917 -- one client's share of the arguments
    port: int, job_ids: list[str], polls: Polls, end: float, period: float, is_conditional: bool
) -> None:
    """One client: its jobs in turn, over one connection, until the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    tags: dict[str, str] = {}
    due, number = time.perf_counter(), 0
    while due < end:
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        job_id = job_ids[number % len(job_ids)]
        condition = f"If-None-Match: {tags[job_id]}\r\n" if is_conditional and job_id in tags else ""
        writer.write(f"GET /v1/jobs/{job_id} HTTP/1.1\r\nHost: localhost\r\n{condition}\r\n".encode())
        status, tag, size = await _answer(reader)
        polls.milliseconds.append((time.perf_counter() - due) * 1e3)
        polls.statuses[status] = polls.statuses.get(status, 0) + 1
        polls.num_bytes += size
        if tag is not None:
            tags[job_id] = tag
        number += 1
        due = due + period if period else time.perf_counter()
    writer.close()
    await writer.wait_closed()


async def _poll_all(port: int, job_ids: list[str], seconds: float, options: argparse.Namespace) -> Polls:
    polls = Polls()
    period = options.clients / options.rate if options.rate else 0.0
    end = time.perf_counter() + seconds
    clients = []
    for client in range(options.clients):
        mine = job_ids[client % len(job_ids) :: options.clients] or job_ids
        clients.append(asyncio.create_task(poll(port, mine, polls, end, period, options.conditional)))
        # due times lie evenly between each other, as those of strangers do
        await asyncio.sleep(period / options.clients)
    await asyncio.gather(*clients)
    return polls


def measure(options: argparse.Namespace) -> Report:
    """One run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = options.database_url or f"sqlite:///{folder / 'b.db'}"
        service = JobService.connect(url, "memory://")
        job_ids = fill(service, folder, options.jobs)
        server = Server(url, folder)
        with server as port, Workers(service, max(1, options.jobs // 10)) as workers:
            asyncio.run(_poll_all(port, job_ids, 1.0, options))  # compiles statements, opens connections
            cpu, started = server.cpu_seconds(), time.perf_counter()
            polls = asyncio.run(_poll_all(port, job_ids, options.seconds, options))
            seconds, cpu = time.perf_counter() - started, server.cpu_seconds() - cpu
        service.close()
    times = sorted(polls.milliseconds)
    number = len(times)
    return Report(
        clients=options.clients, asked_rate=options.rate, jobs=options.jobs, conditional=options.conditional,
        database=url.partition(":")[0], requests=number, seconds=round(seconds, 2), rate=round(number / seconds, 1),
        p50_ms=round(times[number // 2], 2), p95_ms=round(times[number * 95 // 100], 2),
        p99_ms=round(times[number * 99 // 100], 2), max_ms=round(times[-1], 2),
        server_cpu_ms_per_request=round(cpu * 1e3 / number, 3), server_cpu_share=round(cpu / seconds, 2),
        bytes_per_answer=round(polls.num_bytes / number, 1), statuses=polls.statuses, commits=workers.commits,
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
