"""The sentinel: which rows it compares, what it keeps, how loudly it warns, what it costs."""

from ipaddress import ip_network

import pytest
from standardwebhooks.webhooks import Webhook

from batchinfer.cli.jobs import print_status
from batchinfer.jobs.caller import Caller
from batchinfer.jobs.drift import Drift
from batchinfer.jobs.present import job_view
from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.speed import Speed
from batchinfer.jobs.status import JobState
from batchinfer.jobs.webhook_queue import WebhookQueue
from batchinfer.jobs.webhook_sender import WebhookSender
from batchinfer.jobs.webhooks import Webhooks
from batchinfer_workers.sentinel import is_chosen
from tests.receiver import Receiver

REFERENCE = {"reference_factory": "tests.fakes:create_reference"}
NOTHING = Speed(None, None, None)


def view_of(job):
    return job_view(job, NOTHING)


@pytest.mark.parametrize("share", [0.005, 0.25, 1.0])
def test_the_share_is_kept_and_the_same_rows_are_always_chosen(share):
    chosen = [row for row in range(40_000) if is_chosen(row, share)]
    assert len(chosen) == pytest.approx(40_000 * share, rel=0.15)
    assert chosen == [row for row in range(40_000) if is_chosen(row, share)]
    assert set(chosen) <= {row for row in range(40_000) if is_chosen(row, min(1.0, share * 2))}


@pytest.mark.parametrize(("given", "share"), [("0.5%", 0.005), ("25 %", 0.25), (0.1, 0.1), ("0.02", 0.02), ("100%", 1)])
def test_a_share_is_written_in_percent_or_as_a_fraction(given, share):
    assert JobSpec(inputs="a", model="m", sentinel=given).sentinel == pytest.approx(share)


@pytest.mark.parametrize("given", ["101%", "-1%", 1.5, "some", "x%"])
def test_another_share_is_refused(given):
    with pytest.raises(ValueError, match="sentinel"):
        JobSpec(inputs="a", model="m", sentinel=given)


def test_drift_is_summed_over_shards_and_booked_as_overhead(bench):
    """Thirty rows in three shards, two without an answer; the ledger sums to the nano-dollar."""
    rows = [f"one two {row}" for row in range(28)] + ["", "ERROR x"]
    job_id = bench.submit(rows, shard_rows=10, sentinel="100%")
    assert bench.run(job_id, **REFERENCE).state is JobState.COMPLETED
    job = bench.check(job_id)
    drift = view_of(job).drift
    assert (drift.rows_compared, drift.tokens_compared) == (28, 84)
    assert (drift.kl_mean, drift.kl_max, drift.agreement) == (pytest.approx(0.01), 0.01, 1)
    assert not drift.is_above
    assert not any(warning.startswith("DRIFT") for warning in job.warnings)
    cost = bench.ledger.cost_report(job_id)
    sentinel = cost.overhead_nanos["sentinel"]
    assert sentinel >= 28 * 1000, "each comparison is a fake step of 1,000 nano-dollars, and loading comes on top"
    assert cost.total_nanos == cost.rows_nanos + sum(cost.overhead_nanos.values()) == job.cost_nanos


def test_drift_above_the_threshold_is_said_loudly_and_once(bench, capsys):
    rows = [f"DRIFT {row}" for row in range(20)]
    job_id = bench.submit(rows, shard_rows=5, sentinel=1, sentinel_threshold=0.2)
    bench.run(job_id, **REFERENCE)
    job = bench.ledger.get_job(job_id)
    (warning,) = job.warnings
    assert warning.startswith("DRIFT: a mean divergence of 0.5050 nats")
    (event,) = [event for event in bench.ledger.events(job_id) if event.kind == "drift"]
    assert event.data["threshold"] == 0.2
    view = view_of(job)
    assert view.drift.is_above
    assert {place["row_index"] for place in view.drift.differences} == set(range(20))
    print_status(view)
    assert "ABOVE THE THRESHOLD" in capsys.readouterr().out


def test_webhooks_are_told_of_drift_once_a_job(bench):
    """With what the event of the job says; a webhook that wants other events hears nothing."""
    with Receiver() as receiver:
        networks = [ip_network("127.0.0.0/8")]
        hooks = Webhooks(bench.ledger.engine)
        wants = hooks.add(Caller.operator(), receiver.url, events=["job.drift"], allowed=networks)
        other = hooks.add(Caller.operator(), receiver.url, events=["job.failed"], allowed=networks)
        job_id = bench.submit([f"DRIFT {row}" for row in range(20)], shard_rows=5, sentinel=1, sentinel_threshold=0.2)
        bench.run(job_id, **REFERENCE, webhook_networks="127.0.0.0/8")
        # the worker may have ended before it sent
        WebhookSender(WebhookQueue(bench.ledger.engine), allowed=networks).tick()
        receiver.wait_for(1)
        ((headers, body),) = receiver.got
    said = Webhook(wants.secret).verify(body, headers)
    (event,) = [event for event in bench.ledger.events(job_id) if event.kind == "drift"]
    assert (said["type"], said["data"]["id"], said["data"]["drift"]) == ("job.drift", job_id, event.data)
    assert hooks.deliveries(Caller.operator(), other.id).data == []


def test_without_it_nothing_is_compared(bench):
    job_id = bench.submit(["a b"])
    job = bench.run(job_id, reference_factory="tests.fakes:no_such_factory")
    assert (job.state, view_of(job).drift) == (JobState.COMPLETED, None)


def test_trouble_with_the_reference_is_a_warning(bench):
    """The job's answers are there all the same."""
    job_id = bench.submit(["a b"], model="unreadable", sentinel=1)
    job = bench.run(job_id, **REFERENCE)
    assert (job.state, job.counts.succeeded) == (JobState.COMPLETED, 1)
    assert "the reference cannot be read" in job.warnings[0]


def test_sums_do_not_depend_on_how_rows_were_spread():
    """Rows one by one, or in two parts that were stored in between."""
    found = {
        "tokens": 3, "same": 2, "kl_sum": 0.5, "kl_max": 0.4, "loss": 6.0, "reference_loss": 5.0,
        "kl_counts": {"10": 2, "430": 1}, "differences": [{"position": 1, "kl": 0.4}],
    }  # fmt: skip
    whole, parts = Drift(), Drift()
    for row in range(30):
        whole.add_row(row, found)
    for start in (0, 15):
        part = Drift()
        for row in range(start, start + 15):
            part.add_row(row, found)
        parts = Drift.from_dict(parts.to_dict())
        parts.add(part)
    assert parts.figures() == whole.figures()
    assert whole.num_rows == 30
    assert len(whole.figures()["differences"]) == 20
