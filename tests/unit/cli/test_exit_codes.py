"""What a script learns from the exit code, and a person from the message."""

import pytest
from sqlalchemy.exc import OperationalError

from batchinfer.cli import exit_codes, main
from batchinfer.cli.exit_codes import ExitCode
from batchinfer.errors import ConflictError, EngineDiedError, InputError, InvalidSpecError, ModelError, NotFoundError
from batchinfer.jobs.status import JobState
from tests.program import batchinfer


@pytest.mark.parametrize(
    ("state", "outcome", "code"),
    [
        ("completed", "succeeded", 0),
        ("completed", "partial", 3),
        ("completed", "none", 1),
        ("expired", "partial", 3),
        ("expired", "none", 1),
        ("cancelled", "partial", 1),
        ("cancelled", "none", 1),
        ("failed", None, 1),
        ("paused", None, 6),
        ("budget_exhausted", None, 6),
    ],
)
def test_a_nightly_script_sees_how_a_job_ended(state, outcome, code):
    """Only a job whose rows all did well is green; one that needs a person's word is told apart from one that failed."""
    assert exit_codes.of_job(state, outcome) == code


def test_every_state_in_which_a_wait_ends_has_a_code():
    ends = [state for state in JobState if state.is_terminal or state in {"paused", "budget_exhausted"}]
    assert {exit_codes.of_job(state, "none") for state in ends} == {ExitCode.FAILED, ExitCode.STOPPED}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFoundError("x"), 4),
        (ConflictError("x"), 5),
        (InvalidSpecError("x"), 2),
        (InputError("x"), 2),
        (ModelError("x"), 2),
        (EngineDiedError("x"), 1),
    ],
)
def test_deliberate_errors_have_codes(error, code):
    assert exit_codes.of_error(error) == code


def raising(error):
    def command(*_args, **_kwargs):
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (NotFoundError("no job x; `batchinfer ls` lists them"), 4, "Error: no job x; `batchinfer ls` lists them\n"),
        (ZeroDivisionError("by\nzero"), 1, "Error: ZeroDivisionError: by -- add --debug for the traceback\n"),
        (KeyboardInterrupt(), 130, "Error: interrupted\n"),
    ],
)
def test_an_error_is_one_sentence(monkeypatch, error, code, message):
    monkeypatch.setattr(main.cli, "main", raising(error))
    result = batchinfer("ls", exit_code=code)
    assert (result.stdout, result.stderr) == ("", message)


def test_a_database_that_is_away_is_told_from_a_fault_of_the_program(monkeypatch):
    error = OperationalError("select 1", {}, Exception("connection refused"))
    monkeypatch.setattr(main.cli, "main", raising(error))
    text = batchinfer("ls", exit_code=1).stderr
    assert "the database refused: " in text
    assert "connection refused" in text
    assert "`batchinfer doctor`" in text


@pytest.mark.parametrize("args", [["--debug", "ls"], ["ls", "--debug"]])
def test_debug_shows_the_traceback_wherever_the_flag_stands(monkeypatch, args):
    monkeypatch.setattr("batchinfer.cli.connect.load_settings", raising(ZeroDivisionError("by zero")))
    with pytest.raises(ZeroDivisionError):
        batchinfer(*args)


def test_a_reader_that_goes_away_is_no_error(monkeypatch, capfd):
    """`batchinfer ls | head` must not end in a traceback."""
    monkeypatch.setattr(main.cli, "main", raising(BrokenPipeError()))
    with pytest.raises(SystemExit) as end:
        main.main(["ls"])
    assert end.value.code == 0
    assert capfd.readouterr().err == ""


def test_usage_errors_exit_2_and_say_what_would_be_right():
    text = batchinfer("ls", "--limt", "3", exit_code=2).stderr
    assert "--limit" in text
    assert "No such command" in batchinfer("frobnicate", exit_code=2).stderr


def test_a_setting_that_is_wrong_names_its_variable(monkeypatch):
    monkeypatch.setenv("BATCHINFER_PORT", "99999")
    assert "BATCHINFER_PORT=99999" in batchinfer("ls", exit_code=2).stderr
