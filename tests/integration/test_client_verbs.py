"""Each operation of the OpenAPI document has a method of the client: every one is called, on a real server."""

import re
from datetime import UTC, date, datetime
from decimal import Decimal

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer import Client, JobSpec
from batchinfer.client.transport import RetryPolicy, Transport
from batchinfer.errors import ConflictError, InvalidSpecError, NotFoundError, PreconditionError
from batchinfer.jobs.changes import JobChanges
from batchinfer.jobs.schedule_spec import ScheduleSpec
from tests.fakes import answer
from tests.processes import Process
from tests.program import batchinfer
from tests.small_model import gguf_path

pytestmark = pytest.mark.service
PROMPTS = [f"row {number} of the file" for number in range(12)]
SPOKEN_BY_OTHERS = {
    # OpenAI's own client speaks these, and is tested on them; ours uploads with POST and looks for known bytes with GET
    ("GET", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("DELETE", "/v1/files/{file_id}"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("verbs")


@pytest.fixture(scope="module")
def server(home):
    """URL and a key of the platform's admin; a worker beside it."""
    url = f"sqlite:///{home / 'batchinfer.db'}"
    settings = {
        "home": home, "database_url": url, "input_roots": "/", "output_roots": "/", "model_roots": "/",
        "tick_seconds": 0.2, "webhook_networks": "127.0.0.0/8", "usd_per_hour": "3600",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHINFER_DATABASE_URL", url)
        key = batchinfer("keys", "create", "--platform", "--role", "admin", "--json").json["key"]
    with Process("serve", "--port", 0, **settings) as serve, Process("worker", **settings):
        line = serve.wait_for(lambda line: "batchinfer serves http" in line)
        yield line.split("serves ")[1].split("/v1")[0], key


@pytest.fixture(scope="module")
def asked():
    """``(method, path)`` of each request that the client made."""
    return []


@pytest.fixture(scope="module")
def client(server, asked):
    url, key = server
    http = httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
        event_hooks={"request": [lambda request: asked.append((request.method, request.url.path))]},
    )
    with Client(url, transport=Transport(http, RetryPolicy(max_retries=0))) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(home):
    path = home / "prompts.parquet"
    pq.write_table(pa.table({"prompt": [*PROMPTS, "ERROR"]}), path)
    return path


@pytest.fixture(scope="module")
def job(client, prompts):
    """A job that ran to its end."""
    submitted = client.submit(JobSpec(inputs=str(prompts), model="org/fake", name="verbs", tags={"team": "x"}))
    return client.wait(submitted.job.id, poll_s=0.1, timeout_s=60)


def play_ahead(client, job, prompts):
    spec = JobSpec(inputs=str(prompts), model=str(gguf_path()), max_tokens=7)
    estimate = client.estimate(spec, workers=2, sample=5)
    assert (estimate.num_rows, estimate.sampled_rows, estimate.num_workers) == (13, 5, 2)
    explanation = client.explain(spec, rows=13)
    assert explanation.estimate.num_rows == 13
    forecast = client.forecast(job.id)
    assert {figure.what for figure in forecast.figures} >= {"rows", "prompt_tokens"} or forecast.figures


def play_jobs(client, job, prompts):
    assert [view.id for view in client.list_jobs(name="verbs", tag=("team", "x"), model="org/fake").data] == [job.id]
    assert client.get(job.id).outcome == "partial"
    assert [kind.code for kind in client.errors(job.id).kinds] == ["engine_error"]
    page = client.rows(job.id, status="succeeded", limit=5)
    assert [row.output for row in page.data] == [answer(prompt) for prompt in PROMPTS[:5]]
    assert [row.prompt for row in client.rows(job.id, after=page.next_after, limit=2).data] == PROMPTS[5:7]
    assert client.cost(job.id).job_id == job.id
    assert client.verify(job.id).ok
    events = client.events(job.id).data
    assert [event.id for event in client.follow(job.id)] == [event.id for event in events]
    assert [event.id for event in client.follow(job.id, after=events[1].id)] == [event.id for event in events[2:]]
    assert client.events(job.id, limit=1).has_more
    with pytest.raises(NotFoundError):
        next(client.follow("job_nothing"))
    assert client.download(job.id, prompts.parent / "copies")
    assert client.retry(job.id)[1] == 1
    client.wait(job.id, poll_s=0.1, timeout_s=60)
    with pytest.raises(ConflictError):
        client.resume(job.id)
    with pytest.raises(ConflictError):
        client.pause(job.id)


def play_stages(client, job, prompts):
    stages = [
        {"name": "draft", "prompt": "say {{ prompt }}"},
        {"name": "keep", "filter": "'row 1' in prompt"},
        {"name": "judge", "prompt": "judge {{ draft.output }}"},
    ]
    submitted = client.submit(JobSpec(inputs=str(prompts), model="org/fake", stages=stages))
    done = client.wait(submitted.job.id, poll_s=0.1, timeout_s=60)
    assert (done.rows.succeeded, done.rows.filtered, done.rows.errored) == (3, 9, 1)
    assert [row.row_index for row in client.rows(done.id, status="filtered", limit=3).data] == [0, 2, 3]
    assert client.verify(done.id).counts["filtered"] == 9


def play_changes(client, job, prompts):
    waiting = client.clone(job.id, {"model": "org/nobody", "pool": "elsewhere", "inputs": [str(prompts)]})
    assert (waiting.is_new, waiting.job.model, waiting.job.name) == (True, "org/nobody", "verbs")
    assert client.clone(job.id, idempotency_key="k").job.id == client.clone(job.id, idempotency_key="k").job.id
    version = client.version(waiting.job.id)
    changed = client.change(waiting.job.id, JobChanges(priority=7, name=None), version=version)
    assert (changed.priority, changed.name) == (7, None)
    with pytest.raises(PreconditionError):
        client.change(waiting.job.id, JobChanges(priority=8), version=version)
    assert client.change(waiting.job.id, JobChanges(budget_usd=Decimal("1.5"))).cost.budget_usd == Decimal("1.5")
    assert client.cancel(waiting.job.id).state in {"cancelling", "cancelled"}


def play_schedules(client, job, prompts):
    del job
    work = {"inputs": [str(prompts)], "model": "org/fake"}
    with pytest.raises(InvalidSpecError, match="relative path"):
        client.schedules.add(ScheduleSpec(name="n", cron="@daily", job=work | {"inputs": "here.parquet"}))
    made = client.schedules.add(ScheduleSpec(name="nightly", cron="30 2 * * *", tz="Europe/Istanbul", job=work))
    assert client.schedules.get("nightly").id == made.id
    assert [view.name for view in client.schedules.list().data] == ["nightly"]
    assert client.schedules.pause("nightly").paused
    run = client.schedules.trigger("nightly", logical_date="2026-01-05")
    assert client.schedules.backfill("nightly", start="2026-01-01", end="2026-01-02").runs
    runs = client.schedules.runs("nightly", limit=10).data
    assert len(runs) == 3
    assert run.id in {view.id for view in runs}
    assert not client.schedules.resume("nightly").paused
    assert client.schedules.remove("nightly").name == "nightly"


def play_webhooks(client, job, prompts):
    del job, prompts
    hook = client.webhooks.add("http://127.0.0.1:9/nobody", events=["job.failed"])  # nobody listens there
    assert hook.secret.startswith("whsec_")
    assert client.webhooks.get(hook.id).url == hook.url
    assert [view.id for view in client.webhooks.list().data] == [hook.id]
    told = client.webhooks.test(hook.id)
    assert (told.event, told.state) == ("webhook.test", "pending")
    assert client.webhooks.redeliver(hook.id, told.id).last_at > told.last_at
    assert [view.id for view in client.webhooks.deliveries(hook.id, state="pending").data] == [told.id]
    assert client.webhooks.enable(hook.id).id == hook.id
    assert client.webhooks.remove(hook.id).id == hook.id


def play_access(client, job, prompts):
    del job, prompts
    assert client.tenants.add("green", weight=2).weight == 2
    assert client.tenants.get("green").id == "green"
    assert "green" in {view.id for view in client.tenants.list().data}
    assert client.tenants.change("green", name="Green").name == "Green"
    key = client.keys.create(tenant="green", role="viewer", expires_in_seconds=60)
    assert client.keys.get(key.id).role == "viewer"
    assert key.id in {view.id for view in client.keys.list().data}
    with Client(client.server, key.key) as green:
        assert green.list_jobs().data == []
    newer = client.keys.rotate(key.id, overlap_seconds=0)
    assert newer.key != key.key
    assert client.keys.revoke(newer.id).revoked_at is not None


def play_money(client, job, prompts):
    del prompts
    price = client.prices.set("org/m", input_usd=Decimal(1), output_usd=Decimal(2))
    assert (price.cached_input_usd, price.output_usd) == (1, 2)
    start = datetime(2030, 1, 1, tzinfo=UTC)
    assert client.prices.set_device("cuda", Decimal(3), valid_from=start).valid_from == start
    assert [view.device for view in client.prices.list(device="cuda").devices] == ["cuda"]
    assert client.budgets.set("default", Decimal(50)).limit_usd == 50
    assert [view.tenant for view in client.budgets.list("default").data] == ["default"]
    client.budgets.remove("default")
    assert client.budgets.list().data == []
    usage = client.usage.get(("job", "model"), first_day=date(2020, 1, 1), model="org/fake")
    # the row that failed ran again: thirteen rows and one more
    assert {line.job: line.model for line in usage.data}[job.id] == "org/fake"
    assert client.usage.get(last_day=date(2020, 1, 1)).data == []


def play_fleet(client, job, prompts):
    del prompts
    assert [worker.is_alive for worker in client.workers.list().data] == [True]
    assert client.workers.queue(target_seconds=60).target_seconds == 60
    assert job.model in {model.id for model in client.models.list().data}
    assert client.models.get(job.model).id == job.model


PLAYS = [
    play_ahead,
    play_jobs,
    play_stages,
    play_changes,
    play_schedules,
    play_webhooks,
    play_access,
    play_money,
    play_fleet,
]


def test_every_operation_has_a_method_of_the_client(client, server, job, prompts, asked):
    """Each method is called and its answer looked at; then the document is held against what was asked."""
    url, key = server
    for play in PLAYS:
        play(client, job, prompts)
    document = httpx.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {key}"}).json()
    operations = {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method in methods
        if path.startswith("/v1/")
    }
    assert len(operations) > 60
    assert operations >= SPOKEN_BY_OTHERS
    reached = {operation for request in asked for operation in [_operation(operations, *request)] if operation}
    assert operations - reached == SPOKEN_BY_OTHERS


def _operation(operations, method, path):
    """The operation that a request reached: the one with the fewest parameters, as the router prefers it."""
    fits = [
        (known.count("{"), known)
        for verb, known in operations
        if verb == method and re.fullmatch(_pattern(known), path)
    ]
    return (method, min(fits)[1]) if fits else None


def _pattern(path):
    return "".join(".+" if part == "{model}" else "[^/]+" if part[:1] == "{" else re.escape(part)
                   for part in re.split(r"(\{[^}]+\})", path))  # fmt: skip


def _cli(*args, **options):
    return batchinfer(*args, "--json", **options).json


def test_the_command_line_speaks_to_a_server(server, job, prompts, monkeypatch):
    """The twins of the API's nouns, by --server and by the environment; JSON has the fields of the API."""
    url, key = server
    monkeypatch.delenv("BATCHINFER_DATABASE_URL", raising=False)
    monkeypatch.chdir(prompts.parent)
    elsewhere = ("--server", url, "--api-key", key)
    assert _cli("rows", job.id, "--limit", 2, *elsewhere)["data"][0]["output"] == answer(PROMPTS[0])
    monkeypatch.setenv("BATCHINFER_SERVER", url)
    monkeypatch.setenv("BATCHINFER_API_KEY", key)
    events = _cli("events", job.id)["data"]
    assert [line.split("\t")[0] for line in batchinfer("events", job.id, "--follow").stdout.splitlines()] == [
        str(event["id"]) for event in events
    ]
    assert _cli("forecast", job.id)["job_id"] == job.id
    spec = ("prompts.parquet", "--model", gguf_path(), "--max-tokens", 5)
    assert _cli("estimate", *spec, "--sample", 4)["sampled_rows"] == 4
    assert _cli("explain", *spec, "--rows", 13)["estimate"]["num_rows"] == 13
    assert "--limit" in batchinfer("estimate", *spec, "--probe", 2, exit_code=2).stderr
    view = _cli("explain", *spec, "--rows", 13, "--device", "h200x2", "--device", "cpu", "--usd-per-hour", "3.6")
    (pair,) = (m for m in view["makespans"] if m["device"] == "h200x2" and m["num_workers"] == 1)
    assert pair["basis"].startswith("roofline, not measured")
    # two GPUs at 3.60 an hour each
    assert float(pair["cost_usd"]["expected"]) == pytest.approx(0.002 * pair["seconds"]["expected"], abs=2e-6)
    refused = batchinfer("explain", *spec, "--device", "cpu", "--device", "k80", exit_code=2).stderr
    assert "'cpu' and 'k80' are not in the table" in refused
    copy = _cli("clone", job.id, "--model", "org/nobody", "prompts.parquet")
    assert copy["model"] == "org/nobody"
    assert _cli("change", copy["id"], "--priority", 3, "--clear", "name")["priority"] == 3
    batchinfer("cancel", copy["id"])

    work = ("--input", prompts, "--model", "org/fake")
    assert _cli("schedule", "add", "weekly", "--cron", "@weekly", *work)["name"] == "weekly"
    assert "relative path" in batchinfer(
        "schedule", "add", "w", "--cron", "@weekly", "--input", "p.parquet", "--model", "org/fake", exit_code=2
    ).stderr  # fmt: skip
    assert batchinfer("schedule", "pause", "weekly").stdout.startswith("weekly is paused")
    run = _cli("schedule", "trigger", "weekly", "--date", "2026-01-04")
    assert _cli("schedule", "runs", "weekly")["data"][0]["id"] == run["id"]
    assert _cli("schedule", "backfill", "weekly", "--start", "2026-01-01", "--end", "2026-01-12")["runs"]
    assert not _cli("schedule", "resume", "weekly")["paused"]
    assert "weekly" in batchinfer("schedule", "show", "weekly").stdout
    assert [view["name"] for view in _cli("schedule", "ls")["data"]] == ["weekly"]
    assert _cli("schedule", "rm", "weekly")["name"] == "weekly"

    hook = _cli("webhooks", "add", "http://127.0.0.1:9/nobody", "--event", "job.failed")
    assert "--tenant" in batchinfer("webhooks", "add", "http://127.0.0.1:9/", "--tenant", "red", exit_code=2).stderr
    told = _cli("webhooks", "test", hook["id"], exit_code=1)
    assert _cli("webhooks", "redeliver", hook["id"], told["id"], exit_code=1)["id"] == told["id"]
    assert [view["id"] for view in _cli("webhooks", "deliveries", hook["id"])["data"]] == [told["id"]]
    assert _cli("webhooks", "enable", hook["id"])["id"] == hook["id"]
    assert _cli("webhooks", "rm", hook["id"])["id"] == hook["id"]
    assert _cli("webhooks", "ls")["data"] == []

    assert "metered_usd" in _cli("usage", "--by", "model", "--model", "org/fake")["data"][0]
    assert "--export" in batchinfer("usage", "--export", "u.parquet", exit_code=2).stderr
    assert Decimal(_cli("budget", "set", 40)["limit_usd"]) == 40
    assert len(_cli("budget", "ls")["data"]) == 1
    assert _cli("budget", "rm")["removed"]
    assert _cli("price", "set", "org/p", "--input", 1, "--output", 2)["model"] == "org/p"
    assert Decimal(_cli("price", "show", "org/p")["usd_per_million_tokens"]["cached_input"]) == 1
    batchinfer("price", "show", "org/unpriced", exit_code=4)
    assert Decimal(_cli("price", "set-device", "tpu", "--per-hour", 3)["usd_per_hour"]) == 3
    assert [view["device"] for view in _cli("price", "ls", "--device", "tpu")["devices"]] == ["tpu"]
    made = _cli("keys", "create", "--role", "viewer", "--expires", "90m")
    assert (made["tenant"], made["role"]) == ("default", "viewer")
    newer = _cli("keys", "rotate", made["key"], "--overlap", "0m")
    assert _cli("keys", "revoke", newer["id"])["revoked_at"]
    assert made["id"] in {view["id"] for view in _cli("keys", "ls")["data"]}
    assert _cli("workers")["data"][0]["is_alive"]
    assert _cli("workers", "--backlog", "--target-seconds", 60)["target_seconds"] == 60
