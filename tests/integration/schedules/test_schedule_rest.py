"""The REST API of schedules: a schedule's whole life, and what is refused."""

import pytest
from fastapi.testclient import TestClient

from batchinfer.api.access import Access
from batchinfer.api.app import create_app
from batchinfer.jobs.service import JobService
from batchinfer.settings import Settings

SPEC = {
    "name": "nightly",
    "cron": "30 2 * * *",
    "tz": "Europe/Istanbul",
    "missing_input": "wait:2h",
    "job": {
        "inputs": ["s3://bucket/in/date={{ logical_date }}/*.parquet"],
        "output": "s3://bucket/out/{{ run_id }}",
        "model": "org/name",
        "reuse_results": True,
        "deadline": "6h",
    },
}


@pytest.fixture
def client(sqlite_url):
    service = JobService.connect(sqlite_url, "memory://")
    with TestClient(create_app(Settings.load(), service=service, access=Access.INSECURE)) as client:
        yield client
    service.close()


def test_a_schedule_from_post_to_delete(client):
    made = client.post("/v1/schedules", json=SPEC)
    assert made.status_code == 201
    view = made.json()
    assert view == client.get(made.headers["Location"]).json() == client.get("/v1/schedules/nightly").json()
    assert view["job"]["deadline"] == "6h"
    assert (view["missing_input"], view["overlap"], view["catch_up"]) == ("wait:7200s", "skip", "latest")
    assert client.post("/v1/schedules/nightly/pause").json()["next_runs"] == []
    assert len(client.post("/v1/schedules/nightly/resume").json()["next_runs"]) == 3
    body = {"logical_date": "2026-01-01T02:30"}
    run = client.post("/v1/schedules/nightly/trigger", json=body)
    assert (run.status_code, run.json()["logical_date"]) == (202, "2025-12-31T23:30:00Z")
    assert client.post("/v1/schedules/nightly/trigger", json=body).status_code == 409
    done = client.post("/v1/schedules/nightly/backfill", json={"start": "2026-01-01", "end": "2026-01-03"}).json()
    assert (len(done["runs"]), done["existing"]) == (2, 1)
    page = client.get("/v1/schedules/nightly/runs", params={"limit": 2}).json()
    assert [one["kind"] for one in page["data"]] == ["backfill", "backfill"]
    assert page["has_more"]
    rest = client.get("/v1/schedules/nightly/runs", params={"after": page["last_id"]}).json()
    assert [one["id"] for one in rest["data"]] == [run.json()["id"]]
    assert [one["name"] for one in client.get("/v1/schedules").json()["data"]] == ["nightly"]
    assert client.delete("/v1/schedules/nightly").status_code == 200
    assert client.get("/v1/schedules/nightly").status_code == 404


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"cron": "never"}, "cron"),
        ({"tz": "Mars/Olympus"}, "tz"),
        ({"job": SPEC["job"] | {"inputs": ["relative.parquet"]}}, "inputs"),
        ({"job": SPEC["job"] | {"output": "s3://b/{{ today }}"}}, "output"),
        ({"job": SPEC["job"] | {"temperature": -1}}, "temperature"),
        ({"max_active": 0}, "max_active"),
        ({"nmae": "x"}, "nmae"),
    ],
)
def test_what_is_wrong_is_named(client, change, param):
    answer = client.post("/v1/schedules", json=SPEC | change)
    assert answer.status_code in (400, 422)
    assert param in str(answer.json()["error"]["param"])
    assert client.get("/v1/schedules").json()["data"] == []
