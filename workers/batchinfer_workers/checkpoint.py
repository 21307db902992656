"""Finished rows become committed parts: every so many rows or seconds, in one fenced transaction each."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.jobs.leases import PartCommit, RowErrorSample
from batchinfer.jobs.records import RowCounts
from batchinfer.tracing import span
from batchinfer.types import RowStatus, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchinfer.dataset.schema import ResultRow
    from batchinfer.dataset.sink import PartFile, PartWriter
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.settings import Settings

MAX_BUFFERED_CHARS = 32 * 2**20
"""A checkpoint is due when the answers held in memory have this many characters."""
CHARS_AN_ITEM = 256
MAX_ERROR_SAMPLES = 100
"""Error rows of a part that are also written to the database."""


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When finished rows are committed.

    ``rows`` of them, or the oldest has waited ``seconds``; but not within ``pause_seconds`` of the last time, since a
    fast engine would then spend its time on commits.
    """

    rows: int = 256
    seconds: float = 30.0
    pause_seconds: float = 1.0

    @classmethod
    def of(cls, settings: Settings) -> CheckpointPolicy:
        """The policy that the settings ask for."""
        return cls(settings.checkpoint_rows, settings.checkpoint_seconds, settings.checkpoint_pause_seconds)


class Checkpoint:
    """Buffer of one attempt's finished rows.

    ``replaced`` has the outcome that rows had before a retry; empty otherwise.
    """

    def __init__(
        self,
        ledger: Ledger,
        attempt_id: int,
        writer: PartWriter,
        policy: CheckpointPolicy,
        *,
        replaced: Mapping[int, RowStatus],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._attempt_id = attempt_id
        self._writer = writer
        self._policy = policy
        self._replaced = replaced
        self._clock = clock
        self._rows: list[ResultRow] = []
        self._device_ns = 0
        self._chars = 0
        self._first_at = self._last_at = clock()
        self.completion_tokens = 0
        """Generated tokens of the rows that are not committed yet."""

    @property
    def num_rows(self) -> int:
        """Rows that are not committed yet."""
        return len(self._rows)

    @property
    def is_due(self) -> bool:
        """Whether it is time to commit."""
        if not self._rows:
            return False
        if self._chars >= MAX_BUFFERED_CHARS:
            return True
        now = self._clock()
        if now - self._last_at < self._policy.pause_seconds:
            return False
        return len(self._rows) >= self._policy.rows or now - self._first_at >= self._policy.seconds

    def add(self, row: ResultRow, device_ns: int = 0) -> None:
        """Keep a finished row; ``device_ns`` is the device time that its cost stands for."""
        if not self._rows:
            self._first_at = self._clock()
        self._rows.append(row)
        self._device_ns += device_ns
        self._chars += len(row.output or "") + _extra_chars(row)
        self.completion_tokens += row.usage.completion_tokens

    def flush(self) -> None:
        """Write and commit what there is. After an error the rows are forgotten, so that none is written twice.

        Raises:
            FencedError: the lease was lost; the file is garbage.
        """
        if not self._rows:
            return
        rows, device_ns = self._rows, self._device_ns
        self._rows, self._device_ns, self._chars, self.completion_tokens = [], 0, 0, 0
        with span("checkpoint", attempt=self._attempt_id, rows=len(rows)):
            file = self._writer.write(rows)
            self._ledger.commit_part(self._attempt_id, _describe(rows, device_ns, file, self._replaced))
        self._last_at = self._clock()


def _extra_chars(row: ResultRow) -> int:
    """About how many characters the lists in a row's optional columns stand for: a table for each token, say."""
    return sum(_num_chars(value) for value in row.extra.values())


def _num_chars(value: Any) -> int:
    if isinstance(value, list):
        return CHARS_AN_ITEM * len(value)
    if isinstance(value, dict):  # of a stage
        return sum(map(_num_chars, value.values()))
    return len(value) if isinstance(value, str) else 0


def _describe(
    rows: Sequence[ResultRow], device_ns: int, file: PartFile, replaced: Mapping[int, RowStatus]
) -> PartCommit:
    return PartCommit(
        path=file.path,
        num_rows=file.num_rows,
        counts=RowCounts.of(row.status for row in rows),
        replaced=RowCounts.of(replaced[row.row_index] for row in rows if row.row_index in replaced),
        usage=Usage(
            sum(row.usage.prompt_tokens for row in rows),
            sum(row.usage.cached_tokens for row in rows),
            sum(row.usage.completion_tokens for row in rows),
        ),
        metered_nanos=sum(row.cost_nanos for row in rows),
        list_nanos=sum(row.list_cost_nanos or 0 for row in rows),
        device_ns=device_ns,
        num_bytes=file.num_bytes,
        sha256=file.sha256,
        row_errors=_samples(rows),
        saved_nanos=sum(row.saved_nanos for row in rows),
        saved_list_nanos=sum(row.saved_list_nanos for row in rows),
    )


def _samples(rows: Sequence[ResultRow]) -> tuple[RowErrorSample, ...]:
    failed = ((row, row.error) for row in rows if row.status is not RowStatus.SUCCEEDED and row.error is not None)
    found = [RowErrorSample(row.row_index, error.code, error.message, row.status) for row, error in failed]
    return tuple(found[:MAX_ERROR_SAMPLES])
