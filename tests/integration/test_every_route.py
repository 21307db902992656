"""Every route of the app, called with another tenant's key: what belongs to someone else is not there.

The routes are read from the app, so a new one fails here until it is known how to call it: put the ids of the path into
:data:`IDS`, and a body that is valid into :data:`BODIES`.
"""

import json

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from sqlalchemy import select
from starlette.routing import Route

from batchinfer.api.access import PUBLIC_PATHS, Access
from batchinfer.api.app import create_app
from batchinfer.db.tables import Base
from batchinfer.jobs.caller import Caller, Role
from batchinfer.jobs.service import JobService
from batchinfer.settings import Settings
from tests.played import complete, make_spec

SECRET = "only-for-red"
_BODY = {"model": "org/only-of-red", "messages": [{"role": "user", "content": "hi"}]}
LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": _BODY}).encode()
BATCH = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}

SCHEDULE = {"name": "nightly", "cron": "@daily", "job": {"inputs": ["s3://b/p.parquet"], "model": "org/name"}}

# path parameter -> how to get red's id of it
IDS = {
    "job_id": lambda red: red["job"],
    "key_id": lambda red: red["key"],
    "tenant": lambda red: "red",
    "file_id": lambda red: red["file"],
    "batch_id": lambda red: red["batch"],
    "schedule": lambda red: red["schedule"],
    "webhook_id": lambda red: red["webhook"],
    "delivery_id": lambda red: red["delivery"],
    "model": lambda red: "org/only-of-red",
    "name": lambda red: "shard-00000.parquet",
}
# what a route needs besides its path, so that the answer is not about the body
BODIES = {
    ("POST", "/v1/files"): lambda red: {"files": {"file": ("a.jsonl", LINE)}, "data": {"purpose": "batch"}},
    ("POST", "/v1/batches"): lambda red: {"json": BATCH | {"input_file_id": red["file"]}},
    ("POST", "/v1/jobs"): lambda _: {"json": {"inputs": ["s3://b/p.parquet"], "model": "org/name"}},
    ("POST", "/v1/jobs:estimate"): lambda red: {"json": {"inputs": [red["file"]], "model": "m"}},
    ("POST", "/v1/jobs:explain"): lambda red: {"json": {"inputs": [red["file"]], "model": "m"}},
    ("PATCH", "/v1/jobs/{job_id}"): lambda _: {"json": {"name": "mine now"}},
    ("POST", "/v1/schedules"): lambda _: {"json": SCHEDULE},
    ("POST", "/v1/schedules/{schedule}/backfill"): lambda _: {"json": {"start": "2026-01-01", "end": "2026-01-02"}},
    ("POST", "/v1/keys"): lambda _: {"json": {"tenant": "red", "role": "viewer"}},
    ("POST", "/v1/tenants"): lambda _: {"json": {"id": "green"}},
    ("PUT", "/v1/prices/models"): lambda _: {"json": {"model": "m", "input_usd": "1", "output_usd": "2"}},
    ("PUT", "/v1/prices/devices"): lambda _: {"json": {"device": "cuda", "usd_per_hour": "3"}},
    ("PUT", "/v1/budgets"): lambda _: {"json": {"tenant": "red", "limit_usd": "5"}},
    ("POST", "/v1/webhooks"): lambda _: {"json": {"url": "http://127.0.0.1:9/blue"}},
    ("POST", "/submit"): lambda _: {"data": {"inputs": "s3://b/p.parquet", "model": "org/name"}},
    ("PATCH", "/v1/tenants/{tenant}"): lambda _: {"json": {"disabled": True}},
}
# routes for the platform alone: a tenant's key is told so, whatever it asks for
PLATFORM = {
    ("GET", "/metrics"),
    ("GET", "/v1/queue"),
    ("GET", "/v1/workers"),
    ("GET", "/workers"),
    ("GET", "/v1/tenants"),
    ("POST", "/v1/tenants"),
    ("PUT", "/v1/prices/models"),
    ("PUT", "/v1/prices/devices"),
}
# pages about the program itself
PAGES = {"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}
# routes without a path parameter that name another tenant's thing in the body
NAMES_RED = {("POST", "/v1/keys"), ("POST", "/v1/batches"), ("PUT", "/v1/budgets"),
             ("POST", "/v1/jobs:estimate"), ("POST", "/v1/jobs:explain")}  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    made = JobService.connect(f"sqlite:///{tmp_path_factory.mktemp('walk') / 'b.db'}", "memory://")
    for tenant in ("red", "blue"):
        made.tenants.add(Caller.operator(), tenant, input_roots=["/", "s3://b"], output_roots=["/", "s3://b"])
    yield made
    made.close()


@pytest.fixture(scope="module")
def red(app, service, tmp_path_factory):
    """What the tenant red has."""
    with clients_of(app, service, "red") as client:
        name = f"{SECRET}.jsonl"
        file = client.post("/v1/files", files={"file": (name, LINE)}, data={"purpose": "batch"}).json()
        named = SCHEDULE | {"job": SCHEDULE["job"] | {"name": SECRET}}
        schedule = client.post("/v1/schedules", json=named).json()
        # nobody listens there
        hook = client.post("/v1/webhooks", json={"url": f"http://127.0.0.1:9/{SECRET}"}).json()
        delivery = client.post(f"/v1/webhooks/{hook['id']}/test").json()
        batch = client.post("/v1/batches", json=BATCH | {"input_file_id": file["id"], "metadata": {"a": SECRET}}).json()
    acting = service.acting_for(Caller("red", Role.ADMIN))
    spec = make_spec(tmp_path_factory.mktemp(SECRET), name=SECRET, tags={"a": SECRET}, model="org/only-of-red")
    view, _ = acting.submit(spec, base=None)
    service.cancel(service.ledger.list_jobs(limit=2)[1].id)  # the batch, so that the other job is planned first
    complete(service.ledger, view.id, errored=1)
    record, _ = acting.keys.create(acting.caller, tenant="red", role=Role.VIEWER, name=SECRET)
    return {
        "job": view.id,
        "key": record.id,
        "file": file["id"],
        "batch": batch["id"],
        "schedule": schedule["id"],
        "webhook": hook["id"],
        "delivery": delivery["id"],
    }


@pytest.fixture(scope="module")
def app(service):
    return create_app(Settings.load(webhook_networks="127.0.0.0/8"), service=service, access=Access.KEYS)


def clients_of(app, service, tenant, role=Role.ADMIN):
    token = service.keys.create(Caller.operator(), tenant=tenant, role=role)[1]
    return TestClient(app, headers={"Authorization": f"Bearer {token}"}, raise_server_exceptions=False)


def flat(routes):
    """Routes, and those of included routers, which FastAPI keeps as they were given."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            assert not route.include_context.prefix, "this test reads paths as routers have them"
            yield from flat(included.routes)


def routes(app):
    """``(method, path, names of path parameters)`` of all there is."""
    found = []
    for route in flat(app.routes):
        if isinstance(route, APIRoute):
            names = [param.name for param in route.dependant.path_params]
            names += [p.name for d in route.dependant.dependencies for p in d.path_params]
            found += [(method, route.path.replace(":path}", "}"), set(names)) for method in route.methods]
        else:
            assert isinstance(route, Route), f"this test does not know how to walk {route!r}"
            assert route.path in PAGES, f"this test does not know the page {route.path}"
    # what deletes comes last, or there is nothing left to look at
    return sorted(found, key=lambda route: (route[0] == "DELETE", route[:2]))


def ask(client, method, path, names, red):
    missing = names - set(IDS)
    assert not missing, f"{method} {path}: teach this test the path parameters {missing}"
    where = path.format(**{name: IDS[name](red) for name in names})
    return client.request(method, where, **BODIES.get((method, path), lambda _: {})(red))


def test_there_are_routes(app):
    """The walk misses none of those that the documentation names."""
    documented = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    assert len(documented) > 20
    assert documented <= {(method, path) for method, path, _ in routes(app)}


def test_another_tenants_key_sees_nothing_anywhere(app, service, red):
    before = service.job(red["job"])
    with clients_of(app, service, "blue") as client:
        for method, path, names in routes(app):
            response = ask(client, method, path, names, red)
            where = f"{method} {path} answered {response.status_code}: {response.text[:300]}"
            if path in PUBLIC_PATHS:
                assert response.status_code == 200, where
            elif (method, path) in PLATFORM:
                assert response.status_code == 403, where
            elif names or (method, path) in NAMES_RED:
                assert response.status_code == 404, where
            else:
                assert response.status_code < 300, where
            assert SECRET not in response.text, where
            # a refusal may repeat the id that was asked for
            assert names or (method, path) in NAMES_RED or not [x for x in red.values() if x in response.text], where
    assert service.job(red["job"]) == before
    assert service.keys.get(Caller.operator(), red["key"]).revoked_at is None


def test_the_owner_is_not_told_that_nothing_is_there(app, service, red):
    """The walk above would also pass if the routes never found anything."""
    with clients_of(app, service, "red") as client:
        for method, path, names in routes(app):
            if names:
                # the job was played: it left no files to verify, and nobody forecast it
                may_miss = {
                    ("PATCH", "/v1/tenants/{tenant}"),
                    ("DELETE", "/v1/budgets/{tenant}"),
                    ("GET", "/v1/jobs/{job_id}/verify"),
                    ("GET", "/v1/jobs/{job_id}/forecast"),
                }
                status = ask(client, method, path, names, red).status_code
                assert status not in (401, 403, 404) or (method, path) in may_miss, (method, path)


def test_no_route_answers_without_a_key(app, red):
    with TestClient(app) as client:
        for method, path, names in routes(app):
            if path not in PUBLIC_PATHS:
                assert ask(client, method, path, names, red).status_code == 401, (method, path)
        for path in PAGES:
            assert client.get(path).status_code == 401


def test_a_viewer_changes_nothing(app, service, red):
    with clients_of(app, service, "red", Role.VIEWER) as client:
        for method, path, names in routes(app):
            if method not in ("GET", "HEAD") and path not in PUBLIC_PATHS:
                assert ask(client, method, path, names, red).status_code == 403, (method, path)


def dump(engine):
    """Every row of every table, without the one time that a request is known to leave behind."""
    with engine.connect() as connection:
        tables = {}
        for table in Base.metadata.sorted_tables:
            columns = [column for column in table.columns if (table.name, column.name) != ("api_keys", "last_used_at")]
            tables[table.name] = sorted(map(repr, connection.execute(select(*columns))))
        return tables


@pytest.mark.parametrize("tenant", ["red", None])
def test_a_get_changes_nothing(app, service, red, tenant):
    """However often people poll: no GET writes, neither a tenant's nor the platform's."""
    statuses = set()
    with clients_of(app, service, tenant) as client:
        before = dump(service.engine)
        assert sum(map(len, before.values())) > 20
        for method, path, names in routes(app):
            if method in ("GET", "HEAD"):
                for _ in range(2):
                    statuses.add(ask(client, method, path, names, red).status_code)
                now = dump(service.engine)
                changed = [name for name, rows in now.items() if rows != before[name]]
                assert not changed, f"{method} {path} changed {changed}"
    assert statuses >= {200}
    assert not statuses & {401, 500}
