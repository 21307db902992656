"""Changing, cloning and looking closer at jobs over REST, on SQLite and on PostgreSQL."""

import json
import threading
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from batchinfer.api.app import create_app
from batchinfer.api.routes import job_events
from batchinfer.dataset.schema import ResultSchema
from batchinfer.jobs import row_pages
from batchinfer.jobs.service import JobService
from batchinfer.settings import Settings
from tests.played import complete, lease, make_input, plan, run_shard

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


def submit(client, spec):
    response = client.post("/v1/jobs", json=spec)
    assert response.status_code == 202, response.text
    return response.json()["id"]


def outcome(response):
    return response.status_code, response.json().get("error", {}).get("code")


# -- changing ---------------------------------------------------------------------------------------------------------
def test_a_changed_priority_and_deadline_count_at_the_next_lease(client, service, spec):
    first, second = submit(client, spec), submit(client, spec)
    for job_id in (first, second):
        plan(service.ledger, job_id)
    job = client.patch(f"/v1/jobs/{second}", json={"priority": 7, "deadline": "2999-01-01T00:00:00Z"}).json()
    assert (job["priority"], job["deadline"]) == (7, "2999-01-01T00:00:00Z")
    assert lease(service.ledger).job.id == second
    client.patch(f"/v1/jobs/{second}", json={"priority": 0, "deadline": None})
    assert client.get(f"/v1/jobs/{second}").json()["deadline"] is None
    assert lease(service.ledger).job.id == first


def test_what_is_not_given_stays_and_null_takes_away(client, spec):
    job_id = submit(client, spec | {"name": "a", "tags": {"x": "y"}, "budget_usd": "3", "priority": 4})
    job = client.patch(f"/v1/jobs/{job_id}", json={"name": "b"}).json()
    assert (job["name"], job["tags"], job["priority"], job["cost"]["budget_usd"]) == ("b", {"x": "y"}, 4, "3.000000000")
    job = client.patch(f"/v1/jobs/{job_id}", json={"name": None, "tags": {}, "budget_usd": None}).json()
    assert (job["name"], job["tags"], job["priority"], job["cost"]["budget_usd"]) == (None, {}, 4, None)


def test_two_people_who_edit_the_same_version(client, service, spec):
    """The second one is told, and nothing of the first one's is lost; progress alone is no new version."""
    job_id = submit(client, spec)
    etag = client.get(f"/v1/jobs/{job_id}").headers["ETag"]
    plan(service.ledger, job_id)
    first = client.patch(f"/v1/jobs/{job_id}", json={"priority": 1}, headers={"If-Match": etag})
    assert first.status_code == 200
    assert outcome(client.patch(f"/v1/jobs/{job_id}", json={"priority": 2}, headers={"If-Match": etag})) == (
        412, "precondition_failed",
    )  # fmt: skip
    job = client.get(f"/v1/jobs/{job_id}")
    assert job.json()["priority"] == 1
    edited = first.headers["ETag"].strip('"')
    assert job.headers["ETag"].startswith(f'W/"{edited}.')
    for match in (job.headers["ETag"], "*"):
        assert client.patch(f"/v1/jobs/{job_id}", json={"name": "x"}, headers={"If-Match": match}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [{}, {"priority": 101}, {"priority": None}, {"deadline": "2000-01-01T00:00:00Z"}, {"deadline": "soon"}, {"model": "x"},
     {"budget_usd": 0}, {"tags": {"a": 1}}, {"name": "x" * 201}, []],
)  # fmt: skip
def test_changes_that_are_none(client, spec, body):
    job_id = submit(client, spec)
    assert client.patch(f"/v1/jobs/{job_id}", json=body).status_code == 422


def test_of_an_ended_job_only_the_labels_change(client, service, spec):
    job_id = submit(client, spec)
    complete(service.ledger, job_id)
    assert client.patch(f"/v1/jobs/{job_id}", json={"name": "kept"}).json()["name"] == "kept"
    for body in ({"priority": 1}, {"budget_usd": "1"}, {"deadline": "6h"}):
        assert outcome(client.patch(f"/v1/jobs/{job_id}", json=body))[0] == 409


def test_a_budget_below_what_was_spent_holds_the_job(client, service, spec):
    job_id = submit(client, spec)
    plan(service.ledger, job_id)
    run_shard(service.ledger)
    assert client.patch(f"/v1/jobs/{job_id}", json={"budget_usd": "0.000000001"}).json()["state"] == "budget_exhausted"
    client.patch(f"/v1/jobs/{job_id}", json={"budget_usd": "5"})
    assert client.post(f"/v1/jobs/{job_id}/resume").json()["state"] == "queued"


def test_filters(client, service, spec):
    made = {name: submit(client, spec | {"name": name, "model": f"org/{name}"}) for name in ("a", "b")}
    for query in ("name=a", "model=org/a", "name=a&model=org/a&state=validating"):
        assert [job["id"] for job in client.get(f"/v1/jobs?{query}").json()["data"]] == [made["a"]]
    for query in ("name=a&model=org/b", "name=%00", "model=%27", "state=paused"):
        assert client.get(f"/v1/jobs?{query}").json()["data"] == []


# -- cloning ----------------------------------------------------------------------------------------------------------
def test_a_clone_has_the_spec_and_another_output(client, service, spec):
    job_id = submit(client, spec | {"temperature": 0.5, "output": "s3://b/o", "deadline": "6h", "tags": {"a": "b"}})
    response = client.post(f"/v1/jobs/{job_id}/clone")
    assert response.status_code == 202, response.text
    clone = response.json()
    assert response.headers["Location"] == f"/v1/jobs/{clone['id']}"
    old, new = (service.ledger.get_job(found).spec for found in (job_id, clone["id"]))
    assert clone["id"] != job_id
    assert new.output == f"{spec['inputs'][0]}.results/{clone['id']}"
    assert new.deadline is None
    kept = {"output", "deadline"}
    assert new.model_dump(exclude=kept) == old.model_dump(exclude=kept)
    changed = client.post(f"/v1/jobs/{job_id}/clone", json={"max_tokens": 5, "name": "again"}).json()
    assert service.ledger.get_job(changed["id"]).spec.max_tokens == 5
    for body in ({"max_tokens": -1}, {"maxtokens": 5}, {"inputs": ["relative"]}):
        assert client.post(f"/v1/jobs/{job_id}/clone", json=body).status_code == 422


def test_a_clone_under_one_key_is_one_job(client, spec):
    job_id = submit(client, spec)
    made = [client.post(f"/v1/jobs/{job_id}/clone", headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert made[0].json()["id"] == made[1].json()["id"]
    assert made[1].headers["Idempotent-Replayed"] == "true"
    other = client.post(f"/v1/jobs/{job_id}/clone", json={"seed": 1}, headers={"Idempotency-Key": "k"})
    assert outcome(other) == (409, "idempotency_conflict")


# -- rows -------------------------------------------------------------------------------------------------------------
def write_shard(job, shard, statuses, output="out"):
    """A published shard file, as the sink's schema says, with two row groups."""
    from batchinfer.dataset.layout import OutputLayout

    schema = ResultSchema(pa.schema([("prompt", pa.large_string())]), "", ()).output_schema
    start = shard.row_start
    rows = [
        dict.fromkeys(schema.names)
        | {
            "prompt": f"p{start + i}", "row_index": start + i, "status": status, "output": f"{output}{start + i}",
            "usage": {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 2}, "cost_usd": Decimal("0.000000001"),
            "model": "m", "attempt": 1,
        }
        for i, status in enumerate(statuses)
    ]  # fmt: skip
    path = OutputLayout(job.output, job.id).shard_path(shard.index)
    from pathlib import Path

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=3)


@pytest.fixture
def published(client, service, spec, tmp_path):
    """A running job: of three shards with five rows each, the first and the last are done; one row in each errored."""
    job_id = submit(client, spec | {"output": str(tmp_path / "out")})
    plan(service.ledger, job_id, num_rows=15, num_shards=3)
    held = [lease(service.ledger) for _ in range(3)]
    from batchinfer.jobs.leases import PartCommit, ShardResult
    from batchinfer.jobs.records import RowCounts
    from batchinfer.types import Usage

    for one in (held[0], held[2]):
        counts = RowCounts(succeeded=4, errored=1)
        part = PartCommit("/p", 5, counts, usage=Usage(5, 0, 10), metered_nanos=5, device_ns=5)
        service.ledger.commit_part(one.attempt_id, part)
        service.ledger.commit_shard(one.attempt_id, ShardResult("/s", 5, 1, "ab" * 32))
        write_shard(one.job, one.shard, ["succeeded"] * 4 + ["errored"])
    return job_id


def test_rows_come_in_pages_without_gaps(client, published):
    seen, after = [], -1
    while after is not None:
        page = client.get(f"/v1/jobs/{published}/rows", params={"limit": 3, "after": after}).json()
        assert len(page["data"]) <= 3
        assert page["has_more"] == (page["next_after"] is not None)
        seen += page["data"]
        after = page["next_after"]
    assert [row["row_index"] for row in seen] == [*range(5), *range(10, 15)]
    assert [row["output"] for row in seen] == [f"out{row['row_index']}" for row in seen]
    assert seen[0]["prompt"] == "p0"


def test_rows_of_one_status(client, published, monkeypatch):
    page = client.get(f"/v1/jobs/{published}/rows?status=errored").json()
    assert [row["row_index"] for row in page["data"]] == [4, 14]
    assert client.get(f"/v1/jobs/{published}/rows?status=skipped").json()["data"] == []
    # a page looks at a bounded number of rows, and says where to go on
    monkeypatch.setattr(row_pages, "MAX_SCANNED_ROWS", 2)
    seen, after, num_pages = [], -1, 0
    while after is not None:
        page = client.get(f"/v1/jobs/{published}/rows", params={"status": "errored", "after": after}).json()
        seen += [row["row_index"] for row in page["data"]]
        after, num_pages = page["next_after"], num_pages + 1
    assert seen == [4, 14]
    assert num_pages > 1


def test_a_page_of_long_rows_ends_early(client, published, monkeypatch):
    monkeypatch.setattr(row_pages, "MAX_PAGE_CHARS", 10)
    page = client.get(f"/v1/jobs/{published}/rows").json()
    assert 1 <= len(page["data"]) < 5
    assert page["has_more"]


@pytest.mark.parametrize("query", ["after=-2", "after=x", f"after={2**63}", "status=fine", "limit=101"])
def test_wrong_queries_for_rows(client, published, query):
    assert client.get(f"/v1/jobs/{published}/rows?{query}").status_code == 422


def test_rows_that_another_machine_has(client, service, spec):
    job_id = submit(client, spec | {"output": "/nowhere/out"})
    plan(service.ledger, job_id)
    assert client.get(f"/v1/jobs/{job_id}/rows").json()["data"] == []
    run_shard(service.ledger)
    assert outcome(client.get(f"/v1/jobs/{job_id}/rows")) == (422, "invalid_input")


# -- events -----------------------------------------------------------------------------------------------------------
def parse_stream(text):
    """``(id, event, data)`` of each message, by the rules of the format."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields.get("id"), fields["event"], json.loads(fields["data"])))
    return found


def test_events_in_pages_and_as_a_stream(client, service, spec):
    job_id = submit(client, spec)
    complete(service.ledger, job_id)
    page = client.get(f"/v1/jobs/{job_id}/events").json()
    kinds = [event["kind"] for event in page["data"]]
    assert kinds[0] == "submitted"
    assert page["data"][-1]["data"]["new"] == "completed"
    assert not page["has_more"]
    first = client.get(f"/v1/jobs/{job_id}/events?limit=2").json()
    rest = client.get(f"/v1/jobs/{job_id}/events", params={"after": first["data"][-1]["id"]}).json()
    assert (first["data"] + rest["data"], first["has_more"]) == (page["data"], True)

    stream = {"Accept": "text/event-stream"}
    response = client.get(f"/v1/jobs/{job_id}/events", headers=stream)
    assert response.headers["content-type"].startswith("text/event-stream")
    messages = parse_stream(response.text)
    assert [data for _, kind, data in messages if kind != "end"] == page["data"]
    assert messages[-1][1] == "end"
    again = client.get(f"/v1/jobs/{job_id}/events", headers=stream | {"Last-Event-ID": messages[1][0]})
    assert [number for number, _, _ in parse_stream(again.text)] == [number for number, _, _ in messages[2:]]
    assert client.get("/v1/jobs/job_0/events", headers=stream).status_code == 404


def test_a_stream_tells_of_what_happens_while_it_is_open(client, service, spec, monkeypatch):
    monkeypatch.setattr(job_events, "POLL_SECONDS", 0.01)
    job_id = submit(client, spec)
    told = threading.Event()

    def act():
        told.wait(30)
        service.cancel(job_id)

    thread = threading.Thread(target=act)
    thread.start()
    original = service.ledger.events

    def events(*args, **kwargs):
        found = original(*args, **kwargs)
        if not found:
            told.set()  # the stream has told of everything and now waits
        return found

    monkeypatch.setattr(service.ledger, "events", events)
    response = client.get(f"/v1/jobs/{job_id}/events", headers={"Accept": "text/event-stream"})
    thread.join()
    messages = parse_stream(response.text)
    assert [kind for _, kind, _ in messages] == ["submitted", "state", "end"]
    assert messages[1][2]["data"] == {"old": "validating", "new": "cancelled"}


# -- workers, keys, tenants -------------------------------------------------------------------------------------------
def test_workers(client, service):
    service.ledger.register_worker("w1", hostname="h", pid=7, nanos_per_hour=2_500_000_000, device="cpu")
    [worker] = client.get("/v1/workers").json()["data"]
    assert (worker["id"], worker["hostname"], worker["usd_per_hour"], worker["is_alive"]) == (
        "w1",
        "h",
        "2.500000000",
        True,
    )


def test_keys_and_tenants_over_rest(client, service):
    assert client.post("/v1/tenants", json={"id": "red", "input_roots": ["/in"]}).status_code == 201
    assert outcome(client.post("/v1/tenants", json={"id": "red"})) == (409, "conflict")
    assert client.patch("/v1/tenants/red", json={"output_roots": ["s3://b/o"], "name": "Red"}).json()["name"] == "Red"
    tenant = client.get("/v1/tenants/red").json()
    assert (tenant["input_roots"], tenant["output_roots"]) == (["/in"], ["s3://b/o"])
    assert [found["id"] for found in client.get("/v1/tenants").json()["data"]] == ["default", "red"]
    assert client.get("/v1/tenants?limit=1").json()["has_more"]

    made = client.post("/v1/keys", json={"tenant": "red", "role": "admin", "expires_in_seconds": 60, "platform": False})
    assert made.status_code == 201
    # from here on there is a key, so everyone needs one
    assert made.json()["key"].startswith(f"bi_{made.json()['id']}_")
    headers = {"Authorization": f"Bearer {made.json()['key']}"}
    listed = client.get("/v1/keys", headers=headers).json()
    assert [found["id"] for found in listed["data"]] == [made.json()["id"]]
    assert made.json()["key"] not in json.dumps(listed)
    rotated = client.post(f"/v1/keys/{made.json()['id']}/rotate", headers=headers, json={"overlap_seconds": 30})
    assert rotated.status_code == 201
    headers = {"Authorization": f"Bearer {rotated.json()['key']}"}
    old = client.get(f"/v1/keys/{made.json()['id']}", headers=headers).json()
    assert old["replaced_by"] == rotated.json()["id"]
    assert client.delete(f"/v1/keys/{made.json()['id']}", headers=headers).json()["revoked_at"]
    assert client.post("/v1/keys", headers=headers, json={"platform": True}).status_code == 403


# -- stages -----------------------------------------------------------------------------------------------------------
STAGES = [
    {"name": "draft", "prompt": "say {{ topic }}", "sampling": {"max_tokens": 9}},
    {"name": "keep", "filter": "draft.output | length > 3"},
    {"name": "judge", "prompt": "judge {{ draft.output }}", "guided_choice": ["yes", "no"]},
]


def test_a_job_of_stages_is_stored_and_cloned_as_it_was(client, service, spec):
    job_id = submit(client, spec | {"stages": STAGES, "temperature": 0.5})
    clone = client.post(f"/v1/jobs/{job_id}/clone", json={"max_tokens": 5}).json()["id"]
    old, new = (service.ledger.get_job(found).spec for found in (job_id, clone))
    assert [stage.name for stage in old.stages] == ["draft", "keep", "judge"]
    assert new.stages == old.stages
    assert [old.stage_params(stage).max_tokens for stage in old.stages] == [9, 256, 256]
    assert [new.stage_params(stage).max_tokens for stage in new.stages] == [9, 5, 5]
    filtered = client.get(f"/v1/jobs/{job_id}").json()["rows"]["filtered"]
    assert filtered == 0


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([*STAGES, STAGES[0]], "stage 'draft': there is a stage of that name already"),
        (STAGES[::-1], "stage 'judge': it uses the stage 'draft', which comes after it"),
        ([STAGES[0] | {"prompt": "{{ topic"}], "stage 'draft': template, line 1"),
        ([STAGES[0] | {"guided_regex": "("}], "stage 'draft': guided_regex: "),
        ("stages.yaml", "stages is not a list"),
    ],
)
def test_wrong_stages_are_refused_at_submit(client, spec, stages, words):
    answer = client.post("/v1/jobs", json=spec | {"stages": stages})
    assert answer.status_code in (400, 422)
    assert words in answer.json()["error"]["message"]
    assert client.get("/v1/jobs").json()["data"] == []


def test_a_job_of_stages_is_not_foreseen(client, spec):
    for verb in ("estimate", "explain"):
        answer = client.post(f"/v1/jobs:{verb}", json=spec | {"stages": STAGES})
        assert answer.status_code == 422
        assert "with a limit first" in answer.json()["error"]["message"]
