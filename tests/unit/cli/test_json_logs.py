"""Lines as JSON: what they are about, from threads too, and nothing secret."""

import json
import logging
from contextvars import copy_context
from threading import Event, Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.cli.redact import JsonFormatter
from batchinfer.jobs.service import JobService
from batchinfer.jobs.status import Action
from batchinfer.log_context import bound, bound_ids
from batchinfer_workers.heartbeat import LeaseKeeper
from tests.played import make_spec
from tests.processes import Process


def line(message, *args, exc_info=None):
    record = logging.LogRecord("batchinfer.x", logging.WARNING, "x.py", 1, message, args, exc_info)
    return json.loads(JsonFormatter().format(record))


def test_ids_nest_and_end():
    with bound(job="job_1"):
        with bound(shard=3, attempt=7):
            assert {"job": "job_1", "shard": 3, "attempt": 7}.items() <= line("hi").items()
        assert "shard" not in line("hi")
    assert "job" not in line("hi")


def test_a_thread_knows_what_it_was_started_for():
    """The lease keeper's thread writes lines about the attempt that it renews for."""
    seen, done = [], Event()

    def renew():
        seen.append(dict(bound_ids()))
        done.set()
        return Action.CONTINUE

    with bound(job="job_1", attempt=7), LeaseKeeper(renew, seconds=0.01):
        assert done.wait(30)
    assert seen[0] == {"job": "job_1", "attempt": 7}
    thread = Thread(target=copy_context().run, args=(lambda: seen.append(dict(bound_ids())),))
    thread.start()
    thread.join()
    assert seen[-1] == {}


def test_messages_and_tracebacks_lose_their_secrets():
    error = ValueError("postgresql://me:hunter2@db/x")
    found = line("key bi_0123456789ab_%s", "A" * 43, exc_info=(type(error), error, None))
    assert "A" * 43 not in found["message"]
    assert "hunter2" not in found["exception"]
    assert "ValueError" in found["exception"]


@pytest.mark.service
def test_a_workers_lines_name_job_shard_and_attempt(sqlite_url, tmp_path):
    service = JobService.connect(sqlite_url, "memory://")
    pq.write_table(pa.table({"prompt": ["one", "CRASH"]}), tmp_path / "p.parquet")
    spec = make_spec(tmp_path, inputs=(str(tmp_path / "p.parquet"),), model="org/fake", max_attempts=1)
    pq.write_table(pa.table({"prompt": ["one", "CRASH"]}), tmp_path / "p.parquet")
    job, _ = service.submit(spec, base=None)
    service.close()
    with Process("worker", "--log-format", "json", database_url=sqlite_url, tick_seconds="0.2") as worker:
        found = json.loads(worker.wait_for(lambda text: '"attempt": 1' in text))
    assert (found["job"], found["shard"]) == (job.id, 0)
