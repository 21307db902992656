"""``batchinfer.Client`` and the command line against a server on a real socket: the same jobs, the same words."""

import os
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer import Client, JobSpec
from batchinfer.client.transport import RetryPolicy
from batchinfer.errors import ConflictError, InputError, InvalidSpecError, NotFoundError, ServerError
from tests.fakes import answer
from tests.integration.openai.conftest import MODEL, chat, lines
from tests.program import batchinfer

pytestmark = pytest.mark.service
ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [f"row {number} of the file" for number in range(12)]


@pytest.fixture
def client(server):
    with Client(server, "none", retries=RetryPolicy(max_retries=0)) as made:
        yield made


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": [*PROMPTS, "ERROR"]}), path)
    return path


def test_a_job_from_a_local_file_to_local_results(client, prompts, tmp_path):
    job, is_new = client.submit(JobSpec(inputs=str(prompts), model="org/fake", name="remote"))
    assert is_new
    seen = []
    done = client.wait(job.id, poll_s=0.1, timeout_s=60, on_change=seen.append)
    assert (done.state, done.outcome, done.rows.succeeded, done.rows.errored) == ("completed", "partial", 12, 1)
    assert seen[-1] == done
    assert [view.id for view in client.jobs()].count(job.id) == 1
    assert client.list_jobs(state="completed", limit=1).data[0].id == job.id
    assert [kind.code for kind in client.errors(job.id).kinds] == ["engine_error"]
    assert client.cost(job.id).rows_usd == done.cost.metered_usd
    assert [row.output for row in client.preview(job.id, 2)] == [answer(prompt) for prompt in PROMPTS[:2]]
    copies = client.download(job.id, tmp_path / "answers")
    rows = duckdb.sql(
        f"select prompt, output from read_parquet({[str(copy) for copy in copies]}) where status = 'succeeded'"
    )
    assert dict(rows.fetchall()) == {prompt: answer(prompt) for prompt in PROMPTS}
    report = client.verify(job.id)
    assert (report.ok, report.num_rows, report.input_checked) == (True, 13, True)
    again, num_rows = client.retry(job.id)
    assert (num_rows, again.state) == (1, "queued")
    assert client.wait(job.id, poll_s=0.1).rows.errored == 1


def test_a_submit_that_is_sent_again_makes_no_second_job(client, prompts):
    """The file is uploaded once: the second submit names the same one, so that it is the same request."""
    spec = JobSpec(inputs=str(prompts), model="org/fake")
    first = client.submit(spec, idempotency_key="night-1")
    second = client.submit(spec, idempotency_key="night-1")
    assert first.job.id == second.job.id
    assert (first.is_new, second.is_new) == (True, False)
    with pytest.raises(ConflictError):
        client.submit(JobSpec(inputs=str(prompts), model="org/fake", max_tokens=3), idempotency_key="night-1")
    client.wait(first.job.id, poll_s=0.1)


def test_folders_and_globs_are_uploaded_file_by_file(client, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("b", "a"):
        pq.write_table(pa.table({"prompt": [f"{name} x"]}), folder / f"{name}.parquet")
    job = client.submit(JobSpec(inputs="in/*.parquet", model="org/fake"), base=tmp_path).job
    client.wait(job.id, poll_s=0.1)
    assert [row.output for row in client.preview(job.id)] == ["x a", "x b"]
    uploaded = client.upload(folder / "a.parquet")
    named = client.submit(JobSpec(inputs=uploaded, model="org/fake")).job
    assert client.wait(named.id, poll_s=0.1).rows.succeeded == 1


def test_steering(client, prompts):
    path = prompts.with_name("spin.jsonl")
    path.write_bytes(lines([chat("a", "SPIN")]))
    job = client.submit(JobSpec(inputs=str(path), model="org/fake")).job
    assert client.pause(job.id).state == "paused"
    assert client.wait(job.id).state == "paused"
    assert client.resume(job.id).state in {"validating", "queued", "in_progress"}
    with pytest.raises(TimeoutError):
        client.wait(job.id, poll_s=0.05, timeout_s=0.1)
    client.cancel(job.id)
    assert client.wait(job.id, poll_s=0.1).state == "cancelled"


def test_refusals_are_our_own_errors(client, tmp_path):
    with pytest.raises(NotFoundError):
        client.get("job_nothing")
    with pytest.raises(InputError, match="does not exist"):
        client.submit(JobSpec(inputs="nothing.parquet", model="org/fake"), base=tmp_path)
    with pytest.raises(InvalidSpecError, match="--download"):
        client.submit(JobSpec(inputs="s3://b/a.parquet", model="org/fake", output="here"))
    with pytest.raises(NotFoundError):
        client.submit(JobSpec(inputs="file-nothing", model="org/fake"))
    with pytest.raises(InvalidSpecError, match="no URL"):
        Client("localhost:8000")
    with Client("http://127.0.0.1:9", retries=RetryPolicy(max_retries=0)) as nobody, pytest.raises(ServerError):
        nobody.get("job_x")


def test_the_command_line_is_the_same_on_a_server(server, prompts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHINFER_SERVER", server)
    submitted = batchinfer(
        "submit", "prompts.parquet", "--model", "org/fake", "--deadline", "6h", "--wait", "--json", exit_code=3
    )
    job_id = submitted.json["id"]
    assert submitted.json["rows"]["succeeded"] == 12
    assert batchinfer("ls", "--json").json["data"][0]["id"] == job_id
    filters = ["--model", "org/fake", "--tenant", "default"]
    assert batchinfer("ls", *filters, "--json").json["data"][0]["id"] == job_id
    assert batchinfer("ls", *filters, "--tag", "a=b", "--name", "n", "--json").json["data"] == []
    assert batchinfer("status", job_id, "--json").json["state"] == "completed"
    assert batchinfer("watch", job_id, exit_code=3).stdout
    assert batchinfer("errors", job_id, "--json").json["failed_rows"] == 1
    assert batchinfer("cost", job_id, "--json").json["job_id"] == job_id
    assert batchinfer("verify", job_id).stdout.startswith("verified: 13 rows")
    results = batchinfer("results", job_id, "--download", "answers", "--json").json
    assert [Path(path).parent.name for path in results["downloaded"]] == ["answers"]
    assert pq.read_table(tmp_path / "answers").num_rows == 13
    assert batchinfer("retry", job_id, "--json").json["retried_rows"] == 1
    assert batchinfer("cancel", "job_nothing", exit_code=4).stderr.startswith("Error: no job")
    monkeypatch.delenv("BATCHINFER_SERVER")
    # without a server, the same command asks the (empty) database of this machine
    batchinfer("status", job_id, exit_code=4)
    assert batchinfer("status", job_id, "--server", server, "--api-key", "none", "--json").json["id"] == job_id


@pytest.mark.parametrize("page", ["openai.md", "client.md"])
def test_examples_of_the_documentation_run(server, prompts, page, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    code = "\n".join(blocks)
    code = (
        code.replace("bi_...", "none")
        .replace("http://127.0.0.1:8000", server)
        .replace("org/model", MODEL if page == "openai.md" else "org/fake")
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wanted = answer("What is 9 plus 9?") if page == "openai.md" else answer(PROMPTS[0])
    assert wanted in done.stdout
