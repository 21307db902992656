"""What a job needs of a worker besides its model, as one short text that both can compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_POOL = "default"
"""Workers and jobs that name no pool."""
POOL_NAME = r"[a-z0-9][a-z0-9._-]{0,39}"
"""Names of pools and of kinds of hardware."""


def needs_of(pool: str | None, device_kind: str | None) -> str:
    """``POOL/KIND``; empty if the job asks for neither."""
    pool = "" if pool in (None, DEFAULT_POOL) else pool
    return f"{pool}/{device_kind or ''}" if pool or device_kind else ""


def offers_of(pools: Iterable[str], device_kinds: Iterable[str]) -> tuple[str, ...]:
    """All needs that a worker in these pools, with hardware that goes by these names, can serve."""
    kinds = ("", *device_kinds)
    return tuple(dict.fromkeys(needs_of(pool, kind or None) for pool in pools or (DEFAULT_POOL,) for kind in kinds))


def describe_needs(needs: str) -> str:
    """For people: `` in pool nightly on h100``; empty if nothing is needed."""
    pool, _, kind = needs.partition("/")
    return (f" in pool {pool}" if pool else "") + (f" on {kind}" if kind else "")
