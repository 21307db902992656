"""Jobs over REST, on SQLite and on PostgreSQL."""

from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import pytest
from fastapi.testclient import TestClient

from batchinfer.api.app import create_app
from batchinfer.jobs.service import JobService
from batchinfer.money import nanos_to_usd
from batchinfer.settings import Settings
from tests.played import LOAD_NANOS, NANOS_PER_ROW, complete, lease, make_input, plan, run_shard

pytestmark = pytest.mark.service


@pytest.fixture
def service(database_url):
    made = JobService.connect(database_url, "memory://")
    yield made
    made.close()


@pytest.fixture
def client(service):
    with TestClient(create_app(Settings.load(), service=service), base_url="http://localhost") as made:
        yield made


@pytest.fixture
def spec(tmp_path):
    return {"inputs": [make_input(tmp_path)], "model": "org/name"}


def submit(client, spec, key=None):
    response = client.post("/v1/jobs", json=spec, headers={"Idempotency-Key": key} if key else {})
    assert response.status_code == 202, response.text
    return response.json()["id"]


def error_code(response):
    return response.status_code, response.json()["error"]["code"]


def test_a_job_can_be_polled_as_soon_as_it_was_submitted(client, spec):
    """Case 12: GET right after POST is never 404."""
    for _ in range(10):
        response = client.post("/v1/jobs", json=spec)
        assert response.status_code == 202
        polled = client.get(response.headers["Location"]).json()
        assert "no worker is running" in polled.pop("waits_for"), "a submission does not look for workers, a poll does"
        assert polled == {name: value for name, value in response.json().items() if name != "waits_for"}


def test_all_that_was_asked_for_is_stored(client, service, spec):
    asked = spec | {
        "output": "s3://bucket/out/",
        "name": "nightly ☾\0",
        "tags": {"team": "search\0"},
        "template": "{{ a }}\0",
        "max_tokens": 7,
        "temperature": 0.5,
        "stop": ["a", "b"],
        "priority": 3,
        "deadline": "2999-01-01T01:00:00+01:00",
        "budget_usd": "12.5",
        "shard_rows": 10,
    }
    job = client.get(f"/v1/jobs/{submit(client, asked)}").json()
    assert (job["name"], job["tags"], job["priority"]) == ("nightly ☾\ufffd", {"team": "search\0"}, 3)
    assert (job["output"], job["deadline"], job["cost"]["budget_usd"]) == (
        "s3://bucket/out/", "2999-01-01T00:00:00Z", "12.500000000",
    )  # fmt: skip
    stored = service.ledger.get_job(job["id"]).spec
    assert (stored.template, stored.max_tokens, stored.temperature) == ("{{ a }}\0", 7, 0.5)
    assert (stored.stop, stored.shard_rows) == (("a", "b"), 10)


def test_the_default_output_lies_beside_the_input(client, spec):
    job = client.get(f"/v1/jobs/{submit(client, spec)}").json()
    assert job["output"] == f"{spec['inputs'][0]}.results/{job['id']}"


def test_one_idempotency_key_makes_one_job(client, spec):
    """Case 12, with a deadline that is a duration: it means another moment each time, and is the same request."""
    body = spec | {"deadline": "6h"}
    first = client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "night-1"})
    again = client.post("/v1/jobs", json=dict(reversed(body.items())), headers={"Idempotency-Key": "night-1"})
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["id"] == again.json()["id"]
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    other = client.post("/v1/jobs", json=body | {"max_tokens": 1}, headers={"Idempotency-Key": "night-1"})
    assert error_code(other) == (409, "idempotency_conflict")
    assert len(client.get("/v1/jobs").json()["data"]) == 1


def test_a_key_is_answered_though_the_job_has_ended_and_its_files_are_there(client, service, spec, tmp_path):
    """A client that lost the answer asks again, perhaps much later: it must not be told that the output exists."""
    body = spec | {"output": str(tmp_path / "out")}
    job_id = submit(client, body, "k")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shard-00000.parquet").write_bytes(b"PAR1")
    assert error_code(client.post("/v1/jobs", json=body)) == (409, "output_exists")
    complete(service.ledger, job_id)
    (tmp_path / "prompts.parquet").unlink()
    assert submit(client, body, "k") == job_id


def test_the_same_request_many_times_at_once_makes_one_job(client, spec):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: submit(client, spec, "at once"), range(16)))
    assert len(set(answers)) == 1
    assert len(client.get("/v1/jobs").json()["data"]) == 1


def test_an_input_that_is_not_there(client, service, spec, tmp_path):
    """Refused at once where the workers share this machine's disk, else left to the planner, who sees the real one."""
    response = client.post("/v1/jobs", json=spec | {"inputs": [str(tmp_path / "nope.parquet")]})
    if service.engine.dialect.name == "sqlite":
        assert error_code(response) == (422, "invalid_input")
        assert response.json()["error"]["param"] == "inputs"
    else:
        assert response.status_code == 202


def test_pages_are_newest_first_and_have_no_gaps(client, spec):
    made = [submit(client, spec | {"name": str(number)}) for number in range(5)]
    seen, after = [], None
    while True:
        page = client.get("/v1/jobs", params={"limit": 2} | ({"after": after} if after else {})).json()
        assert page["object"] == "list"
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        seen += [job["id"] for job in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert sorted(seen) == sorted(made)
    assert seen == sorted(seen, reverse=True)
    assert client.get("/v1/jobs", params={"after": seen[-1]}).json()["data"] == []
    assert error_code(client.get("/v1/jobs?after=job_0")) == (404, "not_found")


def test_lists_can_be_of_one_state(client, spec):
    kept, held = submit(client, spec), submit(client, spec)
    client.post(f"/v1/jobs/{held}/pause")
    assert [job["id"] for job in client.get("/v1/jobs?state=paused").json()["data"]] == [held]
    assert [job["id"] for job in client.get("/v1/jobs?state=validating").json()["data"]] == [kept]


def test_a_running_job_shows_how_far_it_is(client, service, spec):
    job_id = submit(client, spec)
    plan(service.ledger, job_id)
    run_shard(service.ledger, errored=1)
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert (job["state"], job["outcome"], job["warnings"]) == ("in_progress", None, ["something odd"])
    assert {name: job["rows"][name] for name in ("total", "remaining", "succeeded", "errored")} == {
        "total": 10, "remaining": 5, "succeeded": 4, "errored": 1,
    }  # fmt: skip
    assert job["usage"] == {"prompt_tokens": 500, "cached_tokens": 50, "completion_tokens": 100}
    progress = job["progress"]
    assert progress["fraction"] == 0.5
    # five rows with a hundred tokens are done and five remain, so the rest takes as long as what was done
    assert progress["tokens_per_second"] == pytest.approx(20 * progress["rows_per_second"], rel=0.01)
    # given to the millisecond, which is coarse where a shard takes twenty of them
    assert progress["eta_seconds"] == pytest.approx(5 / progress["rows_per_second"], rel=0.01, abs=0.0006)
    results = client.get(f"/v1/jobs/{job_id}/results").json()
    assert (results["is_complete"], results["manifest"]) == (False, None)
    assert [(file["num_rows"], file["num_bytes"]) for file in results["files"]] == [(5, 1234)]
    assert results["files"][0]["path"].startswith(job["output"])


def test_what_came_of_a_job(client, service, spec):
    job_id = submit(client, spec)
    complete(service.ledger, job_id, errored=2)
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert (job["state"], job["outcome"], job["rows"]["errored"]) == ("completed", "partial", 2)
    page = client.get(f"/v1/jobs/{job_id}/errors", params={"limit": 1}).json()
    assert (page["failed_rows"], page["has_more"]) == (2, True)
    assert [(kind["code"], kind["num_samples"], kind["retryable"]) for kind in page["kinds"]] == [
        ("empty_prompt", 2, False)
    ]
    assert page["kinds"][0]["advice"]
    assert [(row["row_index"], row["code"], row["message"]) for row in page["data"]] == [
        (0, "empty_prompt", "nothing to say")
    ]
    rest = client.get(f"/v1/jobs/{job_id}/errors", params={"limit": 1, "offset": 1}).json()
    assert ([row["row_index"] for row in rest["data"]], rest["has_more"]) == ([1], False)
    assert client.get(f"/v1/jobs/{job_id}/errors?code=engine_error").json()["data"] == []


def test_rows_and_overhead_are_the_meter_to_the_nano_dollar(client, service, spec):
    job_id = submit(client, spec)
    complete(service.ledger, job_id)
    cost = client.get(f"/v1/jobs/{job_id}/cost").json()
    assert Decimal(cost["rows_usd"]) == nanos_to_usd(10 * NANOS_PER_ROW)
    assert cost["overhead_usd"] == {"load": "0.000000077"}
    total = Decimal(cost["rows_usd"]) + sum(map(Decimal, cost["overhead_usd"].values()))
    assert Decimal(cost["metered_total_usd"]) == total == nanos_to_usd(10 * NANOS_PER_ROW + LOAD_NANOS)
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert Decimal(job["cost"]["metered_usd"]) + Decimal(job["cost"]["overhead_usd"]) == total


def test_three_polls_at_once_while_a_job_ends(client, service, spec):
    """Case 10: never a cost of zero or double once the job has ended, never a counter that goes down."""
    job_id = submit(client, spec)
    plan(service.ledger, job_id)

    def poll(_):
        job = client.get(f"/v1/jobs/{job_id}").json()
        return job["rows"]["succeeded"], Decimal(job["cost"]["metered_usd"])

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(lambda: [run_shard(service.ledger) for _ in range(2)])]
        seen = list(pool.map(poll, range(30)))
        running[0].result()
    assert {rows for rows, _ in seen} <= {0, 5, 10}
    assert all(cost == nanos_to_usd(rows * NANOS_PER_ROW) for rows, cost in seen)
    assert poll(0) == (10, nanos_to_usd(10 * NANOS_PER_ROW))


def test_pause_and_resume(client, spec):
    job_id = submit(client, spec)
    assert client.post(f"/v1/jobs/{job_id}/pause").json()["state"] == "paused"
    assert client.post(f"/v1/jobs/{job_id}/pause").json()["state"] == "paused"
    assert client.post(f"/v1/jobs/{job_id}/resume").json()["state"] == "validating"
    status, code = error_code(client.post(f"/v1/jobs/{job_id}/resume"))
    assert (status, bool(code)) == (409, True)


def test_a_cancelled_job_keeps_its_rows_and_cannot_be_paused(client, service, spec):
    job_id = submit(client, spec)
    plan(service.ledger, job_id)
    run_shard(service.ledger)
    assert client.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelling"
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert (job["rows"]["succeeded"], job["rows"]["cancelled"]) == (5, 0)
    response = client.post(f"/v1/jobs/{job_id}/pause")
    assert error_code(response)[0] == 409
    assert "cancelling" in response.json()["error"]["message"]
    assert "paused" in response.json()["error"]["message"]


def test_retry_runs_the_failed_rows_only(client, service, spec):
    """Case 15: three failed rows of ten make three calls, and the others are not touched."""
    job_id = submit(client, spec)
    complete(service.ledger, job_id, errored=3)
    answer = client.post(f"/v1/jobs/{job_id}/retry", json={"statuses": ["errored"]}).json()
    assert answer["retried_rows"] == 3
    assert answer["job"]["state"] == "queued"
    assert answer["job"]["rows"]["succeeded"] == 7
    assert lease(service.ledger).shard.todo_rows == 3


def test_retry_with_nothing_to_retry_changes_nothing(client, service, spec):
    job_id = submit(client, spec)
    complete(service.ledger, job_id)
    answer = client.post(f"/v1/jobs/{job_id}/retry").json()
    assert (answer["retried_rows"], answer["job"]["state"]) == (0, "completed")


def test_a_spent_budget_holds_a_job_until_it_is_raised(client, service, spec):
    """Case 11: an outcome of its own, not an error that is tried again and spends more."""
    job_id = submit(client, spec | {"budget_usd": "0.000003"})
    plan(service.ledger, job_id)
    run_shard(service.ledger)
    assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "budget_exhausted"
    assert error_code(client.post(f"/v1/jobs/{job_id}/resume"))[0] == 409
    job = client.post(f"/v1/jobs/{job_id}/resume", json={"budget_usd": "1"}).json()
    assert (job["state"], job["cost"]["budget_usd"]) == ("queued", "1.000000000")


def test_readiness_on_this_database(client):
    assert client.get("/readyz").json()["status"] == "ready"
