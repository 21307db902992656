"""What the process's exit code says; the one place where codes are chosen. Shown in every ``--help``."""

from __future__ import annotations

from enum import IntEnum

from batchinfer.errors import BatchInferError, ConflictError, NotFoundError, UserError


class ExitCode(IntEnum):
    """Exit codes of ``batchinfer``. A nightly script may treat 0 as green, 3 as "look at the error rows"."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PARTIAL = 3
    NOT_FOUND = 4
    CONFLICT = 5
    STOPPED = 6
    INTERRUPTED = 130


EXIT_CODES: dict[ExitCode, str] = {
    ExitCode.OK: "it worked; a job that was waited for has no row that failed",
    ExitCode.FAILED: "the job failed, was cancelled, or not one row succeeded; or verify, doctor or the program failed",
    ExitCode.USAGE: "a flag, a job description or an input is wrong: nothing was run",
    ExitCode.PARTIAL: "the job ended, and some of its rows did not succeed",
    ExitCode.NOT_FOUND: "no such job, file or page",
    ExitCode.CONFLICT: "the job's state, an idempotency key used before or an output that exists does not allow it",
    ExitCode.STOPPED: "the job stands still before its end (paused, or its budget is used up): resume it",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C or SIGTERM; finished rows are safe",
}

_OUTCOMES = {"succeeded": ExitCode.OK, "partial": ExitCode.PARTIAL, "none": ExitCode.FAILED}
_STANDING_STATES = frozenset({"paused", "budget_exhausted"})


def epilog() -> str:
    r"""The exit codes as a paragraph for click, which keeps lines after ``\b`` as they are."""
    lines = [f"  {code.value:>3}  {meaning}" for code, meaning in EXIT_CODES.items()]
    return "\b\nExit codes:\n" + "\n".join(lines)


def of_error(error: BatchInferError) -> ExitCode:
    """The exit code of a deliberate error."""
    if isinstance(error, NotFoundError):
        return ExitCode.NOT_FOUND
    if isinstance(error, ConflictError):
        return ExitCode.CONFLICT
    return ExitCode.USAGE if isinstance(error, UserError) else ExitCode.FAILED


def of_job(state: str, outcome: str | None) -> ExitCode:
    """The exit code of a job that was waited for."""
    if state in _STANDING_STATES:
        return ExitCode.STOPPED
    if state == "completed":
        return _OUTCOMES[outcome or "none"]
    return ExitCode.PARTIAL if state == "expired" and outcome == "partial" else ExitCode.FAILED
