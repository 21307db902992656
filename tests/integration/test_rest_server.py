"""The server as a process, on a real socket, with a worker beside it: submit, poll, fetch, verify."""

import json
import signal
import time
import urllib.error
import urllib.request

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.cli.serve import bind
from tests.fakes import answer
from tests.processes import Process
from tests.program import batchinfer

pytestmark = pytest.mark.service


def ask(url, path, body=None, **headers):
    """``(status, body)``, by the standard library alone: what a plain client sees."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def url_of(server):
    line = server.wait_for(lambda line: "batchinfer serves http" in line)
    return line.split("serves ")[1].split("/v1")[0]


def poll(url, job_id, is_done):
    """Poll as a client does."""
    for _ in range(600):
        _, job = ask(url, f"/v1/jobs/{job_id}")
        if is_done(job):
            return job
        time.sleep(0.1)
    raise AssertionError(job)


def test_a_job_over_the_wire(database_url, tmp_path, monkeypatch):
    """Submit, poll to the end, fetch results, errors and cost; the files hold what the API says; the server stops cleanly."""
    prompts = [f"row {number} says hello" for number in range(40)] + ["", "ERROR please"]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "prompts.parquet")
    settings = {"database_url": database_url, "usd_per_hour": "3600"}
    with Process("serve", "--port", 0, **settings) as server, Process("worker", **settings) as worker:
        url = url_of(server)
        assert ask(url, "/readyz")[0] == 200
        spec = {"inputs": [str(tmp_path / "prompts.parquet")], "model": "org/fake", "output": str(tmp_path / "out")}
        headers = {"Idempotency-Key": "once"}
        status, job = ask(url, "/v1/jobs", spec, **headers)
        assert status == 202
        assert ask(url, f"/v1/jobs/{job['id']}")[0] == 200
        assert ask(url, "/v1/jobs", spec, **headers)[1]["id"] == job["id"]
        assert ask(url, "/v1/jobs", spec | {"seed": 1}, **headers)[0] == 409

        job = poll(url, job["id"], lambda job: job["state"] in {"completed", "failed"})
        assert (job["state"], job["outcome"], job["rows"]["succeeded"], job["rows"]["errored"]) == (
            "completed", "partial", 40, 2,
        )  # fmt: skip
        _, errors = ask(url, f"/v1/jobs/{job['id']}/errors")
        assert [(row["row_index"], row["code"]) for row in errors["data"]] == [
            (40, "empty_prompt"),
            (41, "engine_error"),
        ]
        _, results = ask(url, f"/v1/jobs/{job['id']}/results")
        assert results["is_complete"]
        files = [file["path"] for file in results["files"]]
        assert sum(file["num_rows"] for file in results["files"]) == 42
        rows = duckdb.sql(f"select prompt, output from read_parquet({files}) where status = 'succeeded'").fetchall()
        assert dict(rows) == {prompt: answer(prompt) for prompt in prompts[:40]}
        _, cost = ask(url, f"/v1/jobs/{job['id']}/cost")
        # at a dollar a second, and a millisecond for each row that reached the engine
        [(charged,)] = duckdb.sql(f"select sum(cost_usd) from read_parquet({files})").fetchall()
        assert f"{charged:.9f}" == cost["rows_usd"] == "0.041000000"

        monkeypatch.setenv("BATCHINFER_DATABASE_URL", database_url)
        assert batchinfer("verify", job["id"]).stdout.startswith("verified: 42 rows")
        assert batchinfer("status", job["id"], "--json").json == job
        for process in (server, worker):
            process.send(signal.SIGTERM)
            assert process.wait() == 0, process.stderr


def test_a_stranger_is_not_let_in_without_a_word(tmp_path):
    """There are no keys, so an address that others reach must be asked for explicitly."""
    assert "--insecure" in batchinfer("serve", "--host", "0.0.0.0", "--port", 0, exit_code=2).stderr
    with Process("serve", "--host", "0.0.0.0", "--port", 0, "--insecure") as server:
        port = url_of(server).rpartition(":")[2]
        status, _ = ask(f"http://127.0.0.1:{port}", "/healthz", Host="batch.example.org")
        assert status == 200


def test_a_port_that_is_taken_is_one_sentence():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        refused = batchinfer("serve", "--port", port, exit_code=2)
    assert refused.stderr.startswith(f"Error: cannot listen on 127.0.0.1:{port}: ")
    assert refused.stderr.count("\n") == 1


def test_a_database_without_tables_is_refused_with_the_way_out(postgres, monkeypatch):
    url = postgres.create_database()
    monkeypatch.setenv("BATCHINFER_DATABASE_URL", url)
    for command in (["serve", "--port", 0], ["worker"], ["ls"]):
        assert "`batchinfer db upgrade`" in batchinfer(*command, exit_code=2).stderr
    assert "batchinfer db upgrade" in batchinfer("db", "current", exit_code=1).stdout
    assert batchinfer("db", "upgrade", "--json").json["before"] is None
    assert batchinfer("db", "current", "--json").json["is_current"]
    assert batchinfer("ls", "--json").json["data"] == []
    postgres.drop_database(url)


def test_a_database_that_goes_away_is_503_until_it_is_back(postgres, postgresql_url):
    """The server stays up, says that it is not ready, and recovers by itself."""
    url = postgresql_url
    with Process("serve", "--port", 0, database_url=url) as server:
        address = url_of(server)
        assert ask(address, "/v1/jobs")[0] == 200
        postgres.stop()
        try:
            assert ask(address, "/readyz")[0] == 503
            assert ask(address, "/healthz")[0] == 200
        finally:
            postgres.start()
        assert ask(address, "/v1/jobs")[0] == 200
        assert ask(address, "/readyz")[0] == 200
