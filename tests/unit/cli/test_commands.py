"""Commands on an embedded database: what they print for people, and for programs."""

import pytest

from batchinfer.jobs.service import JobService
from batchinfer.jobs.spec import JobSpec
from tests.played import complete, lease, make_input, plan, run_shard
from tests.program import batchinfer


@pytest.fixture
def ledger(sqlite_url, monkeypatch):
    monkeypatch.setenv("BATCHINFER_DATABASE_URL", sqlite_url)
    service = JobService.connect(sqlite_url, "memory://")
    yield service.ledger
    service.close()


@pytest.fixture
def submit(ledger, tmp_path):
    path = make_input(tmp_path)

    def submit(*flags):
        return batchinfer("submit", path, "--model", "org/name", *flags).stdout.strip()

    return submit


def test_submit_prints_the_id_alone(submit):
    """So that ``JOB=$(batchinfer submit ...)`` works; what else there is to say goes to stderr."""
    assert submit().startswith("job_")


def test_submit_says_if_nobody_will_work(ledger, tmp_path):
    path = make_input(tmp_path)
    assert "no worker is running" in batchinfer("submit", path, "--model", "org/name").stderr
    ledger.register_worker("w", hostname="h", pid=1, nanos_per_hour=1)
    assert "no worker is running" not in batchinfer("submit", path, "--model", "org/name").stderr


def test_submit_twice_under_one_key_is_one_job(submit, tmp_path):
    first = submit("--idempotency-key", "k", "--deadline", "6h")
    assert submit("--idempotency-key", "k", "--deadline", "6h") == first
    path = make_input(tmp_path)
    other = batchinfer("submit", path, "--model", "org/name", "--idempotency-key", "k", exit_code=5)
    assert "idempotency key 'k'" in other.stderr


def test_every_flag_reaches_the_spec(ledger, tmp_path):
    """The same names on the command line and in the spec."""
    (tmp_path / "m.gguf").touch()
    flags = {
        "--output": "s3://b/o", "--messages-column": "m", "--system": "be brief", "--id-column": "id",
        "--max-tokens": "7", "--min-tokens": "2", "--temperature": "0.5", "--top-p": "0.9", "--top-k": "5",
        "--min-p": "0.1", "--seed": "0", "--stop": "END", "--stop-token-id": "3", "--max-model-len": "99",
        "--dtype": "float32", "--quantization": "none", "--kv-cache-dtype": "int8", "--speculation": "ngram", "--shard-rows": "5", "--priority": "-2", "--deadline": "1d",
        "--budget": "2.5", "--on-null": "skip", "--column-prefix": "ai_", "--name": "n", "--tag": "a=b",
        "--max-attempts": "4", "--limit": "9",
    }  # fmt: skip
    words = [word for pair in flags.items() for word in pair]
    path = make_input(tmp_path)
    result = batchinfer("submit", path, "--model", tmp_path / "m.gguf", *words, "--ignore-eos", "--token-ids", "--json")
    spec = ledger.get_job(result.json["id"]).spec.model_dump(mode="json")
    assert spec.pop("deadline") is not None
    defaults = JobSpec(inputs=path, model="m").model_dump(mode="json", exclude={"deadline"})
    assert spec == defaults | {
        "inputs": [path], "model": str(tmp_path / "m.gguf"), "output": "s3://b/o", "name": "n", "tags": {"a": "b"},
        "prompt_column": None, "messages_column": "m", "template": None, "system": "be brief", "id_column": "id",
        "on_null": "skip", "column_prefix": "ai_", "include_token_ids": True, "limit": 9, "max_tokens": 7,
        "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 0, "stop": ["END"],
        "stop_token_ids": [3], "ignore_eos": True, "max_model_len": 99, "dtype": "float32", "quantization": "none",
        "kv_cache_dtype": "int8", "speculation": "ngram",
        "shard_rows": 5, "priority": -2, "budget_usd": "2.5", "max_attempts": 4,
    }  # fmt: skip


def test_ls_is_a_line_a_job_newest_first(ledger, submit):
    first, second = submit("--name", "first"), submit("--name", "tab\there")
    plan(ledger, first)
    lines = [line.split("\t") for line in batchinfer("ls").stdout.splitlines()]
    assert lines[0] == ["JOB", "NAME", "STATE", "ROWS", "ERRORS", "COST", "AGE", "MODEL"]
    assert [line[:4] for line in lines[1:]] == [
        [second, "tab here", "validating", "-"],
        [first, "first", "queued", "0/10"],
    ]
    assert [job["id"] for job in batchinfer("ls", "--state", "queued", "--json").json["data"]] == [first]
    page = batchinfer("ls", "--limit", 1)
    assert f"--after {second}" in page.stderr
    assert first in batchinfer("ls", "--after", second).stdout


def test_ls_lists_what_all_filters_let_through(ledger, submit):
    red, blue = submit("--name", "red", "--tag", "team=a b"), submit("--name", "blue", "--tag", "team=c")
    model = ledger.get_job(red).model

    def listed(*filters):
        return [job["id"] for job in batchinfer("ls", *filters, "--json").json["data"]]

    assert listed("--model", model, "--tenant", "default") == [blue, red]
    assert listed("--name", "red") == listed("--tag", "team=a b") == [red]
    assert listed("--name", "red", "--tag", "team=c") == listed("--model", "other") == listed("--tenant", "x") == []
    assert batchinfer("ls", "--name", "red", "--tag", "team=c").stderr == "no job has name red, tag team=c\n"
    more = batchinfer("ls", "--tenant", "default", "--limit", 1).stderr.removeprefix("more: batchinfer ").split()
    assert batchinfer(*more).stdout.splitlines()[1].startswith(red)
    assert "KEY=VALUE" in batchinfer("ls", "--tag", "team", exit_code=2).stderr


def test_an_empty_list_says_what_to_do(ledger):
    assert "batchinfer run" in batchinfer("ls").stderr
    assert batchinfer("ls").stdout == ""


def test_status_says_how_a_job_stands_and_what_to_do_next(ledger, submit):
    job_id = submit("--budget", "0.000003", "--tag", "team=search")
    plan(ledger, job_id)
    run_shard(ledger, errored=1)
    text = batchinfer("status", job_id).stdout
    fields = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert fields["state"] == "budget_exhausted"
    assert fields["rows"] == "5/10  5 remaining, 4 succeeded, 1 errored"
    assert fields["tokens"] == "500 prompt (50 cached), 100 generated"
    assert fields["cost"] == "$0.0000050 metered, budget $0.0000030"
    assert fields["tags"] == "team=search"
    assert fields["warning"] == "something odd"
    assert fields["next"] == f"batchinfer resume {job_id} --budget USD"
    assert batchinfer("status", job_id, "--json").json["rows"]["remaining"] == 5


def test_status_says_if_nobody_works_on_it(submit):
    assert "no worker is running" in batchinfer("status", submit()).stderr


@pytest.mark.parametrize(
    "command", ["status", "watch", "cancel", "pause", "resume", "retry", "results", "errors", "cost"]
)
def test_a_job_that_does_not_exist_exits_4(ledger, command):
    result = batchinfer(command, "job_nope", exit_code=4)
    assert result.stderr == "Error: no job job_nope; `batchinfer ls` lists them\n"


def test_pause_resume_cancel(submit, ledger):
    job_id = submit()
    assert batchinfer("pause", job_id, "--json").json["state"] == "paused"
    assert batchinfer("watch", job_id, exit_code=6).stdout.splitlines()[1].split() == ["state", "paused"]
    assert f"batchinfer run --resume {job_id}" in batchinfer("resume", job_id).stdout
    assert "validating" in batchinfer("resume", job_id, exit_code=5).stderr
    plan(ledger, job_id)
    run_shard(ledger)
    assert "5/10 rows have an outcome and are kept" in batchinfer("cancel", job_id).stdout
    assert "cancelling" in batchinfer("pause", job_id, exit_code=5).stderr


def test_resume_with_a_budget(submit, ledger):
    job_id = submit("--budget", "0.000001")
    plan(ledger, job_id)
    run_shard(ledger)
    assert "budget" in batchinfer("resume", job_id, exit_code=5).stderr
    assert batchinfer("resume", job_id, "--budget", "$2", "--json").json["cost"]["budget_usd"] == "2.000000000"
    assert "--budget 'x'" in batchinfer("resume", job_id, "--budget", "x", exit_code=2).stderr


def test_retry_runs_the_chosen_rows(submit, ledger):
    job_id = submit()
    complete(ledger, job_id, errored=2)
    assert "nothing to run" in batchinfer("retry", job_id, "--status", "expired").stdout
    assert batchinfer("retry", job_id, "--json").json["retried_rows"] == 2
    assert lease(ledger).shard.todo_rows == 2


def test_errors_by_code_with_advice(submit, ledger):
    job_id = submit()
    complete(ledger, job_id, errored=2)
    lines = batchinfer("errors", job_id).stdout.splitlines()
    assert lines[0] == "2 rows did not succeed:"
    assert lines[1].startswith("  empty_prompt (2): ")
    assert "Fill the prompt" in lines[1]
    assert lines[3:] == ["0\terrored\tempty_prompt\tnothing to say", "1\terrored\tempty_prompt\tnothing to say"]
    assert "--offset 1" in batchinfer("errors", job_id, "--limit", 1).stderr
    assert [row["row_index"] for row in batchinfer("errors", job_id, "--offset", 1, "--json").json["data"]] == [1]


def test_a_job_without_errors_says_so(submit, ledger):
    job_id = submit()
    complete(ledger, job_id)
    assert "no row that failed" in batchinfer("errors", job_id).stdout


def test_cost_sums_to_the_meter(submit, ledger):
    job_id = submit()
    complete(ledger, job_id)
    lines = {line.split("  ")[0]: line.split()[-1] for line in batchinfer("cost", job_id).stdout.splitlines()}
    assert lines["rows"] == "$0.000010000"
    assert lines["overhead: load"] == "$0.000000077"
    assert batchinfer("cost", job_id, "--json").json["metered_total_usd"] == "0.000010077"


def test_watch_follows_to_the_end_and_exits_as_the_job_did(submit, ledger):
    job_id = submit()
    complete(ledger, job_id, errored=1)
    result = batchinfer("watch", job_id, exit_code=3)
    assert f"{job_id}  completed  10/10 rows  1 errored" in result.stderr
    assert "completed (partial)" in result.stdout
    assert batchinfer("watch", job_id, "--json", exit_code=3).json["outcome"] == "partial"


def test_results_of_a_job_that_has_none_yet(submit):
    job_id = submit()
    assert "no results yet" in batchinfer("results", job_id).stdout
    document = batchinfer("results", job_id, "--json").json
    assert (document["files"], document["rows"], document["is_complete"]) == ([], [], False)


def test_results_that_another_machine_has(submit, ledger):
    """The files of a played job exist nowhere: the database still tells what there is."""
    job_id = submit()
    complete(ledger, job_id)
    result = batchinfer("results", job_id)
    assert "(2 files, 10 rows, 2.4 KiB)" in result.stdout
    assert "cannot be read from this machine" in result.stderr
    assert batchinfer("results", job_id, "--json").json["rows"] == []


def test_list_prices_are_set_and_shown(ledger):
    batchinfer("price", "show", "org/name", exit_code=4)
    batchinfer("price", "set", "org/name", "--input", "$0.15", "--cached-input", "0.05", "--output", "0.6")
    price = ledger.price_at("org/name")
    # ten prompt tokens of which four are cached, and three generated, by hand: 6*0.15 + 4*0.05 + 3*0.6 per million
    assert price.cost(10, 4, 3) == 2_900
    assert batchinfer("price", "show", "org/name", "--json").json["usd_per_million_tokens"] == {
        "input": "0.150000000", "cached_input": "0.050000000", "output": "0.600000000",
    }  # fmt: skip
    assert "$0.6 per million" in batchinfer("price", "show", "org/name").stdout
    assert "--output 'x'" in batchinfer("price", "set", "m", "--input", "1", "--output", "x", exit_code=2).stderr


def test_the_embedded_database_makes_itself(monkeypatch, tmp_path):
    monkeypatch.setenv("BATCHINFER_HOME", str(tmp_path / "new" / "home"))
    assert batchinfer("ls", "--json").json["data"] == []
    assert (tmp_path / "new" / "home" / "batchinfer.db").exists()
    assert batchinfer("db", "current", "--json").json["is_current"]


def test_a_schema_comes_from_a_file_or_the_line_itself(ledger, tmp_path):
    path, schema = make_input(tmp_path), tmp_path / "schema.json"
    schema.write_text('{\n  "type": "object",\n  "properties": {"b": {"type": "null"}, "a": {}}\n}')
    grammar = tmp_path / "g.lark"
    grammar.write_text('start: "a" | "b"')
    command = ("submit", path, "--model", "org/name", "--json")
    for given in (schema, schema.read_text()):
        job = ledger.get_job(batchinfer(*command, "--json-schema", given, "--retry-truncated").json["id"])
        assert job.spec.json_schema == '{"type":"object","properties":{"b":{"type":"null"},"a":{}}}'
        assert job.spec.retry_truncated
        assert job.spec.result_columns() == ("parsed",)
    job = ledger.get_job(batchinfer(*command, "--guided-grammar", grammar, "--parsed").json["id"])
    assert job.spec.guided_grammar == 'start: "a" | "b"'
    assert job.spec.result_columns() == ("parsed",)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--json-schema", '{"type": "nothing"}'), "json_schema: Invalid type: nothing"),
        (("--json-schema", '{"not": {}}'), 'Unimplemented keys: ["not"]'),
        (("--json-schema", "nowhere.json"), "--json-schema nowhere.json cannot be read: No such file"),
        (("--guided-regex", "(a"), "unclosed group"),
        (("--guided-choice", "a", "--guided-regex", "a"), "guided_regex and guided_choice exclude each other"),
    ],
)
def test_a_form_that_no_answer_can_have_is_refused_at_submit(ledger, tmp_path, flags, words):
    result = batchinfer("submit", make_input(tmp_path), "--model", "org/name", *flags, exit_code=2)
    assert words in result.stderr
    assert batchinfer("ls", "--json").json["data"] == []
