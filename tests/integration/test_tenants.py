"""Tenants and keys: who is let in, and who sees what. On SQLite and on PostgreSQL."""

import base64
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from batchinfer.api.access import Access
from batchinfer.api.app import create_app
from batchinfer.db.tables import ApiKeyRow
from batchinfer.errors import ConflictError, ForbiddenError, InvalidSpecError, NotFoundError, UnauthorizedError
from batchinfer.jobs.caller import Caller, Role
from batchinfer.jobs.keys import Keys
from batchinfer.jobs.service import JobService
from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.tenants import Tenants
from batchinfer.settings import Settings

pytestmark = pytest.mark.service
OPERATOR = Caller.operator()
SPEC = {"inputs": ["s3://bucket/p.parquet"], "model": "org/name"}


@pytest.fixture
def service(database_url):
    made = JobService.connect(database_url, "memory://")
    for tenant in ("red", "blue"):
        made.tenants.add(OPERATOR, tenant, input_roots=["s3://bucket"], output_roots=["s3://bucket"])
    yield made
    made.close()


def open_client(service, access=Access.KEYS, **headers):
    return TestClient(create_app(Settings.load(), service=service, access=access), base_url="http://h", headers=headers)


def key(service, tenant, role=Role.SUBMITTER, **more):
    return service.keys.create(OPERATOR, tenant=tenant, role=role, **more)[1]


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def outcome(response):
    return response.status_code, response.json().get("error", {}).get("code")


# -- what a key is ----------------------------------------------------------------------------------------------------
def test_a_secret_is_nowhere_in_the_database(service):
    record, token = service.keys.create(OPERATOR, tenant="red", role=Role.ADMIN, name="n", scopes=["jobs:read"])
    kind, key_id, secret = token.split("_")
    assert (kind, key_id) == ("bi", record.id)
    assert len(secret) * 5.95 > 255  # bits: 62 letters
    with service.engine.connect() as connection:
        stored = [str(value) for row in connection.execute(select(ApiKeyRow)) for value in row]
    assert not [value for value in stored if secret in value]
    assert len({key(service, "red") for _ in range(50)}) == 50


@pytest.mark.parametrize(
    "spoil",
    [
        lambda token: token[:-1] + ("a" if token[-1] != "a" else "b"),
        lambda token: token + "a",
        lambda token: "bi_" + "0" * 12 + token[15:],
        lambda token: token.upper(),
        lambda _: "",
        lambda _: "bi__",
        lambda _: "sk-something",
        lambda token: token + "\n",
        lambda token: token.replace("bi_", "bi_%"),
    ],
)
def test_a_key_that_is_almost_right_is_wrong(service, spoil):
    with pytest.raises(UnauthorizedError) as caught:
        service.keys.authenticate(spoil(key(service, "red")))
    assert caught.value.code == "invalid_api_key"


def test_a_key_ends_when_it_expires_or_is_revoked_and_its_tenant_can_be_disabled(service):
    now = datetime.now(UTC)
    keys = [Keys(service.engine, clock=lambda moment=moment: moment) for moment in (now, now + timedelta(hours=2))]
    record, token = keys[0].create(OPERATOR, tenant="red", role=Role.VIEWER, lifetime=timedelta(hours=1))
    assert keys[0].authenticate(token) == Caller("red", Role.VIEWER, record.id)
    with pytest.raises(UnauthorizedError, match="expired"):
        keys[1].authenticate(token)
    service.tenants.change(OPERATOR, "red", is_disabled=True)
    with pytest.raises(UnauthorizedError, match="disabled"):
        keys[0].authenticate(token)
    service.tenants.change(OPERATOR, "red", is_disabled=False)
    assert keys[0].authenticate(token).tenant == "red"
    first = keys[0].revoke(OPERATOR, record.id)
    assert keys[1].revoke(OPERATOR, record.id) == first
    with pytest.raises(UnauthorizedError, match="revoked"):
        keys[0].authenticate(token)


def test_use_is_noted_once_a_minute(service):
    moments = [datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds) for seconds in (0, 59, 61)]
    record, token = service.keys.create(OPERATOR, tenant="red", role=Role.VIEWER)
    seen = []
    for moment in moments:
        Keys(service.engine, clock=lambda moment=moment: moment).authenticate(token)
        seen.append(service.keys.get(OPERATOR, record.id).last_used_at)
    assert seen == [moments[0], moments[0], moments[2]]


def test_a_rotated_key_and_its_successor_are_both_good_for_the_overlap(service):
    now = datetime.now(UTC)
    at = {h: Keys(service.engine, clock=lambda h=h: now + timedelta(hours=h)) for h in (0, 1, 3)}
    old, old_token = at[0].create(OPERATOR, tenant="red", role=Role.ADMIN, scopes=["jobs:read"], rate_per_minute=7)
    new, token = at[0].rotate(OPERATOR, old.id, overlap=timedelta(hours=2))
    assert (new.tenant, new.role, new.scopes, new.rate_per_minute) == ("red", Role.ADMIN, ("jobs:read",), 7)
    assert at[1].authenticate(old_token).tenant == at[1].authenticate(token).tenant == "red"
    with pytest.raises(UnauthorizedError):
        at[3].authenticate(old_token)
    assert at[3].authenticate(token).key_id == new.id
    with pytest.raises(ConflictError):
        at[0].rotate(OPERATOR, old.id, overlap=timedelta(hours=1))


# -- who may make which key -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("caller", "asked"),
    [
        (Caller("red", Role.SUBMITTER), {"tenant": "red", "role": Role.VIEWER}),
        (Caller("red", Role.VIEWER), {"tenant": "red", "role": Role.VIEWER}),
        (Caller("red", Role.ADMIN), {"tenant": None, "role": Role.VIEWER}),
        (Caller("red", Role.ADMIN, "k", ("keys:write",)), {"tenant": "red", "role": Role.VIEWER}),
        (Caller("red", Role.ADMIN, "k", ("keys:write",)), {"tenant": "red", "role": Role.VIEWER, "scopes": ["*:*"]}),
    ],
)
def test_nobody_makes_a_key_that_may_more_than_they(service, caller, asked):
    with pytest.raises(ForbiddenError):
        service.keys.create(caller, **asked)
    assert not service.keys.exist()


def test_keys_of_other_tenants_are_not_there(service):
    red, blue = Caller("red", Role.ADMIN), Caller("blue", Role.ADMIN)
    record, _ = service.keys.create(red, tenant="red", role=Role.ADMIN)
    service.keys.create(OPERATOR, tenant=None, role=Role.ADMIN)
    assert service.keys.list(red) == [record]
    assert service.keys.list(blue) == []
    assert len(service.keys.list(OPERATOR)) == 2
    for steal in (
        lambda: service.keys.get(blue, record.id),
        lambda: service.keys.revoke(blue, record.id),
        lambda: service.keys.rotate(blue, record.id, overlap=timedelta(0)),
        lambda: service.keys.create(blue, tenant="red", role=Role.VIEWER),
        lambda: service.tenants.get(blue, "red"),
    ):
        with pytest.raises(NotFoundError):
            steal()
    assert service.keys.get(red, record.id).revoked_at is None


@pytest.mark.parametrize("scope", ["jobs", "jobs:delete", "Jobs:read", ":read", "jobs:read:x", "a b:read", "x" * 99])
def test_a_scope_that_is_none(service, scope):
    with pytest.raises(InvalidSpecError):
        service.keys.create(OPERATOR, tenant="red", role=Role.VIEWER, scopes=[scope])


@pytest.mark.parametrize("name", ["", "Red", "a b", "-x", "x" * 41, "a/b", "ü", "default", "red"])
def test_a_tenant_that_cannot_be_added(service, name):
    with pytest.raises((InvalidSpecError, ConflictError)):
        service.tenants.add(OPERATOR, name)


def test_only_the_platform_manages_tenants(service):
    for caller in (Caller("red", Role.ADMIN), Caller(None, Role.SUBMITTER)):
        for act in (
            lambda caller=caller: service.tenants.add(caller, "x"),
            lambda caller=caller: service.tenants.list(caller),
            lambda caller=caller: service.tenants.change(caller, "red", name="x"),
        ):
            with pytest.raises(ForbiddenError):
                act()
    assert [tenant.id for tenant in service.tenants.list(OPERATOR)] == ["blue", "default", "red"]
    assert Tenants(service.engine).change(OPERATOR, "default", input_roots=["/in"]).input_roots == ("/in",)


# -- at the door ------------------------------------------------------------------------------------------------------
def test_without_a_key_there_is_nothing_but_health(service):
    with open_client(service) as client:
        for path in ("/v1/jobs", "/metrics", "/docs", "/openapi.json", "/", "/nowhere"):
            response = client.get(path)
            assert outcome(response) == (401, "missing_api_key"), path
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert outcome(client.get("/v1/jobs", headers=bearer("bi_nonsense"))) == (401, "invalid_api_key")
        assert outcome(client.get("/v1/jobs", headers=bearer("sk-x"))) == (401, "invalid_api_key")
        assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200


def test_a_browser_asks_for_the_key_and_sends_it_as_a_password(service):
    with open_client(service) as client:
        response = client.get("/v1/jobs", headers={"Accept": "text/html,*/*"})
        assert response.headers["WWW-Authenticate"].startswith("Basic ")
        basic = base64.b64encode(f"me:{key(service, 'red')}".encode()).decode()
        assert client.get("/v1/jobs", headers={"Authorization": f"Basic {basic}"}).status_code == 200
        assert client.get("/v1/jobs", headers={"Authorization": "Basic %%%"}).status_code == 401


def test_the_loopback_address_is_open_until_the_first_key(service):
    with open_client(service, Access.LOOPBACK) as client:
        host = {"Host": "localhost"}
        assert client.get("/v1/jobs", headers=host | bearer("anything")).status_code == 200
        record, token = service.keys.create(OPERATOR, tenant="red", role=Role.VIEWER)
        service.keys.revoke(OPERATOR, record.id)
    with open_client(service, Access.LOOPBACK) as client:
        assert client.get("/v1/jobs", headers=host).status_code == 401
        assert client.get("/v1/jobs", headers=host | bearer(token)).status_code == 401
        assert client.get("/v1/jobs", headers=host | bearer(key(service, "red"))).status_code == 200


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}]
)
def test_another_sites_page_cannot_act(service, headers):
    """A browser sends a stored password, and reaches localhost, on behalf of any page."""
    with open_client(service, **bearer(key(service, "red"))) as client:
        assert outcome(client.post("/v1/jobs/job_0/cancel", headers=headers)) == (403, "cross_site_request")
        same = {"Origin": "http://h", "Sec-Fetch-Site": "same-origin"}
        assert outcome(client.post("/v1/jobs/job_0/cancel", headers=same)) == (404, "not_found")


def test_roles(service, tmp_path):
    with open_client(service) as client:
        for role, statuses in ((Role.VIEWER, (200, 403)), (Role.SUBMITTER, (200, 202)), (Role.ADMIN, (200, 202))):
            headers = bearer(key(service, "red", role))
            response = client.get("/v1/jobs", headers=headers), client.post("/v1/jobs", json=SPEC, headers=headers)
            assert tuple(found.status_code for found in response) == statuses
        assert outcome(client.get("/metrics", headers=headers)) == (403, "forbidden")
        platform = bearer(key(service, None, Role.VIEWER))
        assert client.get("/metrics", headers=platform).status_code == 200


@pytest.mark.parametrize(
    ("scopes", "statuses"),
    [
        (["jobs:read"], (200, 403)),
        (["jobs:write"], (403, 404)),
        (["jobs:*"], (200, 404)),
        (["*:read"], (200, 403)),
        (["files:*"], (403, 403)),
        ([], (200, 404)),
    ],
)
def test_scopes(service, scopes, statuses):
    with open_client(service, **bearer(key(service, "red", scopes=scopes))) as client:
        found = client.get("/v1/jobs"), client.post("/v1/jobs/job_0/pause")
        assert tuple(response.status_code for response in found) == statuses


def test_a_revoked_key_is_refused_within_seconds(service):
    clock = [0.0]
    record, token = service.keys.create(OPERATOR, tenant="red", role=Role.VIEWER)
    app = create_app(Settings.load(), service=service, access=Access.KEYS, now=lambda: clock[0])
    with TestClient(app, headers=bearer(token)) as client:
        assert client.get("/v1/jobs").status_code == 200
        service.keys.revoke(OPERATOR, record.id)
        clock[0] += 2.1
        assert client.get("/v1/jobs").status_code == 401


# -- one tenant's jobs ------------------------------------------------------------------------------------------------
def test_lists_and_jobs_are_the_tenants_own(service):
    with open_client(service) as client:
        ids = {}
        for tenant in ("red", "blue"):
            headers = bearer(key(service, tenant))
            made = [client.post("/v1/jobs", json=SPEC, headers=headers).json() for _ in range(3)]
            assert {job["tenant"] for job in made} == {tenant}
            ids[tenant] = [job["id"] for job in made]
        red = bearer(key(service, "red", Role.VIEWER))
        page = client.get("/v1/jobs?limit=2", headers=red).json()
        rest = client.get(f"/v1/jobs?after={page['last_id']}", headers=red).json()
        assert sorted(job["id"] for job in page["data"] + rest["data"]) == sorted(ids["red"])
        assert outcome(client.get(f"/v1/jobs?after={ids['blue'][0]}", headers=red))[0] == 404
        assert client.get(f"/v1/jobs/{ids['blue'][0]}", headers=red).status_code == 404
        everything = client.get("/v1/jobs", headers=bearer(key(service, None, Role.VIEWER))).json()
        assert len(everything["data"]) == 6


def test_one_idempotency_key_means_a_job_a_tenant(service, tmp_path):
    body = dict(SPEC)

    def submit(tenant, body, key):
        caller = Caller(tenant, Role.SUBMITTER)
        return service.acting_for(caller).submit(JobSpec(**body), base=None, idempotency_key=key)

    made = {}
    for tenant in ("red", "blue", "default"):
        for _ in range(2):
            view, _ = submit(tenant, body, "k")
            made.setdefault(tenant, set()).add(view.id)
    assert [len(ids) for ids in made.values()] == [1, 1, 1]
    assert len(set.union(*made.values())) == 3
    with pytest.raises(ConflictError, match="idempotency key 'k' created"):
        submit("red", body | {"max_tokens": 3}, "k")
    with pytest.raises(InvalidSpecError):
        submit("default", body, "red\x1fk")


def test_many_requests_with_one_key_at_once(service):
    """The first use is noted by one of them; none fails."""
    token = key(service, "red")
    with ThreadPoolExecutor(8) as pool:
        callers = list(pool.map(lambda _: service.keys.authenticate(token), range(16)))
    assert len(set(callers)) == 1
