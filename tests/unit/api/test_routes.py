"""Health, documentation and shapes."""

from batchinfer import __version__
from batchinfer.db import migrate
from batchinfer.jobs.views import JobView
from tests.played import make_spec, plan


def test_health_says_that_the_process_answers(client):
    assert client.get("/healthz").json() == {"status": "ok", "version": __version__}


def test_readiness_looks_at_the_database_and_its_schema(client):
    response = client.get("/readyz")
    assert response.status_code == 200
    assert response.json() == {"status": "ready", "checks": {"database": "ok", "migrations": "ok"}}


def test_a_database_of_another_version_is_not_ready(client, service):
    migrate.downgrade(service.engine, "base")
    response = client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["status"] == "not_ready"
    assert "batchinfer db upgrade" in response.json()["checks"]["migrations"]
    assert client.get("/healthz").status_code == 200


def test_metrics_count_jobs_and_waiting_shards(client, service, tmp_path):
    first, _ = service.submit(make_spec(tmp_path), base=None)
    plan(service.ledger, first.id, num_rows=10, num_shards=5)
    (tmp_path / 'a"b').write_bytes(b"GGUF")
    other, _ = service.submit(make_spec(tmp_path, model=str(tmp_path / 'a"b')), base=None)
    plan(service.ledger, other.id, num_rows=2, num_shards=1)
    service.submit(make_spec(tmp_path), base=None)
    service.ledger.register_worker("w", hostname="h", pid=1, nanos_per_hour=1)
    lines = client.get("/metrics").text.splitlines()
    assert 'batchinfer_jobs{state="queued"} 2.0' in lines
    assert 'batchinfer_jobs{state="validating"} 1.0' in lines
    assert 'batchinfer_pending_shards{model="org/name"} 5.0' in lines
    # quotes in a label are escaped as the text format wants it
    assert f'batchinfer_pending_shards{{model="{tmp_path}/a\\"b"}} 1.0' in lines
    assert "batchinfer_workers 1.0" in lines


def test_the_documentation_names_every_route_and_the_error_shape(client):
    assert client.get("/docs").status_code == 200
    document = client.get("/openapi.json").json()
    paths = {path: set(methods) for path, methods in document["paths"].items()}
    job = "/v1/jobs/{job_id}"
    assert paths["/v1/jobs"] == {"get", "post"}
    assert paths[job] == {"get", "patch"}
    assert {path for path in paths if path.startswith(job + "/")} == {
        f"{job}/{tail}"
        for tail in (
            "errors",
            "results",
            "results/{name}",
            "verify",
            "cost",
            "rows",
            "events",
            "cancel",
            "pause",
            "resume",
            "retry",
            "clone",
            "forecast",
        )
    }
    assert {"/healthz", "/readyz"} <= set(paths)
    submit = document["paths"]["/v1/jobs"]["post"]
    errors = ("400", "401", "403", "404", "409", "413", "422", "429", "503")
    assert set(submit["responses"]) == {"202", *errors}
    for status in errors:
        schema = submit["responses"][status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorBody"}
    assert "Idempotency-Key" in [parameter["name"] for parameter in submit["parameters"]]


def test_a_job_is_what_its_schema_says(client, service, tmp_path):
    """Amounts are text, so that no reader rounds them; times have a zone."""
    view, _ = service.submit(make_spec(tmp_path, budget_usd="0.1"), base=None)
    body = client.get(f"/v1/jobs/{view.id}").json()
    assert body["cost"]["budget_usd"] == "0.100000000"
    assert body["created_at"].endswith("Z")
    assert JobView.model_validate(body) == service.get(view.id)
