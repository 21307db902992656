"""Polls: what they cost the database, what they say of a job that changes, and that nothing keeps them waiting."""

import asyncio
import threading

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from starlette.applications import Starlette
from starlette.routing import Mount

from batchinfer.api import polling
from batchinfer.api.access import Access
from batchinfer.api.app import create_app
from batchinfer.jobs.caller import Caller, Role
from batchinfer.jobs.service import JobService
from batchinfer.settings import Settings
from tests.played import complete, make_spec, plan, run_shard

pytestmark = pytest.mark.service


class Clock:
    """Stands still until it is told."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def service(database_url):
    made = JobService.connect(database_url, "memory://")
    yield made
    made.close()


@pytest.fixture
def app(service):
    return create_app(Settings.load(), service=service)


@pytest.fixture
def clock(app):
    """The poller's; take it before the client, whose start makes another poller."""
    return Clock()


@pytest.fixture
def client(app, clock):
    with TestClient(app, base_url="http://localhost") as made:
        app.state.poller = polling.Poller(clock)
        yield made


@pytest.fixture
def job_id(service, tmp_path):
    return service.ledger.submit(make_spec(tmp_path))[0].id


@pytest.fixture
def statements(service):
    seen = []
    event.listen(service.engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    return seen


def poll(client, job_id, etag=None, **headers):
    return client.get(f"/v1/jobs/{job_id}", headers=headers | ({} if etag is None else {"If-None-Match": etag}))


def test_an_unchanged_job_is_304_and_one_read_by_its_key(client, service, job_id, statements):
    first = poll(client, job_id)
    statements.clear()
    again = poll(client, job_id, first.headers["ETag"])
    assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", first.headers["ETag"])
    asked = [statement for statement in statements if not statement.startswith("BEGIN")]
    assert len(asked) == 1
    assert asked[0].partition("WHERE")[2].split()[0] == "jobs.id"
    statements.clear()
    assert poll(client, job_id, '"another", W/"third"').json() == first.json()
    assert len([statement for statement in statements if not statement.startswith("BEGIN")]) == 1


def test_whatever_happens_to_a_job_is_told_at_once(client, service, job_id):
    etags = [poll(client, job_id).headers["ETag"]]

    def changed():
        answer = poll(client, job_id, etags[-1])
        assert answer.status_code == 200
        etags.append(answer.headers["ETag"])
        return answer.json()

    plan(service.ledger, job_id)
    assert changed()["state"] == "queued"
    run_shard(service.ledger)
    assert changed()["rows"]["succeeded"] == 5
    client.patch(f"/v1/jobs/{job_id}", json={"name": "x", "tags": {"a": "b"}})
    assert (changed()["name"], poll(client, job_id).json()["tags"]) == ("x", {"a": "b"})
    service.pause(job_id)
    assert changed()["state"] == "paused"
    assert len(set(etags)) == len(etags)


def test_time_alone_is_told_within_seconds_while_the_job_runs_and_never_after(client, clock, service, job_id):
    first = poll(client, job_id)
    assert "no worker" in first.json()["waits_for"]
    service.ledger.register_worker("w", hostname="h", pid=1, nanos_per_hour=0)
    assert poll(client, job_id).json()["waits_for"] == first.json()["waits_for"]
    clock.now += polling.FRESH_SECONDS
    assert poll(client, job_id).json()["waits_for"] == "a worker has yet to read its input"
    clock.now += polling.UNCHANGED_SECONDS
    assert poll(client, job_id, first.headers["ETag"]).status_code == 200
    complete(service.ledger, job_id)
    ended = poll(client, job_id)
    assert ended.json()["state"] == "completed"
    clock.now += 1e6
    assert poll(client, job_id, ended.headers["ETag"]).status_code == 304


def test_answers_of_many_jobs_do_not_grow_old_at_the_same_moment(client, app, clock, service, tmp_path, monkeypatch):
    """Else each second, and each fifth one more so, would have every poll wait for all of them to be made."""
    made = []
    view = polling._view
    monkeypatch.setattr(
        polling, "_view", lambda service, job_id, version: made.append(0) or view(service, job_id, version)
    )
    ids = [service.ledger.submit(make_spec(tmp_path))[0].id for _ in range(30)]
    for job_id in ids:
        poll(client, job_id)
    remade = []
    for _ in range(10):
        made.clear()
        clock.now += polling.FRESH_SECONDS / 10
        for job_id in ids:
            poll(client, job_id)
        remade.append(len(made))
    assert sum(remade) >= 30
    assert max(remade) <= 15


def test_an_answer_that_is_kept_is_shown_to_nobody_else(service, tmp_path):
    for tenant in ("red", "blue"):
        service.tenants.add(Caller.operator(), tenant)
    keys = {
        tenant: service.keys.create(Caller.operator(), tenant=tenant, role=Role.VIEWER)[1] for tenant in ("red", "blue")
    }
    job_id = service.ledger.submit(make_spec(tmp_path), tenant="red")[0].id
    app = create_app(Settings.load(), service=service, access=Access.KEYS)
    with TestClient(app, base_url="http://localhost") as client:
        mine = poll(client, job_id, Authorization=f"Bearer {keys['red']}")
        assert mine.status_code == 200
        for etag in (None, mine.headers["ETag"], "*"):
            assert poll(client, job_id, etag, Authorization=f"Bearer {keys['blue']}").status_code == 404
            assert poll(client, job_id, etag).status_code == 401


def test_polls_that_come_together_are_read_together(app, service, tmp_path, statements):
    """Fifty at once, of two jobs and one that is not there: each is told right, by few transactions."""
    ids = [*(service.ledger.submit(make_spec(tmp_path))[0].id for _ in range(2)), "job_nowhere"]

    async def run():
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            for job_id in ids:  # what takes longer is done before
                await client.get(f"/v1/jobs/{job_id}")
            statements.clear()
            return await asyncio.gather(*(client.get(f"/v1/jobs/{ids[n % 3]}") for n in range(51)))

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200, 200, 404] * 17
    assert all(answer.json()["id"] == ids[n % 3] for n, answer in enumerate(answers) if n % 3 < 2)
    assert len([statement for statement in statements if statement.lstrip().startswith("SELECT")]) < 51 / 2


def test_a_database_that_fails_is_told_to_each_poll_and_the_next_ones_are_answered(app, service, job_id, monkeypatch):
    failing = True
    read = polling.job_versions

    def fail(engine, asked):
        if failing:
            raise OperationalError("SELECT", {}, Exception("the database has gone"))
        return read(engine, asked)

    monkeypatch.setattr(polling, "job_versions", fail)

    async def run():
        nonlocal failing
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            bad = await asyncio.gather(*(client.get(f"/v1/jobs/{job_id}") for _ in range(5)))
            failing = False
            return [answer.status_code for answer in bad], await client.get(f"/v1/jobs/{job_id}")

    bad, good = asyncio.run(run())
    assert bad == [503] * 5
    assert good.json()["id"] == job_id


def test_slow_requests_do_not_keep_polls_waiting(app, service, job_id, monkeypatch):
    """A hundred requests that hang take every thread that ordinary routes have; a poll is answered all the same."""
    release, hanging = threading.Event(), threading.Semaphore(0)

    def hang(_service, _job_id):
        hanging.release()
        release.wait(60)
        raise RuntimeError

    monkeypatch.setattr(JobService, "cost", hang)

    async def run():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client,
        ):
            slow = [asyncio.create_task(client.get(f"/v1/jobs/{job_id}/cost")) for _ in range(100)]
            try:
                for _ in range(40):  # as many threads as there are
                    await asyncio.to_thread(hanging.acquire)
                answer = await asyncio.wait_for(client.get(f"/v1/jobs/{job_id}"), 30)
            finally:
                release.set()
            assert {(await one).status_code for one in slow} == {500}
            return answer

    assert asyncio.run(run()).json()["id"] == job_id


def test_below_another_app_the_router_answers_as_the_short_way_does(app, client, job_id):
    """The short way knows polls by their whole path; where that begins elsewhere, the route of the same name answers."""
    above = TestClient(Starlette(routes=[Mount("/batch", app)]), base_url="http://localhost")

    def both(path, **headers):
        answers = client.get(path, headers=headers), above.get(f"/batch{path}", headers=headers)
        told = {"content-type", "etag", "content-length"}
        return [
            (answer.status_code, answer.content, {name: answer.headers.get(name) for name in told})
            for answer in answers
        ]

    short, long = both(f"/v1/jobs/{job_id}")
    assert short == long
    assert short[0] == 200
    for etag in (short[2]["etag"], "*", '"x"'):
        short, long = both(f"/v1/jobs/{job_id}", **{"If-None-Match": etag})
        assert short == long
        assert short[0] == (200 if etag == '"x"' else 304)
    for unknown in ("job_nowhere", "a.b", "x" * 65):
        short, long = both(f"/v1/jobs/{unknown}")
        assert short == long
        assert short[0] == 404


def test_a_poll_is_surrounded_as_every_request_is(service, tmp_path):
    """Its own id, the headers that browsers heed, and its turn counted: also where the answer is one that is kept."""
    key = service.keys.create(Caller.operator(), tenant="default", role=Role.VIEWER, rate_per_minute=4)[1]
    job_id = service.ledger.submit(make_spec(tmp_path))[0].id
    app = create_app(Settings.load(), service=service, access=Access.KEYS)
    with TestClient(app) as client:
        app.state.poller = polling.Poller(Clock())
        answers = [poll(client, job_id, Authorization=f"Bearer {key}") for _ in range(3)]
        etag = answers[0].headers["ETag"]
        answers.append(poll(client, job_id, etag, Authorization=f"Bearer {key}", **{"X-Request-ID": "mine"}))
        refused = poll(client, job_id, Authorization=f"Bearer {key}")
    assert [answer.status_code for answer in answers] == [200, 200, 200, 304]
    assert [answer.headers["X-RateLimit-Remaining-Requests"] for answer in answers] == ["3", "2", "1", "0"]
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "15")
    ids = [answer.headers.get_list("X-Request-ID") for answer in answers]
    assert ids[-1] == ["mine"]
    assert len({one for (one,) in ids}) == 4
    for answer in answers:
        assert answer.headers.get_list("Cache-Control") == ["no-store"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_polls_that_follow_each_other_closely_are_read_together_and_none_is_told_of_before_it_came(
    app, service, tmp_path, statements
):
    """A hundred within a few reads' time; one sent after a change is told of it, though a read was under way."""
    job_id = service.ledger.submit(make_spec(tmp_path))[0].id

    async def run():
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            await client.get(f"/v1/jobs/{job_id}")
            early = []
            for _ in range(10):
                early.append(asyncio.create_task(client.get(f"/v1/jobs/{job_id}")))
                await asyncio.sleep(0)
            service.pause(job_id)
            late = await client.get(f"/v1/jobs/{job_id}")
            return [(await one).status_code for one in early], late.json()["state"]

    codes, state = asyncio.run(run())
    assert codes == [200] * 10
    assert state == "paused"
    assert len([statement for statement in statements if "IN (" in statement and "FROM jobs" in statement]) <= 4
