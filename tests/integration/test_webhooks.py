"""Webhooks, from the transaction that ends a job to a receiver that verifies them with the standard's own library."""

import json
import logging
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network

import pytest
from fastapi.testclient import TestClient
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from batchinfer.api.app import create_app
from batchinfer.cli.redact import redact
from batchinfer.errors import ConflictError, InvalidSpecError, NotFoundError
from batchinfer.jobs.caller import Caller
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.safe_url import UnsafeUrlError
from batchinfer.jobs.schedule_spec import ScheduleSpec
from batchinfer.jobs.schedules import ScheduleService
from batchinfer.jobs.service import JobService
from batchinfer.jobs.webhook_queue import (
    BREAK_AFTER,
    DISABLE_AFTER,
    JITTER,
    KEEP,
    RETRY_SECONDS,
    WebhookQueue,
    retry_seconds,
)
from batchinfer.jobs.webhook_sender import WebhookSender
from batchinfer.jobs.webhooks import MAX_WEBHOOKS, Webhooks
from batchinfer.settings import Settings
from batchinfer_workers.clock import schedule_runner
from tests.played import complete, make_spec, plan
from tests.processes import Process
from tests.program import batchinfer
from tests.receiver import Receiver

pytestmark = pytest.mark.service
HERE = (ip_network("127.0.0.0/8"),)
ME = Caller.operator()
HOUR = 3600


class Clock:
    """Stands still until it is moved."""

    now = datetime.now(UTC)

    def __call__(self):
        return self.now

    def go(self, seconds):
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def service(database_url, clock):
    made = JobService.connect(database_url, "memory://")
    made.ledger = Ledger(made.engine, clock=clock)
    yield made
    made.close()


@pytest.fixture
def hooks(service, clock):
    return Webhooks(service.engine, clock=clock)


@pytest.fixture
def sender(service, clock):
    return WebhookSender(WebhookQueue(service.engine, clock=clock), allowed=HERE)


@pytest.fixture
def receiver():
    with Receiver() as made:
        yield made


def end_a_job(service, folder, **fields):
    folder.mkdir(exist_ok=True)
    job, _ = service.ledger.submit(make_spec(folder, **fields))
    complete(service.ledger, job.id, errored=1)
    return job.id


def test_a_job_that_ends_is_told_once_and_verified_by_the_standard_library(service, hooks, sender, receiver, tmp_path):
    made = hooks.add(ME, receiver.url, allowed=HERE)
    job_id = end_a_job(service, tmp_path, name="nightly ☾", tags={"team": "search"})
    assert receiver.got == []  # nothing is sent inside the transaction
    sender.tick()
    sender.tick()
    [(headers, body)] = receiver.got
    said = Webhook(made.secret).verify(body, headers)
    assert said["type"] == "job.completed"
    assert said["data"] == {
        "object": "job", "id": job_id, "tenant": "default", "name": "nightly ☾", "tags": {"team": "search"},
        "model": "org/name", "state": "completed", "outcome": "partial", "error": None,
        "rows": {"total": 10, "succeeded": 9, "errored": 1, "expired": 0, "cancelled": 0, "skipped": 0, "deduplicated": 0, "filtered": 0},
        "output": service.job(job_id).output,
    }  # fmt: skip
    with pytest.raises(WebhookVerificationError):
        Webhook(made.secret).verify(body.replace("partial", "succeeded"), headers)
    [delivery] = hooks.deliveries(ME, made.id).data
    assert (delivery.state, delivery.attempts, delivery.last_status) == ("delivered", 1, 204)
    assert delivery.message == headers["webhook-id"]


def test_what_is_rolled_back_is_not_told(service, hooks, receiver, tmp_path, monkeypatch):
    """The message is a row of the same transaction: if the state change fails, there is none."""
    made = hooks.add(ME, receiver.url, allowed=HERE)
    job, _ = service.ledger.submit(make_spec(tmp_path))
    monkeypatch.setattr(
        service.ledger, "_set_queue", lambda *_: (_ for _ in ()).throw(RuntimeError("the disk is full"))
    )
    with pytest.raises(RuntimeError):
        service.ledger.fail_job(job.id, "broken", "it broke")
    assert service.job(job.id).state == "validating"
    assert hooks.deliveries(ME, made.id).data == []


def test_each_way_to_end_has_its_event(service, hooks, receiver, sender, tmp_path):
    hooks.add(ME, receiver.url, allowed=HERE)
    wanted = hooks.add(ME, receiver.url, events=["job.failed"], allowed=HERE)
    failed, _ = service.ledger.submit(make_spec(tmp_path))
    service.ledger.fail_job(failed.id, "input_changed", "the input is another")
    cancelled, _ = service.ledger.submit(make_spec(tmp_path))
    service.ledger.cancel(cancelled.id)
    spent, _ = service.ledger.submit(make_spec(tmp_path, budget_usd="0.000001"))
    plan(service.ledger, spent.id)
    service.ledger.add_overhead(spent.id, "load", kind="load", device_ns=5, nanos=5000)
    sender.tick()
    said = [json.loads(body) for _, body in receiver.got]
    assert sorted((one["type"], one["data"]["id"]) for one in said) == sorted(
        [
            ("job.failed", failed.id), ("job.failed", failed.id), ("job.cancelled", cancelled.id),
            ("job.budget_exhausted", spent.id),
        ]
    )  # fmt: skip
    assert {"code": "input_changed", "message": "the input is another"} in [one["data"]["error"] for one in said]
    assert [delivery.event for delivery in hooks.deliveries(ME, wanted.id).data] == ["job.failed"]


def test_a_schedules_run_without_a_job_is_told(service, hooks, receiver, sender, clock, tmp_path):
    hooks.add(ME, receiver.url, allowed=HERE)
    schedules = ScheduleService.of(service)
    job = {"inputs": [str(tmp_path / "nowhere.parquet")], "model": "org/name"}
    schedules.add(ScheduleSpec(name="nightly", cron="0 0 1 1 *", job=job), base=None)
    run = schedules.trigger("nightly")
    runner = schedule_runner(service, Settings.load(), service._dispatcher)
    runner.tick()
    clock.now = datetime.now(UTC)
    sender.tick()
    [(_, body)] = receiver.got
    said = json.loads(body)
    assert (said["type"], said["data"]["id"], said["data"]["schedule"]) == ("schedule.run_failed", run.id, "nightly")


def test_failures_are_retried_later_and_later_under_the_same_id(service, hooks, receiver, sender, clock, tmp_path):
    made = hooks.add(ME, receiver.url, allowed=HERE)
    receiver.statuses = [500, 503]
    end_a_job(service, tmp_path)
    sender.tick()
    sender.tick()
    assert len(receiver.got) == 1  # not before its time
    clock.go(RETRY_SECONDS[0] * (1 + JITTER) + 1)
    receiver.headers = {"Retry-After": str(2 * HOUR)}
    sender.tick()
    receiver.headers = {}
    clock.go(RETRY_SECONDS[1] * (1 + JITTER) + 1)
    sender.tick()
    assert len(receiver.got) == 2  # it asked for two hours
    clock.go(2 * HOUR)
    sender.tick()
    assert len(receiver.got) == 3
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert len({body for _, body in receiver.got}) == 1
    for headers, body in receiver.got:
        Webhook(made.secret).verify(body, headers)
    [delivery] = hooks.deliveries(ME, made.id).data
    assert (delivery.state, delivery.attempts, delivery.next_at) == ("delivered", 3, None)
    assert hooks.get(ME, made.id).failures == 0


def test_waits_follow_the_standards_schedule():
    low = [retry_seconds(n, lambda a, _b: a) for n in range(1, 11)]
    high = [retry_seconds(n, lambda _a, b: b) for n in range(1, 11)]
    assert low == [*[seconds * 0.8 for seconds in RETRY_SECONDS], None]
    assert high == [*[seconds * 1.2 for seconds in RETRY_SECONDS], None]


def test_a_receiver_that_keeps_failing_is_spared(service, hooks, receiver, sender, clock, tmp_path):
    """After five failures one attempt a minute, then fewer; the first success lets everything through."""
    made = hooks.add(ME, receiver.url, allowed=HERE)
    receiver.statuses = [500] * (BREAK_AFTER + 1)
    for number in range(BREAK_AFTER + 4):
        end_a_job(service, tmp_path / str(number))
    sender._send_all(None)  # one thread, so that the order is known
    assert len(receiver.got) == BREAK_AFTER
    view = hooks.get(ME, made.id)
    assert (view.state, view.failures) == ("failing", BREAK_AFTER)
    sender._send_all(None)
    assert len(receiver.got) == BREAK_AFTER
    clock.go(61)
    sender._send_all(None)
    assert len(receiver.got) == BREAK_AFTER + 1  # half open: it tried one
    clock.go(61)
    sender._send_all(None)
    assert len(receiver.got) == BREAK_AFTER + 1  # now the break is two minutes
    clock.go(HOUR)
    sender._send_all(None)
    assert hooks.get(ME, made.id).state == "active"
    assert [delivery.state for delivery in hooks.deliveries(ME, made.id).data] == ["delivered"] * (BREAK_AFTER + 4)


def test_a_receiver_that_is_gone_is_asked_no_more(service, hooks, receiver, sender, clock, tmp_path):
    made = hooks.add(ME, receiver.url, allowed=HERE)
    receiver.statuses = [410]
    end_a_job(service, tmp_path)
    sender.tick()
    assert (hooks.get(ME, made.id).state, hooks.deliveries(ME, made.id).data[0].state) == ("disabled", "failed")
    end_a_job(service, tmp_path)
    clock.go(HOUR)
    sender.tick()
    assert len(receiver.got) == 1
    assert hooks.enable(ME, made.id).state == "active"
    end_a_job(service, tmp_path)
    sender.tick()
    assert len(receiver.got) == 2


def test_days_of_failures_disable(service, hooks, receiver, sender, clock, tmp_path):
    made = hooks.add(ME, receiver.url, allowed=HERE)
    receiver.statuses = [500, 500]
    end_a_job(service, tmp_path)
    sender.tick()
    clock.go(DISABLE_AFTER.total_seconds() + 1)
    sender.tick()
    assert hooks.get(ME, made.id).state == "disabled"


def test_the_last_attempt_gives_up_and_a_redelivery_begins_anew(service, hooks, receiver, sender, clock, tmp_path):
    made = hooks.add(ME, receiver.url, allowed=HERE)
    receiver.statuses = [500] * (len(RETRY_SECONDS) + 1)
    end_a_job(service, tmp_path)
    for _ in range(len(RETRY_SECONDS) + 1):
        hooks.enable(ME, made.id)  # the breaker is not what is looked at here
        sender.tick()
    [delivery] = hooks.deliveries(ME, made.id, state="failed").data
    assert (delivery.attempts, delivery.last_status) == (len(RETRY_SECONDS) + 1, 500)
    hooks.redeliver(ME, made.id, delivery.id)
    assert sender.send_now(delivery.id)
    assert hooks.delivery(ME, made.id, delivery.id).state == "delivered"
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1


def test_several_senders_send_each_message_once(service, hooks, receiver, clock, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    hooks.add(ME, receiver.url, allowed=HERE)
    for number in range(12):
        end_a_job(service, tmp_path / str(number))
    senders = [WebhookSender(WebhookQueue(service.engine, clock=clock), allowed=HERE) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda one: one.tick(), senders))
    ids = [headers["webhook-id"] for headers, _ in receiver.got]
    assert len(ids) == len(set(ids)) == 12


def test_addresses_inside_are_not_asked(service, hooks, receiver, clock, tmp_path):
    """At once where it is added, and again at each attempt: a name may have come to point inside since."""
    for url in (
        receiver.url,
        "http://example.com/",
        "https://169.254.169.254/latest",
        "https://user:pass@example.com/",
    ):
        with pytest.raises(UnsafeUrlError):
            hooks.add(ME, url)
    made = hooks.add(ME, receiver.url, allowed=HERE)
    end_a_job(service, tmp_path)
    WebhookSender(WebhookQueue(service.engine, clock=clock)).tick()
    assert receiver.got == []
    assert "https" in hooks.deliveries(ME, made.id).data[0].last_error


def test_mistakes_are_refused(hooks, receiver):
    with pytest.raises(InvalidSpecError, match="there are job"):
        hooks.add(ME, receiver.url, events=["job.done"], allowed=HERE)
    for _ in range(MAX_WEBHOOKS):
        hooks.add(ME, receiver.url, allowed=HERE)
    with pytest.raises(ConflictError, match="remove one"):
        hooks.add(ME, receiver.url, allowed=HERE)
    with pytest.raises(NotFoundError):
        hooks.get(ME, "wh_none")


def test_old_messages_are_forgotten(service, hooks, receiver, sender, clock, tmp_path):
    made = hooks.add(ME, receiver.url, allowed=HERE)
    end_a_job(service, tmp_path)
    clock.go(KEEP.total_seconds() + 1)
    end_a_job(service, tmp_path)
    assert sender._queue.forget_old() == 1
    assert len(hooks.deliveries(ME, made.id).data) == 1


def test_over_rest_the_secret_is_shown_once(service, receiver, caplog):
    caplog.set_level(logging.DEBUG)
    app = create_app(Settings.load(webhook_networks="127.0.0.0/8"), service=service)
    with TestClient(app, base_url="http://localhost") as client:
        made = client.post("/v1/webhooks", json={"url": receiver.url, "events": ["job.failed"]})
        assert made.status_code == 201
        hook, secret = made.json()["id"], made.json()["secret"]
        tested = client.post(f"/v1/webhooks/{hook}/test").json()
        assert (tested["state"], tested["event"], tested["last_status"]) == ("delivered", "webhook.test", 204)
        again = client.post(f"/v1/webhooks/{hook}/deliveries/{tested['id']}/redeliver").json()
        assert (again["state"], again["message"]) == ("delivered", tested["message"])
        for headers, body in receiver.got:
            Webhook(secret).verify(body, headers)
        for path in ("/v1/webhooks", f"/v1/webhooks/{hook}", f"/v1/webhooks/{hook}/deliveries"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert secret not in answer.text
        assert secret not in client.delete(f"/v1/webhooks/{hook}").text
        assert client.get(f"/v1/webhooks/{hook}").status_code == 404
    assert secret not in caplog.text
    assert secret not in redact(f"oh: {secret}")


def test_a_worker_sends_them(database_url, receiver, tmp_path, monkeypatch):
    """The program as it is: the command adds a webhook, a worker sends, the command shows what came of it."""
    settings = {"database_url": database_url, "webhook_networks": "127.0.0.0/8", "tick_seconds": "0.2"}
    for name, value in settings.items():
        monkeypatch.setenv(f"BATCHINFER_{name}".upper(), value)
    made = batchinfer("webhooks", "add", receiver.url, "--event", "job.cancelled", "--json").json
    assert made["secret"] not in batchinfer("webhooks", "ls", "--json").stdout
    assert batchinfer("webhooks", "test", made["id"], "--json").json["state"] == "delivered"
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    service = JobService.connect(database_url, "memory://")
    service.cancel(service.submit(make_spec(tmp_path), base=None)[0].id)
    service.close()
    with Process("worker", "--ticker-only", **settings):
        receiver.wait_for(2)
    assert [Webhook(made["secret"]).verify(body, headers)["type"] for headers, body in receiver.got] == [
        "webhook.test",
        "job.cancelled",
    ]
    receiver.statuses = [500]
    assert "status 500" in batchinfer("webhooks", "test", made["id"], exit_code=1).stdout
    listed = batchinfer("webhooks", "deliveries", made["id"], "--json").json["data"]
    assert [one["event"] for one in listed] == ["webhook.test", "job.cancelled", "webhook.test"]
    assert batchinfer("webhooks", "rm", made["id"]).stdout == f"{made['id']} is removed\n"
