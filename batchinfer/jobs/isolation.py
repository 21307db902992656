"""Who is to blame when attempts of a shard die: a pure policy that finds the row that kills engines.

After ``max_attempts`` deaths the shard is *probed*: the next lease runs only the first ``probe_rows`` of its remaining
rows, alone in the engine. A probe that dies is halved, one that lives is doubled (its rows are committed and no longer
remain). A single announced row that dies is *poisoned*: it becomes an error row and never runs again.
With n rows and one poisoned row this takes about log2(n) deaths beyond ``max_attempts``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_POISONED = 32
"""Poisoned rows of a shard after which the engine is to blame, unless more rows than that succeeded."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """What is known of a shard's deaths."""

    num_failures: int = 0
    """Deaths of an engine or worker, all told."""
    num_faults: int = 0
    """Failures that no row explains, since a part was last committed."""
    probe_rows: int | None = None
    poisoned_rows: tuple[int, ...] = ()
    is_quarantined: bool = False


def after_death(
    known: Isolation,
    *,
    remaining_rows: int,
    succeeded_rows: int,
    probe_done: int,
    probe_row: int | None,
    max_attempts: int,
) -> Isolation:
    """The engine or the worker died in an attempt.

    Args:
        known: what was known when the attempt began.
        remaining_rows: rows of the shard without an outcome now.
        succeeded_rows: rows of the shard that have succeeded.
        probe_done: rows that the attempt committed.
        probe_row: the one row that the attempt announced, if it did.
        max_attempts: deaths before probing begins; at least 1.
    """
    known = replace(known, num_failures=known.num_failures + 1)
    if remaining_rows == 0:
        return after_fault(known, max_attempts=max_attempts)  # it died while merging: no row is left to blame
    if known.probe_rows is None:
        if known.num_failures < max_attempts:
            return known
        return replace(known, probe_rows=(remaining_rows + 1) // 2)
    if known.probe_rows > 1:
        suspects = max(1, known.probe_rows - probe_done)
        return replace(known, probe_rows=min(max(1, suspects // 2), remaining_rows))
    if probe_row is None:
        return after_fault(known, max_attempts=max_attempts)  # it died before the row was given to the engine
    poisoned = tuple(dict.fromkeys((*known.poisoned_rows, probe_row)))
    is_hopeless = len(poisoned) >= max(MAX_POISONED, succeeded_rows)
    return replace(known, poisoned_rows=poisoned, is_quarantined=is_hopeless)


def after_fault(known: Isolation, *, max_attempts: int) -> Isolation:
    """Something failed that no row explains: storage, the database, a bug. Too often, and the shard is quarantined."""
    known = replace(known, num_faults=known.num_faults + 1)
    return replace(known, is_quarantined=known.num_faults >= max_attempts)


def after_release(known: Isolation, *, probe_done: int) -> Isolation:
    """The attempt gave the rest back. A probe that got through trusts twice as many rows next time."""
    if known.probe_rows is None or probe_done < known.probe_rows:
        return known
    return replace(known, probe_rows=2 * known.probe_rows)


def fault_delay_s(num_faults: int) -> int:
    """Seconds before a shard is leased again after its n-th fault in a row (5, 15, 45, 60, ...): storage may recover."""
    return int(min(60, 5 * 3 ** (num_faults - 1)))
