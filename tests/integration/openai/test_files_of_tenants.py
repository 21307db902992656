"""Files and batches: what a tenant sees of another's (nothing), what deletion and expiry do. On both databases."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from batchinfer.api.access import Access
from batchinfer.api.app import create_app
from batchinfer.jobs.caller import Caller, Role
from batchinfer.jobs.file_sweeper import GRACE, FileSweeper
from batchinfer.jobs.files import MAX_LINE_BYTES, FileStore
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.service import JobService
from batchinfer.settings import Settings
from tests.integration.openai.conftest import chat, lines
from tests.played import complete, make_spec

pytestmark = pytest.mark.service
OPERATOR = Caller.operator()


@pytest.fixture
def service(database_url):
    made = JobService.connect(database_url, "memory://")
    for tenant in ("red", "blue"):
        made.tenants.add(OPERATOR, tenant)
    yield made
    made.close()


@pytest.fixture
def client(service, tmp_path):
    settings = Settings.load(files_root=str(tmp_path / "files"))
    with TestClient(create_app(settings, service=service, access=Access.KEYS), base_url="http://h") as made:
        yield made


def bearer(service, tenant):
    _, token = service.keys.create(OPERATOR, tenant=tenant, role=Role.SUBMITTER)
    return {"Authorization": f"Bearer {token}"}


def upload(client, headers, data=None, purpose="batch", **fields):
    body = lines([chat("a", "hi")]) if data is None else data
    return client.post(
        "/v1/files", headers=headers, files={"file": ("r.jsonl", body)}, data={"purpose": purpose, **fields}
    )


def make_batch(client, headers, file_id, **fields):
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **fields}
    return client.post("/v1/batches", json=body, headers=headers)


def test_another_tenants_files_and_batches_are_not_there(client, service):
    red, blue = bearer(service, "red"), bearer(service, "blue")
    file_id = upload(client, red).json()["id"]
    batch = make_batch(client, red, file_id).json()
    for method, path in (
        ("GET", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files/{file_id}/content"),
        ("DELETE", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files?after={file_id}"),
        ("GET", f"/v1/batches/{batch['id']}"),
        ("POST", f"/v1/batches/{batch['id']}/cancel"),
        ("GET", f"/v1/batches?after={batch['id']}"),
        ("GET", f"/v1/jobs/{batch['job_id']}"),
        ("GET", "/v1/models/tiny"),
    ):
        assert client.request(method, path, headers=blue).status_code == 404, path
        assert client.request("GET" if method == "DELETE" else method, path, headers=red).status_code == 200, path
    assert make_batch(client, blue, file_id).status_code == 404
    assert client.post("/v1/jobs", json={"inputs": [file_id], "model": "m"}, headers=blue).status_code == 404
    assert client.get("/v1/files", headers=blue).json()["data"] == []
    assert client.get("/v1/batches", headers=blue).json()["data"] == []
    assert client.get("/v1/models", headers=blue).json()["data"] == []
    # a file with the same bytes is not given away either
    sha256 = client.get(f"/v1/files/{file_id}", headers=red).json()["sha256"]
    assert client.get(f"/v1/files?sha256={sha256}", headers=blue).json()["data"] == []
    assert len(client.get(f"/v1/files?sha256={sha256}", headers=red).json()["data"]) == 1


def test_a_viewer_reads_and_changes_nothing(client, service):
    _, token = service.keys.create(OPERATOR, tenant="red", role=Role.VIEWER)
    viewer = {"Authorization": f"Bearer {token}"}
    assert client.get("/v1/files", headers=viewer).status_code == 200
    assert upload(client, viewer).status_code == 403
    assert client.delete("/v1/files/file-x", headers=viewer).status_code == 403


def test_without_a_key_nothing_is_stored(client, tmp_path):
    assert upload(client, {}).status_code == 401
    assert not list((tmp_path / "files").rglob("*.jsonl"))


def test_a_file_stays_while_a_job_reads_it(client, service, tmp_path):
    """At the own door as well; once the job has ended, the file may go."""
    red = bearer(service, "red")
    file_id = upload(client, red, purpose="input").json()["id"]
    job = client.post("/v1/jobs", json={"inputs": [file_id], "model": "org/name"}, headers=red).json()
    assert job["inputs"] == [str(tmp_path / "files" / "uploads" / f"{file_id}.jsonl")]
    assert job["output"] == str(tmp_path / "files" / "results" / job["id"])
    refused = client.delete(f"/v1/files/{file_id}", headers=red)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "file_in_use")
    assert job["id"] in refused.json()["error"]["message"]
    complete(service.ledger, job["id"])
    assert client.delete(f"/v1/files/{file_id}", headers=red).json()["deleted"] is True
    assert not Path(job["inputs"][0]).exists()


def test_one_idempotency_key_makes_one_batch(client, service):
    red = bearer(service, "red")
    file_id = upload(client, red).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    made = [client.post("/v1/batches", json=body, headers=red | {"Idempotency-Key": "k"}).json() for _ in range(2)]
    assert made[0]["id"] == made[1]["id"]
    assert len(client.get("/v1/batches", headers=red).json()["data"]) == 1
    other = client.post("/v1/batches", json=body | {"completion_window": "2d"}, headers=red | {"Idempotency-Key": "k"})
    assert other.status_code == 409


def test_a_file_ends_at_its_time_and_its_bytes_go_with_it(service, tmp_path):
    """The time is the ledger's; a file that an unfinished job reads outlives it."""
    now = [datetime(2030, 1, 1, tzinfo=UTC)]
    ledger = Ledger(service.engine, clock=lambda: now[0])
    store = FileStore(ledger, str(tmp_path / "store"), max_bytes=100)

    def put():
        incoming = store.receive("a.jsonl")
        incoming.write(b"{}\n")
        return incoming.finish("red", "batch", expires_after_s=3600)

    file = put()
    red = Caller("red", Role.VIEWER)
    assert store.get(red, file.id) == file
    now[0] += timedelta(seconds=3601)
    assert store.list(red) == ([], False)
    sweeper = FileSweeper(ledger)
    assert sweeper.tick() == 0  # a job that is being submitted may yet say that it reads it
    now[0] += GRACE
    assert Path(file.location).exists()
    assert sweeper.tick() == 1
    assert not Path(file.location).exists()
    assert _rows(service) == 0


def _rows(service):
    with service.engine.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM files"))


def test_a_sweep_is_bounded_passes_over_what_resists_and_spares_what_is_read(service, tmp_path):
    """Seven files, three at a time: one is read by a job, one cannot be removed, one never ends."""
    now = [datetime(2030, 1, 1, tzinfo=UTC)]
    ledger = Ledger(service.engine, clock=lambda: now[0])
    store = FileStore(ledger, str(tmp_path / "store"), max_bytes=100)

    def put(expires_after_s=3600):
        incoming = store.receive("a.jsonl")
        incoming.write(b"{}\n")
        return incoming.finish("red", "input", expires_after_s=expires_after_s)

    files = [put() for _ in range(6)]
    kept = put(None)
    places = [Path(file.location) for file in files]
    spec, attach = store.use_inputs(Caller("red", Role.ADMIN), make_spec(tmp_path, inputs=(files[0].id,)), "job_reader")
    ledger.submit(spec, tenant="red", job_id="job_reader", attach=attach)
    places[1].unlink()
    places[1].mkdir()  # removing a file there fails

    now[0] += timedelta(seconds=3600) + GRACE
    sweeper = FileSweeper(ledger, limit=3)
    swept = [sweeper.tick() for _ in range(2)]
    assert (sum(swept), max(swept) <= 3) == (4, True)
    assert [place.exists() for place in places] == [True, True, False, False, False, False]
    places[1].rmdir()
    assert sweeper.tick() == 1  # bytes that are gone already are no obstacle
    assert _rows(service) == 2
    complete(ledger, "job_reader")
    assert sweeper.tick() == 1
    assert not places[0].exists()
    assert store.get(Caller("red", Role.ADMIN), kept.id) == kept


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "10"}, "expires_after"),
        ({"expires_after[anchor]": "created_at"}, "expires_after"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"purpose": ""}, "purpose"),
    ],
)
def test_a_refused_upload_leaves_nothing_behind(client, service, tmp_path, fields, param):
    refused = upload(client, bearer(service, "red"), **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert [path for path in (tmp_path / "files").rglob("*") if path.is_file()] == []


def test_a_line_that_no_memory_should_hold_is_refused(client, service, tmp_path):
    """Wherever chunks are cut: the longest line is found across them."""
    red = bearer(service, "red")
    assert upload(client, red, b"{}\n" + b"x" * MAX_LINE_BYTES + b"\n{}").status_code == 200
    refused = upload(client, red, b"{}\n" + b"x" * (MAX_LINE_BYTES + 1) + b"\n{}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "line_too_long")
    assert upload(client, red, b"x" * (MAX_LINE_BYTES + 1), purpose="input").status_code == 200


@pytest.mark.parametrize("name", ["../../evil.jsonl", "/etc/passwd", "a\\..\\b.parquet", "ü.jsonl", "x" * 500, ""])
def test_a_name_never_chooses_the_place(client, service, tmp_path, name):
    body = f'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n{{}}\n\r\n--b--\r\n'
    headers = bearer(service, "red") | {"Content-Type": "multipart/form-data; boundary=b"}
    response = client.post("/v1/files", content=body.encode(), headers=headers)
    assert response.status_code == 200, response.text
    (stored,) = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path.suffix not in {".db", ".db-wal"} and "batchinfer.db" not in path.name
    ]
    assert stored.parent == tmp_path / "files" / "uploads"
    assert stored.stem.startswith("file-")


@pytest.mark.parametrize(
    ("content_type", "body", "code"),
    [
        ("application/json", b"{}", "invalid_spec"),
        ("multipart/form-data", b"", "invalid_spec"),
        ("multipart/form-data; boundary=b", b"", "invalid_form"),
        ("multipart/form-data; boundary=b", b"nonsense", "invalid_form"),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx', "invalid_form"),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n--b--', "missing_file"),
    ],
)  # fmt: skip
def test_what_is_no_form_is_refused(client, service, tmp_path, content_type, body, code):
    headers = bearer(service, "red") | {"Content-Type": content_type}
    refused = client.post("/v1/files", content=body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
    assert [path for path in (tmp_path / "files").rglob("*") if path.is_file()] == []


def test_a_field_that_is_too_long_or_too_many_are_refused(client, service):
    red = bearer(service, "red")
    assert upload(client, red, other="x" * 5000).status_code == 413
    assert upload(client, red, **{f"f{number}": "x" for number in range(20)}).status_code == 413
