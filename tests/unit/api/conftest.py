import pytest
from fastapi.testclient import TestClient

from batchinfer.api.app import create_app
from batchinfer.jobs.service import JobService
from batchinfer.settings import Settings


@pytest.fixture
def service(sqlite_url):
    made = JobService.connect(sqlite_url, "memory://")
    yield made
    made.close()


@pytest.fixture
def client(service):
    app = create_app(Settings.load(), service=service, max_body_bytes=10_000)
    with TestClient(app, base_url="http://127.0.0.1:8000") as made:
        yield made
