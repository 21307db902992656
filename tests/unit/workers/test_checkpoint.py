"""Checkpoints: when they are due, and what a part says of its rows."""

from __future__ import annotations

import pytest

from batchinfer.dataset.schema import ResultRow
from batchinfer.dataset.sink import PartFile
from batchinfer.jobs.records import RowCounts
from batchinfer.types import ErrorCode, RowError, RowStatus, Usage
from batchinfer_workers.checkpoint import MAX_BUFFERED_CHARS, MAX_ERROR_SAMPLES, Checkpoint, CheckpointPolicy


class Writer:
    def __init__(self):
        self.written = []

    def write(self, rows):
        self.written.append(list(rows))
        return PartFile(f"part-{len(self.written)}", len(rows), 1234, "ab")


class Commits:
    """The one method of the ledger that is used."""

    def __init__(self, error=None):
        self.parts = []
        self.error = error

    def commit_part(self, attempt_id, part):
        if self.error:
            raise self.error
        self.parts.append((attempt_id, part))


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def make(policy=None, replaced=None, error=None):
    clock, writer, ledger = Clock(), Writer(), Commits(error)
    policy = policy or CheckpointPolicy(rows=3, seconds=10, pause_seconds=0)
    return Checkpoint(ledger, 7, writer, policy, replaced=replaced or {}, clock=clock), ledger, writer, clock


def row(index, status=RowStatus.SUCCEEDED, **values):
    return ResultRow(index, status, "m", 1, **values)


def test_it_is_due_by_rows_by_age_and_by_size():
    """3 rows, or 10 seconds after the first, or very long answers; never when empty."""
    checkpoint, *_, clock = make()
    clock.now += 1000
    assert not checkpoint.is_due
    checkpoint.add(row(0))
    clock.now += 9.9
    assert not checkpoint.is_due
    clock.now += 0.1
    assert checkpoint.is_due
    checkpoint.flush()
    assert not checkpoint.is_due
    for index in (1, 2, 3):
        assert not checkpoint.is_due
        checkpoint.add(row(index))
    assert checkpoint.is_due
    checkpoint.flush()
    checkpoint.add(row(4, output="x" * MAX_BUFFERED_CHARS))
    assert checkpoint.is_due


def test_a_fast_engine_does_not_commit_all_the_time():
    """Within the pause no number of rows makes a commit due."""
    checkpoint, *_, clock = make(CheckpointPolicy(rows=1, seconds=10, pause_seconds=2))
    clock.now += 5
    checkpoint.add(row(0))
    checkpoint.flush()
    for index in range(1, 50):
        checkpoint.add(row(index))
    assert not checkpoint.is_due
    clock.now += 2
    assert checkpoint.is_due


def test_a_part_sums_up_its_rows():
    """Counts, tokens, money and device time of the part are those of its rows; replaced outcomes come from the base."""
    checkpoint, ledger, _, _ = make(replaced={1: RowStatus.ERRORED, 2: RowStatus.CANCELLED, 9: RowStatus.ERRORED})
    error = RowError(ErrorCode.ENGINE_ERROR, "bad")
    checkpoint.add(row(1, usage=Usage(5, 2, 3), cost_nanos=10, list_cost_nanos=4), device_ns=100)
    checkpoint.add(row(2, RowStatus.ERRORED, usage=Usage(7, 0, 0), cost_nanos=20, error=error), device_ns=200)
    assert (checkpoint.num_rows, checkpoint.completion_tokens) == (2, 3)
    checkpoint.flush()
    ((attempt_id, part),) = ledger.parts
    assert attempt_id == 7
    assert part.counts == RowCounts(succeeded=1, errored=1)
    assert part.replaced == RowCounts(errored=1, cancelled=1)
    assert part.usage == Usage(12, 2, 3)
    assert (part.metered_nanos, part.list_nanos, part.device_ns) == (30, 4, 300)
    assert (part.path, part.num_rows, part.num_bytes, part.sha256) == ("part-1", 2, 1234, "ab")
    assert [(sample.row_index, sample.code) for sample in part.row_errors] == [(2, "engine_error")]
    assert (checkpoint.num_rows, checkpoint.completion_tokens) == (0, 0)
    checkpoint.flush()
    assert len(ledger.parts) == 1, "nothing to commit is no part"


def test_error_samples_are_bounded():
    checkpoint, ledger, _, _ = make()
    error = RowError(ErrorCode.ENGINE_ERROR, "bad")
    for index in range(1000):
        checkpoint.add(row(index, RowStatus.ERRORED, error=error))
    checkpoint.flush()
    assert len(ledger.parts[0][1].row_errors) == MAX_ERROR_SAMPLES
    assert ledger.parts[0][1].counts.errored == 1000


def test_rows_of_a_failed_commit_are_never_written_again():
    """Whether the database took it is not known: to write the rows once more could make them two."""
    checkpoint, ledger, writer, _ = make(error=OSError("gone"))
    checkpoint.add(row(0))
    with pytest.raises(OSError, match="gone"):
        checkpoint.flush()
    ledger.error = None
    checkpoint.flush()
    assert len(writer.written) == 1
    assert ledger.parts == []
