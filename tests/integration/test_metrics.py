"""What Prometheus gets, parsed by its own library; board, alerts and page name only what there is."""

import json
import re
import urllib.request
from pathlib import Path

import pytest
import yaml
from fastapi.testclient import TestClient
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from batchinfer.api.app import create_app
from batchinfer.engine.stats import EngineStats
from batchinfer.errors import FencedError
from batchinfer.jobs.leases import PartCommit, ShardPlan, ShardResult
from batchinfer.jobs.queue_lanes import DEFAULT_DEVICE_NS
from batchinfer.jobs.records import RowCounts
from batchinfer.jobs.service import JobService
from batchinfer.settings import Settings
from batchinfer.types import Usage
from batchinfer_workers.metrics import CountingLedger, WorkerMetrics
from tests.played import WORKER, complete, lease, make_spec, run_shard
from tests.processes import Process
from tests.services import free_port

pytestmark = pytest.mark.service
ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"\bbatchinfer_[a-z_]+\b")


@pytest.fixture
def service(database_url):
    made = JobService.connect(database_url, "memory://")
    yield made
    made.close()


def parse(text):
    """``{(name, labels): value}`` of a scrape."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def names_of(text):
    return {name for name, _ in parse(text)}


def plan_tokens(ledger, job_id, sizes):
    """Plan shards of ten rows each with these estimates."""
    held = ledger.lease_planning(WORKER)
    shards = [ShardPlan(n, n * 10, n * 10 + 10, est_tokens=size) for n, size in enumerate(sizes)]
    ledger.commit_plan(
        job_id, held.token, num_rows=10 * len(sizes), fingerprint={}, warnings=[], output="/o", shards=shards
    )


def test_what_waits_in_rows_and_in_device_time(service, tmp_path):
    """Without a past a token takes a millisecond; with one, what it took. Rows that ended do not count."""
    job, _ = service.ledger.submit(make_spec(tmp_path))
    plan_tokens(service.ledger, job.id, [1000, 3000])
    [left] = service.queue().data
    assert (left.model, left.waiting_rows, left.running_rows) == ("org/name", 20, 0)
    assert left.device_seconds == pytest.approx(4000 * DEFAULT_DEVICE_NS / 1e9)
    held = lease(service.ledger)
    counts, usage = RowCounts(succeeded=5), Usage(100, 0, 100)
    service.ledger.commit_part(
        held.attempt_id, PartCommit(path="/p", num_rows=5, counts=counts, usage=usage, device_ns=200 * 7_000_000)
    )
    [left] = service.queue().data
    # half of the first shard is done, and a token took 7 ms
    assert (left.waiting_rows, left.running_rows) == (10, 5)
    assert left.device_seconds == pytest.approx((500 + 3000) * 0.007)
    service.pause(job.id)
    # the attempt that runs goes on until its next heartbeat
    assert [lane.waiting_rows for lane in service.queue().data] == [0]


def test_the_servers_scrape(service, tmp_path):
    job, _ = service.ledger.submit(make_spec(tmp_path, model='a "model"\n'))
    plan_tokens(service.ledger, job.id, [500])
    with TestClient(create_app(Settings.load(), service=service), base_url="http://localhost") as client:
        client.get(f"/v1/jobs/{job.id}")
        client.get("/v1/jobs/job_none")
        client.get("/nowhere/at/all")
        found = parse(client.get("/metrics").text)
        again = client.get("/metrics")
    lane = (("model", 'a "model"\n'), ("pool", "default"), ("kind", "any"))
    assert found["batchinfer_jobs", frozenset({("state", "queued")})] == 1
    assert found["batchinfer_queue_rows", frozenset({*lane, ("state", "waiting")})] == 10
    assert found["batchinfer_queue_device_seconds", frozenset(lane)] == pytest.approx(0.5)
    assert found["batchinfer_queue_workers", frozenset(lane)] == 0
    assert found["batchinfer_queue_workers_wanted", frozenset(lane)] == 1
    by_route = {
        (dict(labels)["route"], dict(labels)["status"]): value
        for (name, labels), value in found.items()
        if name == "batchinfer_http_requests_total"
    }
    assert by_route == {("/v1/jobs/{job_id}", "200"): 1, ("/v1/jobs/{job_id}", "404"): 1, ("other", "404"): 1}
    assert job.id not in again.text


def test_the_workers_scrape_adds_up(service, tmp_path):
    """What a worker commits through its ledger is what is counted; a fenced write is a lost lease and no rows."""
    metrics = WorkerMetrics()
    ledger = CountingLedger(service.engine, metrics)
    job, _ = ledger.submit(make_spec(tmp_path))
    complete(ledger, job.id, errored=2)
    found = parse(generate_latest(metrics.registry).decode())
    value = lambda name, **labels: found[name, frozenset(labels.items())]  # noqa: E731
    assert (value("batchinfer_rows_total", status="succeeded"), value("batchinfer_rows_total", status="errored")) == (
        8,
        2,
    )
    tokens = {kind: value("batchinfer_tokens_total", kind=kind) for kind in ("prompt", "cached", "completion")}
    assert tokens == {"prompt": 900, "cached": 100, "completion": 200}
    cost = service.cost(job.id)
    assert value("batchinfer_cost_usd_total", kind="rows") == pytest.approx(float(cost.rows_usd))
    assert value("batchinfer_cost_usd_total", kind="load") == pytest.approx(float(cost.overhead_usd["load"]))
    assert value("batchinfer_attempts_total", end="committed") == 2
    with pytest.raises(FencedError):
        ledger.commit_shard(1, ShardResult("/other", 5, 1, "ab" * 32))
    found = parse(generate_latest(metrics.registry).decode())
    assert value("batchinfer_lease_losses_total") == 1
    assert value("batchinfer_attempts_total", end="committed") == 2


def test_the_engines_figures(tmp_path):
    metrics = WorkerMetrics()
    stats = EngineStats(
        steps=4, step_ns=2_000_000_000, first_tokens=2, first_token_ns=3_000_000_000, later_tokens=10,
        later_token_ns=1_000_000_000, num_running=8, max_num_seqs=32, used_blocks=1, num_blocks=4, prompt_tokens=100,
        cached_tokens=25,
    )  # fmt: skip
    metrics.watch_engine(stats.to_dict)
    found = {name: value for (name, _), value in parse(generate_latest(metrics.registry).decode()).items()}
    assert found["batchinfer_engine_step_seconds_sum"] / found["batchinfer_engine_step_seconds_count"] == 0.5
    assert found["batchinfer_time_to_first_token_seconds_sum"] == 3
    assert found["batchinfer_time_per_output_token_seconds_count"] == 10
    assert found["batchinfer_engine_batch_occupancy"] == found["batchinfer_engine_kv_cache_usage"] == 0.25
    assert found["batchinfer_engine_prefix_hit_tokens_total"] == 25


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Every sample's name that an API and a worker give once something has happened."""
    folder = tmp_path_factory.mktemp("names")
    service = JobService.connect(f"sqlite:///{folder / 'b.db'}", "memory://")
    metrics = WorkerMetrics()
    metrics.watch_engine(EngineStats().to_dict)
    ledger = CountingLedger(service.engine, metrics)
    job, _ = ledger.submit(make_spec(folder))
    plan_tokens(ledger, job.id, [5, 5])
    run_shard(ledger)
    with TestClient(create_app(Settings.load(), service=service), base_url="http://localhost") as client:
        client.get("/healthz")
        names = names_of(client.get("/metrics").text) | names_of(generate_latest(metrics.registry).decode())
    service.close()
    return names


def test_board_and_alerts_name_only_metrics_that_exist(known):
    board = json.loads((ROOT / "deploy" / "grafana" / "batchinfer.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    [group] = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
    expressions += [rule["expr"] for rule in group["rules"]]
    named = {name for expression in expressions for name in NAME.findall(expression)}
    assert len(named) > 20
    assert named <= known
    assert all(rule["annotations"]["mend"] for rule in group["rules"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_the_page_names_only_metrics_that_exist(known):
    text = (ROOT / "docs" / "metrics.md").read_text()
    named = set(re.findall(r"`(batchinfer_[a-z_]+)(?:\{[a-z,]+\})?`", text))
    families = known | {re.sub(r"_(sum|count|bucket|total)$", "", name) for name in known}
    assert len(named) > 15
    assert named <= families


def test_a_worker_answers_on_its_own_port(sqlite_url):
    port = free_port()
    settings = {"database_url": sqlite_url, "metrics_port": port, "tick_seconds": "0.2"}
    with Process("worker", **settings) as worker:
        worker.wait_for(lambda line: "metrics" in line)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            assert "batchinfer_engine_steps_total" in names_of(response.read().decode())
