"""Traces of whole jobs: with an exporter in memory, and to a collector that is a real HTTP server."""

import json
import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fastapi.testclient import TestClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from batchinfer import tracing
from batchinfer.api.app import create_app
from batchinfer.cli.redact import JsonFormatter
from batchinfer.errors import UserError
from batchinfer.jobs.service import JobService
from batchinfer.jobs.status import JobState
from batchinfer.settings import Settings
from tests.played import make_spec
from tests.processes import ROOT, Process

from .conftest import prompts


@pytest.fixture
def spans():
    """The exporter of what this process traces while a test runs."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)


@pytest.fixture
def lines():
    """Lines of the log, as ``--log-format json`` writes them."""
    found = []

    class Keep(logging.Handler):
        def emit(self, record):
            found.append(json.loads(self.format(record)))

    handler, log = Keep(), logging.getLogger("batchinfer_workers")
    handler.setFormatter(JsonFormatter())
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(handler)
    log.setLevel(level)


def by_name(exporter):
    found = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def test_a_job_is_one_trace_from_submit_to_manifest(bench, spans, lines):
    """Two shards of 20 rows, a checkpoint each 10 rows: each span has its parent, and lines of the log have the trace."""
    job_id = bench.submit(prompts(40), shard_rows=20)
    assert bench.run(job_id).state is JobState.COMPLETED
    bench.check(job_id)
    found = by_name(spans)
    numbers = {name: len(some) for name, some in found.items()}
    checkpoints = numbers.pop("checkpoint")
    assert numbers == {"submit": 1, "plan": 1, "attempt": 2, "commit": 2, "finalize": 1}
    parts = sum(len(bench.ledger.parts(shard.id)) for shard in bench.ledger.shards(job_id))
    assert checkpoints == parts >= 2
    (submit,) = found["submit"]
    assert submit.parent is None
    trace = submit.context.trace_id
    assert {span.context.trace_id for span in spans.get_finished_spans()} == {trace}
    for name in ("plan", "attempt", "finalize"):
        assert {span.parent.span_id for span in found[name]} == {submit.context.span_id}
    attempts = {span.context.span_id: span.attributes["batchinfer.attempt"] for span in found["attempt"]}
    for span in found["commit"] + found["checkpoint"]:
        assert attempts[span.parent.span_id] == span.attributes["batchinfer.attempt"]
    assert sum(span.attributes["batchinfer.rows"] for span in found["checkpoint"]) == 40
    assert {span.attributes["batchinfer.shard"] for span in found["commit"]} == {0, 1}
    assert {span.attributes["batchinfer.job"] for span in found["plan"] + found["attempt"]} == {job_id}
    planned = [line for line in lines if line["message"].startswith(f"job {job_id} is queued")]
    assert [(line["trace_id"], line["span_id"]) for line in planned] == [
        (f"{trace:032x}", f"{found['plan'][0].context.span_id:016x}")
    ]


def test_an_attempt_that_fails_says_so_and_the_next_one_goes_on(bench, spans, monkeypatch):
    monkeypatch.setenv("CRASH_FILE", str(bench.folder / "crashed"))
    job_id = bench.submit(prompts(5, {2: "CRASH-ONCE"}))
    bench.run(job_id)
    attempts = by_name(spans)["attempt"]
    states = [span.status.status_code for span in attempts]
    assert states[0] is StatusCode.ERROR
    assert set(states[1:]) == {StatusCode.UNSET}
    assert attempts[0].events[0].name == "exception"
    assert len(attempts) == len(bench.ledger.attempts(job_id))
    assert len({span.context.trace_id for span in attempts}) == 1


def test_a_callers_trace_goes_on(sqlite_url, tmp_path, spans):
    """The W3C's own example; a malformed header begins a trace of one's own, and is no error."""
    service = JobService.connect(sqlite_url, "memory://")
    body = make_spec(tmp_path).model_dump(mode="json", include={"inputs", "model"})
    given = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with TestClient(create_app(Settings.load(), service=service), base_url="http://127.0.0.1:8000") as client:
        for header in (given, "00-nonsense"):
            made = client.post("/v1/jobs", json=body, headers={"traceparent": header})
            assert made.status_code == 202, made.text
    service.close()
    known, own = by_name(spans)["submit"]
    assert f"{known.context.trace_id:032x}" == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert f"{known.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert own.parent is None


def test_without_an_endpoint_nothing_is_imported_or_kept(bench):
    """Nothing for traces, that is: the Redis client loads the metrics of OpenTelemetry wherever it is installed."""
    job_id = bench.submit(prompts(3))
    assert bench.ledger.get_job(job_id).traceparent is None
    with tracing.span("x", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", job="j"):
        tracing.note(end="x")
        tracing.note_error(ValueError("x"))
        assert tracing.traceparent() is None
    program = (
        "import sys, batchinfer.tracing as t, batchinfer.api.app, batchinfer.cli.connect, batchinfer_workers.node\n"
        "t.start('', 'x')\n"
        "with t.span('x', job='j'): t.note(a=1)\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk.trace', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_extra_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UserError, match=r"pip install 'batchinfer\[otel\]'"):
        tracing.start("http://127.0.0.1:4318", "batchinfer")


def test_the_endpoint_is_the_standards_or_our_own(monkeypatch):
    assert Settings.load().otlp_endpoint == ""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:4318")
    assert Settings.load().otlp_endpoint == "http://a:4318"
    monkeypatch.setenv("BATCHINFER_OTLP_ENDPOINT", "http://b:4318")
    assert Settings.load().otlp_endpoint == "http://b:4318"
    monkeypatch.setenv("BATCHINFER_OTLP_ENDPOINT", "localhost:4318")
    with pytest.raises(UserError, match="BATCHINFER_OTLP_ENDPOINT"):
        Settings.load()


class Collector(BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, self.headers["content-encoding"], body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_args):
        """Tests read what came, not a log."""


@pytest.mark.service
def test_the_program_sends_a_job_to_a_collector(bench):
    """``batchinfer run``, start to end; what a collector gets is read with OpenTelemetry's own messages."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.got = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    inputs = bench.write(prompts(4))
    with Process(
        "run", inputs, "--model", "fake", "--output", bench.folder / "o",
        database_url=bench.database_url, otlp_endpoint=url, tick_seconds="0.1",
    ) as program:  # fmt: skip
        assert program.wait() == 0
    server.shutdown()
    server.server_close()
    assert {(path, encoding) for path, encoding, _ in server.got} == {("/v1/traces", None)}
    messages = [ExportTraceServiceRequest.FromString(body) for _, _, body in server.got]
    resources = [resource for message in messages for resource in message.resource_spans]
    names = {one.value.string_value for r in resources for one in r.resource.attributes if one.key == "service.name"}
    found = [span for r in resources for scope in r.scope_spans for span in scope.spans]
    assert names == {"batchinfer"}
    assert {span.name for span in found} == {"submit", "plan", "attempt", "checkpoint", "commit", "finalize"}
    assert len({span.trace_id for span in found}) == 1
