"""``models``: fetched from a hub that this test plays over HTTP, pinned, and what jobs get that name a pin."""

import hashlib
import json
import os
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.dispatch import NullDispatcher
from batchinfer.jobs.model_pins import ModelPins
from batchinfer.jobs.schedule_firing import Firing
from batchinfer.jobs.schedule_runner import ScheduleRunner
from batchinfer.jobs.schedule_spec import ScheduleSpec
from batchinfer.jobs.schedules import ScheduleService
from batchinfer.jobs.service import JobService
from batchinfer.jobs.spec import JobSpec
from tests.played import make_input, make_spec
from tests.processes import PROGRAM, ROOT

OLD, NEW = "a" * 40, "b" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"may run code",
    "modeling.py": b"is code",
}


class Hub:
    """The parts of the hub's HTTP interface that fetching a model asks for; keeps the paths of all GETs."""

    def __init__(self):
        self.branch = OLD
        self.got = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.got.append(self.path)
                self.answer(is_whole=True)

            def do_HEAD(self):
                self.answer(is_whole=False)

            def answer(self, *, is_whole):
                status, headers, body = outer.find(self.path.partition("?")[0])
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if is_whole:
                    self.wfile.write(body)

            def log_message(self, *_args):
                """Tests read what was asked."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def find(self, path):
        """``(status, headers, body)``."""
        parts = path.strip("/").split("/")
        if parts[:4] == ["api", "models", "org", "small"]:
            revision = parts[5] if len(parts) > 5 else "main"
            if (commit := self.commit(revision)) is not None:
                if parts[4:5] == ["tree"]:
                    tree = [
                        {"type": "file", "path": name, "size": len(body) + 40, "oid": "0" * 40}
                        for name, body in FILES.items()
                    ]
                    return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
                siblings = [{"rfilename": name} for name in FILES]
                body = {"id": "org/small", "modelId": "org/small", "sha": commit, "siblings": siblings}
                return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if parts[:3] == ["org", "small", "resolve"] and parts[4] in FILES:
            body = FILES[parts[4]] + parts[3].encode()
            etag = hashlib.sha256(body).hexdigest()
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": self.commit(parts[3])}, body
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def commit(self, revision):
        return {"main": self.branch, "v1": OLD, OLD: OLD, NEW: NEW}.get(revision)

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hub():
    made = Hub()
    yield made
    made.close()


@pytest.fixture
def program(hub, tmp_path):
    """Runs a command of its own process: huggingface_hub reads its endpoint when it is imported."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "BATCHINFER_"))},
        "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "BATCHINFER_HOME": str(tmp_path / "home"),
        "BATCHINFER_MODEL_ROOTS": str(tmp_path / "models"),
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "workers")),
    }  # fmt: skip

    def run(*args, code=0):
        done = subprocess.run(
            [*PROGRAM, *map(str, args)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if "--json" in args and not code else done.stdout + done.stderr

    return run


def test_pull_ls_and_pin(hub, program, tmp_path):
    """Only what a worker may read is fetched, once; a pin stays where it is when the branch moves on."""
    pulled = program("models", "pull", "org/small", "--json")
    fetched = {path.rpartition("/")[2] for path in hub.got if "/resolve/" in path}
    assert fetched == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (pulled["model"], pulled["revision"]) == ("org/small", OLD)
    assert pulled["num_bytes"] == sum(len(FILES[name]) + 40 for name in fetched)
    assert program("models", "pin", "small=org/small@v1", "--json")["model"] == f"org/small@{OLD}"

    hub.branch, hub.got = NEW, []
    assert program("models", "pull", "org/small", "--revision", OLD, "--json")["path"] == pulled["path"]
    assert not [path for path in hub.got if "/resolve/" in path]
    assert program("models", "pull", "org/small@main", "--json")["revision"] == NEW
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").write_bytes(b"GGUF")

    listed = program("models", "ls", "--json")
    by_revision = {view["revision"]: view for view in listed["data"]}
    assert (by_revision[OLD]["pinned_as"], by_revision[OLD]["refs"]) == (["small"], [])
    assert (by_revision[NEW]["pinned_as"], by_revision[NEW]["refs"]) == ([], ["main"])
    [file] = [view for view in listed["data"] if view["kind"] == "gguf"]
    assert (file["name"], file["num_bytes"]) == (str(tmp_path / "models" / "tiny.gguf"), 4)
    make_input(tmp_path)
    program("submit", "prompts.parquet", "--model", "small")
    after = {view["revision"]: view["num_jobs"] for view in program("models", "ls", "--json")["data"]}
    assert (after[OLD], after[NEW]) == (1, 0)
    assert "small" in program("models", "ls")
    assert program("models", "unpin", "small", "--json")["model"] == f"org/small@{OLD}"
    assert "models ls" in program("models", "unpin", "small", code=4)


def test_what_is_not_there_is_one_sentence(program):
    for args in (("pull", "org/none"), ("pull", "org/small@v9"), ("pin", "x=org/small@v9")):
        said = program("models", *args, code=2)
        assert said.startswith("Error: "), said
        assert said.count("\n") == 1
    assert "NAME=ID@REVISION" in program("models", "pin", "org/small", code=2)
    assert "hub id" in program("models", "pull", "not a model", code=2)


@pytest.fixture
def service(database_url):
    made = JobService.connect(database_url, "memory://")
    yield made
    made.close()


def test_a_job_gets_what_its_model_is_pinned_to(service, tmp_path):
    """It stands in the spec, so that the spec's hash tells of it; a pin moved later changes nothing of old jobs."""
    service.pins.set("org/small", "org/small", OLD)
    first, _ = service.submit(make_spec(tmp_path, model="org/small"), base=None)
    assert first.model == f"org/small@{OLD}"
    service.pins.set("org/small", "org/small", NEW)
    second, _ = service.submit(make_spec(tmp_path, model="org/small"), base=None)
    assert second.model == f"org/small@{NEW}"
    jobs = [service.job(view.id) for view in (first, second)]
    assert [job.spec.model for job in jobs] == [f"org/small@{OLD}", f"org/small@{NEW}"]
    assert jobs[0].spec_hash != jobs[1].spec_hash
    other, _ = service.submit(make_spec(tmp_path, model=f"org/small@{OLD}"), base=None)
    assert other.model == f"org/small@{OLD}"
    service.pins.remove("org/small")
    assert service.submit(make_spec(tmp_path, model="org/small"), base=None)[0].model == "org/small"


def test_a_schedule_looks_its_pin_up_at_each_run(service, tmp_path):
    service.pins.set("small", "org/small", OLD)
    job = {"inputs": [make_input(tmp_path)], "model": "small", "output": str(tmp_path) + "/{{ run_id }}"}
    schedules = ScheduleService.of(service)
    schedules.add(ScheduleSpec(name="nightly", cron="@daily", job=job), base=tmp_path)
    now = [datetime.now(UTC) + timedelta(hours=1)]
    runner = ScheduleRunner(Firing(service.engine, clock=lambda: now[0]), service.ledger, NullDispatcher())
    models = []
    for commit in (OLD, NEW):
        service.pins.set("small", "org/small", commit)
        schedules.trigger("nightly")
        runner.tick()
        newest = service.list_jobs(limit=1).data[0]
        models.append(newest.model)
        service.cancel(newest.id)
        now[0] += timedelta(hours=1)
    assert models == [f"org/small@{OLD}", f"org/small@{NEW}"]


@pytest.mark.parametrize(
    "pin",
    [("", "o/m", OLD), ("../x", "o/m", OLD), ("a/b/c", "o/m", OLD), ("n", "m", OLD), ("n", "o/m", "main"),
     ("n", "o/m", OLD.upper()), ("n\0", "o/m", OLD)],
)  # fmt: skip
def test_a_pin_that_means_nothing_is_refused(service, pin):
    with pytest.raises(InvalidSpecError):
        service.pins.set(*pin)
    assert service.pins.list() == []


def test_a_spec_without_a_pin_is_left_alone(service):
    spec = JobSpec(inputs="/p.parquet", model="/models/tiny.gguf")
    assert ModelPins(service.engine).resolve(spec) is spec
