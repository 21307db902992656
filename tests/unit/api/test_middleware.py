"""What surrounds every request."""

import pytest
from fastapi.testclient import TestClient

from batchinfer.api.access import Access
from batchinfer.api.app import create_app
from batchinfer.api.middleware import is_loopback
from batchinfer.settings import Settings


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_addresses_of_this_machine(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "127.0.0.1.example.org", "localhost.evil"]
)
def test_addresses_that_others_reach(host):
    assert not is_loopback(host)


def test_a_clients_request_id_is_kept(client):
    assert client.get("/healthz", headers={"X-Request-ID": "trace-1:2.3"}).headers["X-Request-ID"] == "trace-1:2.3"


@pytest.mark.parametrize("sent", ["a b", "x" * 129, "é".encode(), 'x";evil'])
def test_a_strange_request_id_is_replaced(client, sent):
    """What comes back, and goes into the log, cannot be made up freely."""
    assert client.get("/healthz", headers={"X-Request-ID": sent}).headers["X-Request-ID"].startswith("req_")


def test_request_ids_differ(client):
    assert len({client.get("/healthz").headers["X-Request-ID"] for _ in range(20)}) == 20


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "10.0.0.1:8000", ""])
def test_a_name_that_was_bound_to_loopback_is_refused(client, host):
    """DNS rebinding: a page's own name resolves to 127.0.0.1, and its script would reach the API without keys."""
    response = client.get("/v1/jobs", headers={"Host": host})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:9", "[::1]:8000"])
def test_names_of_this_machine_are_answered(client, host):
    assert client.get("/healthz", headers={"Host": host}).status_code == 200


def test_an_open_server_answers_to_every_name(service):
    app = create_app(Settings.load(), service=service, access=Access.INSECURE)
    with TestClient(app, base_url="http://batch.example.org") as client:
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("path", ["/v1/jobs", "/healthz", "/nowhere"])
def test_every_answer_has_security_headers(client, path):
    headers = client.get(path).headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cache-Control"] == "no-store"
