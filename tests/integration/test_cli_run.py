"""``batchinfer run`` as a process of its own: from a Parquet file to answers, cost and proof."""

import json
import signal

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fakes import answer
from tests.processes import Process, run_process
from tests.program import batchinfer


@pytest.fixture
def write(tmp_path):
    def write(*prompts):
        path = tmp_path / "prompts.parquet"
        pq.write_table(pa.table({"prompt": list(prompts)}), path)
        return path

    return write


@pytest.fixture(autouse=True)
def _fake_engine(monkeypatch):
    monkeypatch.setenv("BATCHINFER_ENGINE_FACTORY", "tests.fakes:create_engine")


def job_id_of(process):
    line = process.wait_for(lambda line: "runs here" in line)
    return line.split()[0]


def test_a_run_shows_answers_errors_cost_and_proof(write):
    """Piped: results on stdout, progress as plain lines on stderr, and an exit code that tells of the error rows."""
    path = write(*(f"question {number}" for number in range(8)), "", "ERROR now")
    run = run_process("run", path, "--model", "org/fake", "--name", "quick", exit_code=3)
    lines = run.stdout.splitlines()
    assert lines[:2] == ["[0] question 0", "    -> 0 question"]
    assert "2 rows did not succeed:" in lines
    assert [line.split()[0] for line in lines if line.startswith("  ")][-2:] == ["empty_prompt", "engine_error"]
    fields = {line.split()[0]: line for line in lines if line and not line.startswith((" ", "["))}
    assert "completed (partial)" in fields["state"]
    assert "8 succeeded, 2 errored" in fields["rows"]
    assert "$" in fields["cost"]
    assert f"{path}.results/job_" in fields["results:"]
    assert fields["verified:"].startswith("verified: 10 rows, one outcome each (8 succeeded, 2 errored)")
    assert "\x1b" not in run.stdout + run.stderr
    states = [line.split()[1] for line in run.stderr.splitlines() if line.startswith("job_")]
    assert states[0] == "runs"
    assert states[-1] == "completed"
    assert "Traceback" not in run.stderr


def test_json_is_all_that_is_on_stdout(write, tmp_path):
    path = write("a b", "c d e", "f g")
    out = tmp_path / "out.parquet"
    document = batchinfer("run", path, "--model", "org/fake", "--limit", 2, "--output", out, "--json").json
    assert (document["job"]["state"], document["job"]["outcome"]) == ("completed", "succeeded")
    assert document["verify"]["ok"]
    assert [(row["row_index"], row["prompt"], row["output"]) for row in document["rows"]] == [
        (0, "a b", "b a"), (1, "c d e", "e d c"),
    ]  # fmt: skip
    assert document["errors"]["failed_rows"] == 0
    assert [file["path"] for file in document["results"]["files"]] == [str(out)]
    assert duckdb.sql(f"select output from '{out}' order by row_index").fetchall() == [("b a",), ("e d c",)]


@pytest.mark.parametrize(("prompts", "code"), [(("a", "b"), 0), (("", " "), 1)])
def test_a_job_without_one_good_row_is_not_green(write, prompts, code):
    """Case 2: a job of failed rows must not look like a success to a script."""
    run = batchinfer("run", write(*prompts), "--model", "org/fake", "--json", exit_code=code)
    assert run.json["job"]["state"] == "completed"


def test_a_model_that_is_not_there_fails_the_job_in_a_sentence(write):
    run = batchinfer("run", write("a"), "--model", "missing", exit_code=1)
    assert "no model at missing" in run.stdout
    assert "Traceback" not in run.stderr


def test_ctrl_c_keeps_what_is_finished_and_resume_runs_the_rest(write, tmp_path, monkeypatch):
    """One outcome each, each row run once; the resumed job is the one that was submitted (case 14)."""
    calls = tmp_path / "calls"
    monkeypatch.setenv("CALLS_FILE", str(calls))
    prompts = [f"word{number} SLEEP:0.05" for number in range(60)]
    settings = {"max_num_seqs": 1, "checkpoint_rows": 1, "window_rows": 4}
    with Process("run", write(*prompts), "--model", "org/fake", "--shard-rows", 20, **settings) as run:
        job_id = job_id_of(run)
        while batchinfer("status", job_id, "--json").json["rows"]["succeeded"] < 3:
            pass
        run.send(signal.SIGINT)
        assert run.wait() == 130
    assert f"batchinfer run --resume {job_id}" in run.stderr
    assert "Traceback" not in run.stderr
    done = batchinfer("status", job_id, "--json").json["rows"]["succeeded"]
    assert 3 <= done < 60

    refused = batchinfer("run", "--resume", job_id, "--max-tokens", 1, exit_code=2)
    assert "--max-tokens" in refused.stderr
    document = batchinfer("run", "--resume", job_id, "--json").json
    assert document["verify"]["ok"]
    assert document["job"]["rows"]["succeeded"] == 60
    files = [file["path"] for file in document["results"]["files"]]
    assert dict(duckdb.sql(f"select prompt, output from read_parquet({files})").fetchall()) == {
        prompt: answer(prompt) for prompt in prompts
    }
    # a row in flight at the interrupt may have run twice; a committed one never
    assert len(calls.read_text().splitlines()) <= 60 + settings["window_rows"] * 2
    assert batchinfer("run", "--resume", job_id, "--json").json["job"] == document["job"]


def test_sigterm_drains_like_ctrl_c(write):
    with Process("run", write(*["a SLEEP:0.2"] * 100), "--model", "org/fake", max_num_seqs=1, checkpoint_rows=1) as run:
        job_id = job_id_of(run)
        while not batchinfer("status", job_id, "--json").json["rows"]["succeeded"]:
            pass
        run.send(signal.SIGTERM)
        assert run.wait() == 130
    assert batchinfer("status", job_id, "--json").json["state"] in {"queued", "in_progress"}


def test_a_spent_budget_stops_the_run_and_a_higher_one_goes_on(write, monkeypatch):
    """Case 11. At 3,600 dollars an hour a row of the fake costs a tenth of a cent."""
    path = write(*["a"] * 40)
    monkeypatch.setenv("BATCHINFER_USD_PER_HOUR", "3600")
    monkeypatch.setenv("BATCHINFER_SHARDS_IN_FLIGHT", "1")
    args = ("--model", "org/fake", "--shard-rows", 10, "--budget", "0.000001")
    run = batchinfer("run", path, *args, exit_code=6)
    job_id = run.stderr.split()[0]
    assert "budget_exhausted" in run.stdout
    assert f"batchinfer resume {job_id} --budget" in run.stdout
    refused = batchinfer("run", "--resume", job_id, exit_code=5)
    assert "budget" in refused.stderr
    document = batchinfer("run", "--resume", job_id, "--budget", "$1000", "--json").json
    assert document["job"]["rows"]["succeeded"] == 40


def test_submit_in_one_shell_and_a_worker_in_another(write, tmp_path):
    path = write("x y", "z", "ERROR once")
    with Process("worker") as worker:
        job = batchinfer("submit", path, "--model", "org/fake", "--wait", "--json", exit_code=3).json
        assert (job["state"], job["rows"]["succeeded"]) == ("completed", 2)
        watched = batchinfer("watch", job["id"], "--json", exit_code=3)
        assert [json.loads(line)["id"] for line in watched.stdout.splitlines()] == [job["id"]]
        assert batchinfer("retry", job["id"], "--json").json["retried_rows"] == 1
        batchinfer("watch", job["id"], exit_code=3)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.stderr
    shown = batchinfer("results", job["id"], "--json", "--head", 10).json
    assert [row["output"] for row in shown["rows"]] == ["y x", "z", None]
    assert shown["rows"][2]["error_code"] == "engine_error"
    assert batchinfer("verify", job["id"], "--json").json["ok"]


def test_verify_says_what_is_wrong(write, tmp_path):
    """A result file that was altered is found, by job or by path, with or without a database."""
    out = tmp_path / "out"
    document = batchinfer(
        "run", write("a", "b", "c"), "--model", "org/fake", "--output", out, "--json", "--no-verify"
    ).json
    job = document["job"]
    assert document["verify"] is None
    assert "verified: 3 rows" in batchinfer("verify", out).stdout
    (file,) = out.glob("*.parquet")
    table = pq.read_table(file)
    pq.write_table(table.slice(0, 2), file)
    for target in (out, job["id"]):
        report = batchinfer("verify", target, "--json", exit_code=1).json
        assert not report["ok"]
        assert report["problems"]
    assert "NOT verified" in batchinfer("verify", out, exit_code=1).stdout
    batchinfer("verify", tmp_path / "nowhere", exit_code=4)
