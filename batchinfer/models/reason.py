"""Why a library failed, in as few words as it has."""

from __future__ import annotations


def reason(error: Exception) -> str:
    """The first line of an error's message, or the name of its class."""
    return str(error).strip().partition("\n")[0].strip(" .") or type(error).__name__
