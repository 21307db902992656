"""What a check of ``doctor`` reports."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MIN_FREE_BYTES = 5 * 2**30
"""Less free disk than this is worth a warning: a small model has about as much."""


class CheckStatus(StrEnum):
    """What a check found."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; ``mend`` says what to do about it."""

    name: str
    status: CheckStatus
    detail: str
    mend: str | None = None


def ok(name: str, detail: str) -> Check:
    """All is well."""
    return Check(name, CheckStatus.OK, detail)


def warn(name: str, detail: str, mend: str) -> Check:
    """It works, but somebody should know."""
    return Check(name, CheckStatus.WARNING, detail, mend)


def fail(name: str, detail: str, mend: str) -> Check:
    """It does not work."""
    return Check(name, CheckStatus.FAILED, detail, mend)
