"""Every failure, foreseen or not, is ``{"error": {message, type, param, code}}`` with a request id."""

import json
import logging

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from batchinfer.api.app import create_app
from batchinfer.api.errors import status_of
from batchinfer.errors import (
    ConflictError,
    EngineDiedError,
    FencedError,
    InputError,
    InvalidSpecError,
    ModelError,
    NotFoundError,
)
from batchinfer.settings import Settings

JSON = {"Content-Type": "application/json"}
SPEC = {"inputs": ["s3://bucket/p.parquet"], "model": "org/name"}


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.headers["X-Request-ID"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert body["error"]["message"]
    return body["error"]


def test_a_route_that_does_not_exist(client):
    error = error_of(client.get("/v1/nonsense"), 404)
    assert error["code"] == "route_not_found"
    assert "/v1/nonsense" in error["message"]


def test_a_method_that_a_route_does_not_have(client):
    response = client.put("/v1/jobs/job_1", json={})
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["Allow"]


def test_a_body_that_is_not_json(client):
    response = client.post("/v1/jobs", content=b'{"inputs": [', headers=JSON)
    assert error_of(response, 400)["code"] == "invalid_json"


@pytest.mark.parametrize("body", [b"\xff", b'{"a": ' * 1500, b"[" * 9000])
def test_a_body_that_no_parser_takes(client, body):
    assert error_of(client.post("/v1/jobs", content=body, headers=JSON), 400)["code"] == "invalid_json"


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_idempotency_keys_have_a_length(client, key):
    error = error_of(client.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": key}), 422)
    assert "dempotency" in error["param"]


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'"text"', b"3"])
def test_a_body_that_is_no_job(client, body):
    error_of(client.post("/v1/jobs", content=body, headers=JSON), 422)


def test_a_form_is_no_json(client):
    """Only JSON is taken: a web page can send a form to localhost without being asked, but not JSON."""
    error_of(client.post("/v1/jobs", data={"model": "x"}), 422)
    error_of(client.post("/v1/jobs", content=json.dumps(SPEC), headers={"Content-Type": "text/plain"}), 422)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"inputs": []}, "inputs"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 10**24}, "max_tokens"),
        ({"max_model_len": 10**24}, "max_model_len"),
        ({"top_k": 10**24}, "top_k"),
        ({"limit": 10**24}, "limit"),
        ({"temperature": 1e400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"priority": 1000}, "priority"),
        ({"deadline": "tomorrow"}, "deadline"),
        ({"deadline": "2020-01-01T00:00:00Z"}, "deadline"),
        ({"deadline": "2020-01-01T00:00:00"}, "deadline"),
        ({"deadline": "999999999999d"}, "deadline"),
        ({"deadline": "9999-12-31T23:59:59-23:00"}, "deadline"),
        ({"deadline": "0001-01-01T00:00:00+23:00"}, "deadline"),
        ({"budget_usd": 0}, "budget_usd"),
        ({"dtype": "int3"}, "dtype"),
        ({"tags": {"a": 1}}, "tags.a"),
        ({"maxtokens": 3}, "maxtokens"),
        ({"inputs": ["prompts.parquet"]}, "inputs"),
        ({"output": "out"}, "output"),
        ({"model": "./model.gguf"}, "model"),
        ({"inputs": ["/nul\0/x.parquet"]}, None),
        ({"inputs": ["/\ud800.parquet"]}, None),
        ({"output": "s3://b/" + "x" * 2000}, None),
        ({"\ud800": 1}, None),
    ],
)
def test_a_wrong_field_is_named(client, change, param):
    body = json.dumps(SPEC | change).replace("Infinity", "1e400")
    error = error_of(client.post("/v1/jobs", content=body, headers=JSON), 422)
    assert error["param"] == param
    assert error["code"].startswith("invalid_")


def test_fields_that_exclude_each_other_are_both_named(client):
    error = error_of(client.post("/v1/jobs", json=SPEC | {"template": "x", "prompt_column": "p"}), 422)
    assert "prompt_column and template" in error["message"]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "state=asleep"])
def test_wrong_queries(client, query):
    assert error_of(client.get(f"/v1/jobs?{query}"), 422)["param"] == query.split("=")[0]


@pytest.mark.parametrize("job_id", ["job_0", "%00", "a b", "x" * 200, "..%2f..", "'; drop table jobs"])
@pytest.mark.parametrize("tail", ["", "/errors", "/results", "/cost"])
def test_a_job_that_does_not_exist(client, job_id, tail):
    error_of(client.get(f"/v1/jobs/{job_id}{tail}"), 404)


@pytest.mark.parametrize("action", ["cancel", "pause", "resume", "retry"])
def test_steering_a_job_that_does_not_exist(client, action):
    assert error_of(client.post(f"/v1/jobs/job_0/{action}"), 404)["code"] == "not_found"


@pytest.mark.parametrize("body", [{"statuses": []}, {"statuses": ["succeeded"]}, {"status": ["errored"]}])
def test_a_retry_of_what_cannot_be_retried(client, body):
    error_of(client.post("/v1/jobs/job_0/retry", json=body), 422)


def test_a_body_that_is_too_large(client):
    body = json.dumps(SPEC | {"template": "x" * 20_000})
    assert error_of(client.post("/v1/jobs", content=body, headers=JSON), 413)["code"] == "body_too_large"


def test_a_body_that_is_too_large_and_does_not_say_so(client):
    """Chunked transfer announces no length; the limit holds nevertheless, and reading stops at once."""
    sent = []

    def chunks():
        for number in range(1000):
            sent.append(number)
            yield b"x" * 1000

    assert error_of(client.post("/v1/jobs", content=chunks(), headers=JSON), 413)["code"] == "body_too_large"


def test_a_database_that_is_away_is_503_and_says_when_to_come_back(client, service, monkeypatch, caplog):
    def away(*_args, **_kwargs):
        raise OperationalError("SELECT 1", {}, Exception("postgresql://user:secret@host refused"))

    monkeypatch.setattr(service.ledger, "get_job", away)
    response = client.get("/v1/jobs/job_1/cost")
    assert error_of(response, 503)["code"] == "database_unavailable"
    assert int(response.headers["Retry-After"]) > 0
    assert "secret" not in response.text + caplog.text


def test_too_many_requests_for_the_database_is_503(client, service, monkeypatch):
    def full(*_args, **_kwargs):
        raise PoolTimeoutError("QueuePool limit reached")

    monkeypatch.setattr(service.ledger, "get_job", full)
    error_of(client.get("/v1/jobs/job_1/cost"), 503)


def test_a_fault_of_ours_is_500_and_is_in_the_log_under_its_id(service, monkeypatch, caplog):
    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("a secret detail")

    monkeypatch.setattr(service.ledger, "get_job", broken)
    app = create_app(Settings.load(), service=service)
    with TestClient(app, base_url="http://localhost") as client, caplog.at_level(logging.ERROR):
        response = client.get("/v1/jobs/job_1/cost")
    error = error_of(response, 500)
    assert error["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["X-Request-ID"] in error["message"]
    assert response.headers["X-Request-ID"] in caplog.text
    assert "a secret detail" in caplog.text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotFoundError("x"), 404),
        (ConflictError("x"), 409),
        (FencedError("x"), 409),
        (InvalidSpecError("x"), 422),
        (InputError("x"), 422),
        (ModelError("x"), 422),
        (EngineDiedError("x"), 500),
    ],
)
def test_statuses_of_deliberate_errors(error, status):
    assert status_of(error) == status
