"""Prices, usage and budgets through the REST API and the command line: one set of words, one set of numbers."""

import json
from datetime import UTC, datetime

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient

from batchinfer.api.app import create_app
from batchinfer.cli.main import cli
from batchinfer.jobs.service import JobService
from batchinfer.settings import Settings
from tests.played import complete, make_spec


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def service(home):
    made = JobService.connect(f"sqlite:///{home / 'batchinfer.db'}", "memory://")
    yield made
    made.close()


@pytest.fixture(scope="module")
def job_id(service, tmp_path_factory):
    view, _ = service.submit(make_spec(tmp_path_factory.mktemp("in"), tags={"team": "search"}), base=None)
    complete(service.ledger, view.id)
    return view.id


@pytest.fixture(scope="module")
def client(service):
    with TestClient(create_app(Settings.load(), service=service), base_url="http://localhost") as client:
        yield client


@pytest.fixture
def shell(home, monkeypatch):
    monkeypatch.setenv("BATCHINFER_HOME", str(home))

    def run(*words):
        done = CliRunner().invoke(cli, [*words, "--json"], standalone_mode=False, catch_exceptions=False)
        return json.loads(done.stdout)

    return run


def test_usage_is_the_same_through_both_doors(client, shell, job_id):
    for groups in ("day", "job,day", "tag", "tenant,model"):
        rest = client.get("/v1/usage", params={"group_by": groups}).json()
        assert shell("usage", "--by", groups) == rest
        assert rest["data"]
    cost = client.get(f"/v1/jobs/{job_id}/cost").json()
    line = client.get("/v1/usage", params={"group_by": ["job"]}).json()["data"][0]
    assert (line["job"], line["total_usd"]) == (job_id, cost["metered_total_usd"])
    assert client.get("/v1/usage?group_by=tag").json()["data"][0]["tag"] == "team=search"


def test_usage_of_other_days_is_nothing(client, job_id):
    assert client.get("/v1/usage", params={"to": "2020-01-01"}).json()["data"] == []


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"group_by": "week"}, "group_by"),
        ({"group_by": ["job", "tag"]}, "group_by"),
        ({"from": "2026-02-01", "to": "2026-01-01"}, "to"),
        ({"after": "x"}, "after"),
        ({"from": "yesterday"}, "from"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_field(client, asked, param):
    answer = client.get("/v1/usage", params=asked)
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == param


def test_export(shell, client, job_id, tmp_path):
    assert shell("usage", "--by", "job", "--export", str(tmp_path / "u.parquet"))["num_lines"] == 1
    row = pq.read_table(tmp_path / "u.parquet").to_pylist()[0]
    line = client.get("/v1/usage?group_by=job").json()["data"][0]
    assert (row["job"], f"{row['metered_usd']:f}") == (job_id, line["metered_usd"])


def test_budgets_through_both_doors(client, shell, job_id):
    assert shell("budget", "set", "2.50")["limit_usd"] == "2.500000000"
    body = {"tenant": "default", "month": "2031-05", "limit_usd": "7"}
    assert client.put("/v1/budgets", json=body).json()["month"] == "2031-05"
    listed = client.get("/v1/budgets").json()
    assert shell("budget", "ls") == listed
    assert [(b["tenant"], b["month"], b["is_spent"]) for b in listed["data"]] == [
        ("default", None, False), ("default", "2031-05", False),
    ]  # fmt: skip
    day = client.get("/v1/usage").json()["data"][0]
    # the job of this module may have run before midnight, in the month before
    is_of_now = day["day"].startswith(datetime.now(UTC).strftime("%Y-%m"))
    assert listed["data"][0]["spent_usd"] == (day["total_usd"] if is_of_now else "0.000000000")
    assert client.delete("/v1/budgets/default", params={"month": "2031-05"}).status_code == 204
    assert client.delete("/v1/budgets/default", params={"month": "2031-05"}).status_code == 404
    assert shell("budget", "rm")["removed"]
    assert client.get("/v1/budgets").json()["data"] == []


def test_the_price_book_through_both_doors(client, shell):
    body = {"model": "m", "input_usd": "1", "output_usd": "2", "valid_from": "2026-01-01T00:00:00Z"}
    assert client.put("/v1/prices/models", json=body).json()["cached_input_usd"] == "1.000000000"
    shell("price", "set", "m", "--input", "3", "--cached-input", "0.5", "--output", "4")
    client.put("/v1/prices/devices", json={"device": "cuda", "usd_per_hour": "4.5"})
    shell("price", "set-device", "cuda", "--per-hour", "5", "--valid-from", "2030-01-01")
    book = client.get("/v1/prices").json()
    assert shell("price", "ls") == book
    assert [p["input_usd"] for p in book["models"]] == ["3.000000000", "1.000000000"]
    assert [p["usd_per_hour"] for p in book["devices"]] == ["5.000000000", "4.500000000"]
    assert client.get("/v1/prices?device=cuda").json()["models"] == []
