"""The API against its own OpenAPI document: whatever a stranger sends, the answer is one that the document names.

Requests are made from the document, good and bad ones, for every operation; half of them name a job that is there.
"""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from batchinfer.api.access import Access
from batchinfer.api.app import create_app
from batchinfer.jobs.caller import Caller, Role
from batchinfer.jobs.service import JobService
from batchinfer.settings import Settings
from tests.played import complete, make_spec

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
OPERATIONS = [
    (method.upper(), path)
    for path, methods in create_app(Settings.load()).openapi()["paths"].items()
    for method in methods
]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    made = JobService.connect(f"sqlite:///{tmp_path_factory.mktemp('openapi') / 'b.db'}", "memory://")
    yield made
    made.close()


@pytest.fixture(scope="module")
def job_id(service, tmp_path_factory):
    """A job that has ended, so that its stream of events does."""
    view, _ = service.submit(make_spec(tmp_path_factory.mktemp("job")), base=None)
    complete(service.ledger, view.id, errored=1)
    return view.id


@pytest.fixture(scope="module")
def openapi(service, tmp_path_factory):
    app = create_app(Settings.load(home=tmp_path_factory.mktemp("home")), service=service, access=Access.KEYS)
    token = service.keys.create(Caller.operator(), tenant=None, role=Role.ADMIN)[1]
    document = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"Authorization": f"Bearer {token}"})
    return document, {"Authorization": f"Bearer {token}"}


def test_the_document_names_every_operation():
    assert len(OPERATIONS) > 50
    assert ("POST", "/v1/jobs") in OPERATIONS


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda value: value)
def test_every_answer_is_one_that_the_document_names(openapi, job_id, method, path):
    document, headers = openapi
    operation = document[path][method]

    @settings(max_examples=20, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def ask(case):
        case.call_and_validate(headers=headers, checks=CHECKS)
        if "job_id" in (case.path_parameters or {}):
            case.path_parameters["job_id"] = job_id
            case.call_and_validate(headers=headers, checks=[c for c in CHECKS if c is not negative_data_rejection])

    ask()
