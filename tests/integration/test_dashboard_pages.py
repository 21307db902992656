"""Pages over SQLite and over PostgreSQL: a job's whole page, and the days of usage."""

import re
from datetime import UTC, datetime

import pytest
from fastapi.testclient import TestClient

from batchinfer.api.app import create_app
from batchinfer.jobs.drift import Drift
from batchinfer.jobs.forecast import Terms, forecast_plan
from batchinfer.jobs.leases import SentinelFound
from batchinfer.jobs.service import JobService
from batchinfer.settings import Settings
from tests.played import NANOS_PER_ROW, complete, finish, make_spec, plan, run_shard

pytestmark = pytest.mark.service


@pytest.fixture
def service(database_url):
    made = JobService.connect(database_url, "memory://")
    yield made
    made.close()


@pytest.fixture
def client(service):
    with TestClient(create_app(Settings.load(), service=service), base_url="http://127.0.0.1:8000") as made:
        yield made


def cells(page, label):
    """Texts of the table in the region of this name, a list a line."""
    region = re.search(rf'aria-label="{label}".*?</table>', page, re.DOTALL)
    assert region, label
    lines = re.findall(r"<tr>(.*?)</tr>", region[0], re.DOTALL)
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line, re.DOTALL) for line in lines]
    return [[re.sub(r"<[^>]+>", "", cell).strip() for cell in line] for line in found]


def test_a_job_shows_what_was_expected_beside_what_came(client, service, tmp_path):
    """The page, the REST answer and hand computation agree; before the plan there is no forecast and REST says 404."""
    job, _ = service.ledger.submit(make_spec(tmp_path, max_tokens=30))
    assert client.get(f"/v1/jobs/{job.id}/forecast").status_code == 404
    assert "made when the job is planned" in client.get(f"/jobs/{job.id}").text
    complete_with_forecast(service, job.id)
    page = client.get(f"/jobs/{job.id}")
    assert page.status_code == 200
    figures = {line[0]: line[1:] for line in cells(page.text, "Prediction and outcome")[1:]}
    # ten rows came, of 100 tokens each, answered by 20 each
    assert (figures["Prompt tokens"][2], figures["Completion tokens"][2]) == ("1,000", "200")
    report = client.get(f"/v1/jobs/{job.id}/forecast").json()
    (answers,) = [line for line in report["figures"] if line["what"] == "completion_tokens"]
    assert figures["Completion tokens"][0] == f"{answers['predicted']['expected']:.0f}"
    assert figures["Completion tokens"][3] == f"{answers['error'] * 100:+.0f} %"
    assert figures["Completion tokens"][4] == ("yes" if answers["is_covered"] else "no")


def complete_with_forecast(service, job_id):
    plan(service.ledger, job_id)
    planned = service.ledger.get_job(job_id)
    past = service.ledger.past_of(planned.tenant_id, planned.spec)
    service.ledger.note_forecast(planned, forecast_plan(planned, 1_000, past, Terms(1, price=None)))
    run_shard(service.ledger)
    run_shard(service.ledger)
    finish(service.ledger, job_id)


def test_usage_is_the_ledgers_of_all_kinds(client, service, tmp_path):
    """Overhead of the sentinel counts like that of loading."""
    job, _ = service.ledger.submit(make_spec(tmp_path))
    complete(service.ledger, job.id)
    service.ledger.add_overhead(job.id, "s", kind="sentinel", device_ns=5, nanos=10**9)
    line = next(line for line in cells(client.get("/usage").text, "Usage by day") if line[0] == str(today()))
    assert line[1:5] == ["10", "1,000", "100", "200"]
    (used,) = client.get("/v1/usage", params={"group_by": "day"}).json()["data"]
    assert (used["metered_usd"], used["overhead_usd"]) == ("0.000010000", "1.000000077")
    assert NANOS_PER_ROW * 10 == 10_000
    assert line[6].startswith("$1.00")


def today():
    return datetime.now(UTC).date()


def test_drift_above_the_threshold_stands_on_the_page(client, service, tmp_path):
    job, _ = service.ledger.submit(make_spec(tmp_path, sentinel=1, sentinel_threshold=0.2))
    plan(service.ledger, job.id, num_shards=1)
    assert "Sentinel" not in client.get(f"/jobs/{job.id}").text
    drift = Drift()
    found = {"tokens": 40, "same": 30, "kl_sum": 20.0, "loss": 0.0, "reference_loss": 0.0, "kl_max": 0.5}
    drift.add_row(0, {**found, "kl_counts": {"400": 40}, "differences": []})
    run_shard(service.ledger, sentinel=SentinelFound(drift.to_dict()))
    text = client.get(f"/jobs/{job.id}").text
    assert "Above the threshold." in text
    assert "by 0.5000 nats a token" in text
    assert "75 %" in text
