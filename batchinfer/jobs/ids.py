"""Ids: text that sorts by the time it was made, as ULIDs do (https://github.com/ulid/spec), in lower case."""

from __future__ import annotations

import secrets
import time

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
_RANDOM_BITS = 80


def new_job_id(time_ms: int | None = None) -> str:
    """Make ``job_`` and 26 characters, see :func:`new_id`."""
    return new_id("job_", time_ms)


def new_id(prefix: str, time_ms: int | None = None) -> str:
    """Make the prefix and 26 characters: 48 bits of Unix time in milliseconds, then 80 random bits."""
    if time_ms is None:
        time_ms = time.time_ns() // 1_000_000
    number = time_ms << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    return prefix + "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))
