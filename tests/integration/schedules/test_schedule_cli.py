"""The commands, as people type them."""

import json

import pytest
from click.testing import CliRunner

from batchinfer.cli.main import cli


@pytest.fixture
def run(bench, monkeypatch):
    monkeypatch.setenv("BATCHINFER_DATABASE_URL", bench.url)
    monkeypatch.chdir(bench.folder)

    def call(*args):
        result = CliRunner().invoke(cli, ["schedule", *args])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def database_url(sqlite_url):
    """Once is enough here."""
    return sqlite_url


def add(run, name="nightly", *more):
    return run(
        "add", name, "--cron", "30 2 * * *", "--tz", "Europe/Istanbul", "--input", "in/date={{ logical_date }}/*.parquet",
        "--output", "out/{{ logical_date }}", "--model", "org/name", "--max-tokens", "7", *more,
    )  # fmt: skip


def test_a_schedule_from_add_to_rm(run, bench):
    view = json.loads(add(run, "nightly", "--deadline", "6h", "--overlap", "queue", "--json").stdout)
    assert view["cron"] == "30 2 * * *"
    assert view["overlap"] == "queue"
    assert view["job"]["inputs"] == [f"{bench.folder}/in/date={{{{ logical_date }}}}/*.parquet"]
    assert (view["job"]["max_tokens"], view["job"]["deadline"]) == (7, "6h")
    assert len(view["next_runs"]) == 3
    assert "nightly\t30 2 * * *\tEurope/Istanbul" in run("ls").stdout
    assert "paused" in run("pause", "nightly").stdout
    assert json.loads(run("show", "nightly", "--json").stdout)["paused"] is True
    assert "02:30" in run("resume", "nightly").stdout
    run_id = run("trigger", "nightly", "--date", "2025-05-01T02:30").stdout.splitlines()[0]
    assert run_id in run("runs", "nightly").stdout
    done = json.loads(
        run("backfill", "nightly", "--start", "2025-05-01", "--end", "2025-05-03", "--parallel", "2", "--json").stdout
    )
    assert (len(done["runs"]), done["existing"]) == (2, 1)
    assert "2025-05-03 02:30\tbackfill\twaiting" in run("runs", "nightly", "--limit", "1").stdout
    assert "removed" in run("rm", "nightly").stdout
    assert json.loads(run("ls", "--json").stdout)["data"] == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--jitter", "soon"], "duration"),
        (["--missing-input", "wait"], "wait:2h"),
        (["--deadline", "2030-01-01T00:00Z"], "duration"),
        (["--temperature", "-1"], "temperature"),
        (["--tz", "Mars/Olympus"], "time zone"),
        (["--cron", "nightly"], "five fields"),
        (["--output", "{{ today }}"], "logical_date"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(run, more, said):
    from batchinfer.errors import InvalidSpecError

    with pytest.raises(InvalidSpecError, match=said):
        add(run, "nightly", *more)
    assert json.loads(run("ls", "--json").stdout)["data"] == []
