"""What people and programs see of a worker whose device failed: the command line, REST, the dashboard, the metrics."""

import re
import time
from datetime import UTC, datetime, timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from batchinfer.api.app import create_app
from batchinfer.db.tables import Worker
from batchinfer.errors import DeviceUnhealthyError
from batchinfer.jobs.service import JobService
from batchinfer.settings import Settings
from batchinfer_workers.device_health import DeviceHealth
from tests.played import make_spec, plan
from tests.program import batchinfer

REASON = "the device is not well: NVRM: Xid (PCI:0000:3b:00): 79, pid=<unknown>, GPU has fallen off the bus"


@pytest.fixture
def service(sqlite_url, monkeypatch):
    monkeypatch.setenv("BATCHINFER_DATABASE_URL", sqlite_url)
    made = JobService.connect(sqlite_url, "memory://")
    yield made
    made.close()


@pytest.fixture
def client(service):
    with TestClient(create_app(Settings.load(), service=service), base_url="http://127.0.0.1:8000") as made:
        yield made


class PlayedWorker:
    """Two workers are registered; this one's device fails and comes back, as its node would report."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.now = 0.0
        self.health = DeviceHealth(lambda: None, clock=lambda: self.now)
        for name in ("ill", "well"):
            ledger.register_worker(name, hostname=f"{name}-host", pid=1, nanos_per_hour=0, device="cuda:0")

    def fail(self):
        self.health.note(DeviceUnhealthyError(REASON))
        self.report()

    def recover(self):
        self.now += 3600
        self.health.look()
        end = time.monotonic() + 20
        while self.health.reason is not None:
            assert time.monotonic() < end
            time.sleep(0.002)
        self.report()

    def report(self):
        fault = self.health.fault
        self.ledger.worker_heartbeat("ill", models=[], stats={"busy": 0} | ({"device_fault": fault} if fault else {}))


@pytest.fixture
def worker(service):
    return PlayedWorker(service.ledger)


def states(result):
    """The column STATE of ``batchinfer workers`` by worker."""
    head, *lines = (re.split(r"\s{2,}|\t", line.strip()) for line in result.stdout.splitlines() if line.strip())
    return {line[head.index("WORKER")]: line[head.index("STATE")] for line in lines}


def test_the_command_line_names_the_fault_until_the_device_answers(worker):
    assert states(batchinfer("workers")) == {"ill": "alive", "well": "alive"}
    worker.fail()
    shown = batchinfer("workers")
    assert states(shown) == {"ill": "unhealthy", "well": "alive"}
    assert shown.stderr.splitlines() == [f"ill takes no shards: {REASON}"]
    worker.recover()
    shown = batchinfer("workers")
    assert (states(shown), shown.stderr) == ({"ill": "alive", "well": "alive"}, "")


def test_programs_read_it_from_json_and_rest(worker, client):
    worker.fail()
    rest = {view["id"]: view for view in client.get("/v1/workers").json()["data"]}
    cli = {view["id"]: view for view in batchinfer("workers", "--json").json["data"]}
    for found in (rest, cli):
        assert (found["ill"]["is_alive"], found["ill"]["is_healthy"], found["ill"]["fault"]) == (True, False, REASON)
        assert (found["well"]["is_healthy"], found["well"]["fault"]) == (True, None)
    since = rest["ill"]["stats"]["device_fault"]["since"]
    worker.fail()
    again = {view["id"]: view for view in client.get("/v1/workers").json()["data"]}
    assert again["ill"]["stats"]["device_fault"]["since"] == since, "a second fault of the same illness"
    worker.recover()
    (found,) = [view for view in client.get("/v1/workers").json()["data"] if view["id"] == "ill"]
    assert (found["is_healthy"], found["fault"]) == (True, None)


def test_a_worker_that_fell_silent_is_silent_whatever_it_last_said(worker, service, client):
    worker.fail()
    with service.engine.begin() as connection:
        connection.execute(update(Worker).values(last_seen_at=datetime.now(UTC) - timedelta(minutes=10)))
    shown = batchinfer("workers")
    assert states(shown) == {"ill": "silent", "well": "silent"}
    assert shown.stderr == ""
    (found,) = [view for view in client.get("/v1/workers").json()["data"] if view["id"] == "ill"]
    assert (found["is_alive"], found["is_healthy"]) == (False, False)
    assert badges(client)["ill-host"][0] == ("bad", "silent")


def badges(client):
    """Of the dashboard's page of workers: host -> ((colour, state), text of the whole cell)."""
    page = client.get("/workers").text
    found = {}
    for line in re.findall(r"<tr>\s*<th scope=\"row\">(.*?)</tr>", page, re.DOTALL):
        colour, state, rest = re.search(r'<span class="badge (\w+)">(\w+)</span>(.*?)</td>', line, re.DOTALL).groups()
        found[line.split("<small>")[0]] = (colour, state), rest
    return found


def test_the_dashboard_shows_the_state_in_the_colour_of_trouble_and_the_reason(worker, client):
    assert badges(client) == {"ill-host": (("good", "alive"), ""), "well-host": (("good", "alive"), "")}
    worker.fail()
    (badge, reason), well = (badges(client)[name] for name in ("ill-host", "well-host"))
    assert badge == ("bad", "unhealthy")
    assert "Xid (PCI:0000:3b:00): 79" in reason
    assert reason.count("&lt;unknown&gt;") == 2, "in the text and its title; a driver's words are not markup"
    assert well == (("good", "alive"), "")
    worker.recover()
    assert badges(client)["ill-host"] == (("good", "alive"), "")


def test_metrics_count_it_and_its_lane_has_a_worker_less(worker, service, client, tmp_path):
    job, _ = service.ledger.submit(make_spec(tmp_path))
    plan(service.ledger, job.id)

    def counted():
        lines = client.get("/metrics").text.splitlines()
        return [
            next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(name))
            for name in ("batchinfer_workers ", "batchinfer_workers_unhealthy ", "batchinfer_queue_workers{")
        ]

    assert counted() == ["2.0", "0.0", "2.0"]
    worker.fail()
    assert counted() == ["2.0", "1.0", "1.0"]
    worker.recover()
    assert counted() == ["2.0", "0.0", "2.0"]


def test_a_job_says_that_it_waits_for_devices_only_where_no_other_worker_is_left(worker, service, client, tmp_path):
    job, _ = service.ledger.submit(make_spec(tmp_path))
    plan(service.ledger, job.id)
    worker.fail()
    assert service.get(job.id).waits_for == "the workers that serve it have not come to it yet"
    service.ledger.drop_worker("well")
    why = "the device of each live worker is not well, see `batchinfer workers`"
    assert client.get(f"/v1/jobs/{job.id}").json()["waits_for"] == why
    assert why in batchinfer("status", job.id).stdout


def test_a_job_whose_rows_came_back_tells_of_the_fault(worker, service, client, tmp_path):
    job, _ = service.ledger.submit(make_spec(tmp_path))
    plan(service.ledger, job.id)
    held = service.ledger.lease_shard("ill")
    service.ledger.release(held.attempt_id, 0, device_fault=REASON)
    told = {"shard": held.shard.index, "attempt": held.attempt_id, "worker": "ill", "reason": REASON}
    rest = client.get(f"/v1/jobs/{job.id}/events").json()["data"]
    assert [event["data"] for event in rest if event["kind"] == "device_failed"] == [told]
    (line,) = [line for line in batchinfer("events", job.id).stdout.splitlines() if "device_failed" in line]
    assert REASON[:30] in line
    assert "Xid (PCI:0000:3b:00): 79" in client.get(f"/jobs/{job.id}").text
