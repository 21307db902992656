"""The policy that finds the row that kills engines."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.jobs.isolation import (
    MAX_POISONED,
    Isolation,
    after_death,
    after_fault,
    after_release,
    fault_delay_s,
)


def death(known, *, remaining=100, succeeded=0, done=0, row=None, max_attempts=3):
    return after_death(
        known,
        remaining_rows=remaining,
        succeeded_rows=succeeded,
        probe_done=done,
        probe_row=row,
        max_attempts=max_attempts,
    )


@pytest.mark.parametrize(
    ("probe", "done", "remaining", "expected"),
    [
        # a probe that died is halved: 64 -> 32
        (64, 0, 100, 32),
        # 10 of its rows were committed before: the bad one is among the other 54
        (64, 10, 90, 27),
        (3, 0, 100, 1),
        (2, 0, 100, 1),
        # more committed than probed (poisoned rows were written too): one suspect is left
        (2, 3, 100, 1),
        # never more than remain
        (64, 0, 10, 10),
    ],
)
def test_a_probe_that_dies_is_halved(probe, done, remaining, expected):
    assert death(Isolation(3, 0, probe), done=done, remaining=remaining).probe_rows == expected


def test_probing_begins_after_max_attempts_with_half_of_what_remains():
    known = Isolation()
    for deaths in (1, 2):
        known = death(known, remaining=7)
        assert known == Isolation(num_failures=deaths)
    assert death(known, remaining=7) == Isolation(num_failures=3, probe_rows=4)
    assert death(Isolation(), remaining=1, max_attempts=1) == Isolation(num_failures=1, probe_rows=1)


def test_a_single_announced_row_that_dies_is_poisoned():
    known = death(Isolation(5, 0, 1, (4,)), row=17)
    assert (known.poisoned_rows, known.probe_rows, known.is_quarantined) == ((4, 17), 1, False)


def test_a_single_row_that_was_not_announced_is_not_blamed():
    """The worker died before the engine got the row: another row must not pay for it, nor must it go on for ever."""
    known = death(Isolation(5, 0, 1), max_attempts=2)
    assert (known.poisoned_rows, known.num_faults, known.is_quarantined) == ((), 1, False)
    assert death(known, max_attempts=2).is_quarantined


def test_a_death_without_remaining_rows_is_a_fault():
    """It died while merging: no row is to blame."""
    known = death(Isolation(), remaining=0, max_attempts=1)
    assert (known.probe_rows, known.num_faults, known.is_quarantined) == (None, 1, True)


def test_faults_quarantine_after_max_attempts():
    known = Isolation()
    for _ in range(2):
        known = after_fault(known, max_attempts=3)
        assert not known.is_quarantined
    assert after_fault(known, max_attempts=3).is_quarantined


@pytest.mark.parametrize(("probe", "done", "expected"), [(None, 9, None), (4, 4, 8), (4, 5, 8), (4, 3, 4), (1, 1, 2)])
def test_a_probe_that_got_through_doubles_and_one_that_was_drained_does_not(probe, done, expected):
    assert after_release(Isolation(3, 0, probe), probe_done=done).probe_rows == expected


def test_an_engine_that_kills_every_row_is_itself_to_blame():
    known = Isolation(3, 0, 1)
    for row in range(MAX_POISONED):
        assert not known.is_quarantined
        known = death(known, row=row)
    assert known.is_quarantined
    assert not death(Isolation(3, 0, 1, tuple(range(MAX_POISONED))), row=99, succeeded=1000).is_quarantined


def test_faults_are_tried_again_ever_later():
    assert [fault_delay_s(n) for n in (1, 2, 3, 4, 9)] == [5, 15, 45, 60, 60]


def run_shard(num_rows: int, poison: set[int], max_attempts: int) -> tuple[set[int], list[int], int]:
    """Run a shard whose ``poison`` rows kill the engine at once, committing nothing of their attempt.

    Returns rows that succeeded, rows that were poisoned, and deaths.
    """
    known, done, written, deaths = Isolation(), set(), [], 0
    for _ in range(20 * num_rows + 100):
        remaining = [row for row in range(num_rows) if row not in done and row not in written]
        bad = [row for row in remaining if row in known.poisoned_rows]
        written += bad
        remaining = [row for row in remaining if row not in bad]
        if not remaining:
            return done, written, deaths
        batch = remaining[: known.probe_rows]
        if poison & set(batch):
            deaths += 1
            known = after_death(
                known,
                remaining_rows=len(remaining),
                succeeded_rows=len(done),
                probe_done=len(bad),
                probe_row=batch[0] if known.probe_rows == 1 else None,
                max_attempts=max_attempts,
            )
            if known.is_quarantined:
                raise AssertionError("quarantined")
        else:
            done |= set(batch)
            known = after_release(known, probe_done=len(batch) + len(bad))
    raise AssertionError("never ended")


@given(data=st.data(), num_rows=st.integers(1, 300), max_attempts=st.integers(1, 4))
def test_exactly_the_poisoned_rows_are_found(data, num_rows, max_attempts):
    """Whatever the rows that kill are: they, and only they, become error rows; all others succeed."""
    poison = data.draw(st.sets(st.integers(0, num_rows - 1), max_size=min(num_rows, 8)))
    done, poisoned, _ = run_shard(num_rows, poison, max_attempts)
    assert set(poisoned) == poison
    assert len(poisoned) == len(poison)
    assert done == set(range(num_rows)) - poison


@given(num_rows=st.integers(2, 5000), data=st.data())
def test_one_poisoned_row_takes_about_log2_deaths(num_rows, data):
    """Each death costs an engine start, so their number matters: one bisection down, one up again."""
    poison = data.draw(st.integers(0, num_rows - 1))
    *_, deaths = run_shard(num_rows, {poison}, max_attempts=3)
    assert deaths <= 3 + 2 * ceil(log2(num_rows)) + 1
