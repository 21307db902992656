"""The loop of a running shard: read rows, keep the engine's window full, collect what it gives, commit now and then."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from batchinfer_workers.engine_session import row_of
from batchinfer_workers.result_rows import with_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from batchinfer.dataset.prompt import RowInput
    from batchinfer.dataset.schema import ResultRow
    from batchinfer.types import Message, Request
    from batchinfer_workers.checkpoint import Checkpoint
    from batchinfer_workers.engine_session import EngineSession
    from batchinfer_workers.partial_rows import PartialRows
    from batchinfer_workers.result_rows import ResultRows

POLL_SECONDS = 0.2
"""How long to wait for completions before looking at drain and cancel again."""


@dataclass(frozen=True, slots=True)
class Window:
    """Most rows, and about the most characters of prompts, that a shard has in the engine at once."""

    rows: int
    chars: int

    @property
    def refill(self) -> int:
        """Free places worth a message to the engine: one row a message would cost more than it carries."""
        return max(1, self.rows // 8)


class RowPump:
    """Runs the rows of one attempt. ``open_session`` is called with the first requests that need the engine.

    ``copies`` says which other rows a computed row's outcome answers, too.
    """

    def __init__(
        self,
        inputs: Iterator[RowInput],
        rows: ResultRows,
        checkpoint: Checkpoint,
        window: Window,
        *,
        open_session: Callable[[list[Request]], EngineSession],
        job_seed: int | None,
        copies: Callable[[ResultRow], Iterable[ResultRow]] = lambda _row: (),
        partial: PartialRows | None = None,
    ) -> None:
        self._inputs = inputs
        self._rows = rows
        self._checkpoint = checkpoint
        self._window = window
        self._open_session = open_session
        self._job_seed = job_seed
        self._copies = copies
        self._partial = partial
        self._session: EngineSession | None = None
        self._waiting: deque[Request] = deque()
        self._in_engine: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._chars = 0
        self._is_exhausted = False

    def run(self, *, check_stop: Callable[[], None], on_commit: Callable[[], None]) -> None:
        """Go on until every row has ended.

        ``check_stop`` raises to leave the loop; ``on_commit`` runs after each commit.

        Raises:
            EngineError: the engine is gone; what it gave before is in the checkpoint.
        """
        while not self._is_exhausted or self._waiting or self._in_engine:
            check_stop()
            if self._wants_rows:
                self._read()
            self._submit()
            self._collect(0.0 if self._wants_rows else POLL_SECONDS)
            if self._checkpoint.is_due:
                self._checkpoint.flush()
                on_commit()
            if self._partial is not None and self._partial.is_due:
                self.save_progress()

    def save_progress(self) -> None:
        """Keep the tokens of the rows that are in the engine. Raises FencedError."""
        if self._partial is not None and self._session is not None:
            self._partial.save(self._session)

    @property
    def _wants_rows(self) -> bool:
        if self._is_exhausted or self._waiting or self._chars >= self._window.chars:
            return False
        return self._window.rows - len(self._in_engine) >= self._window.refill

    def _read(self) -> None:
        """Take as many rows as there is room for; those that cannot run end here."""
        room = self._window.rows - len(self._in_engine)
        found = 0
        for row in islice(self._inputs, room):
            found += 1
            if row.request is not None:
                self._in_engine[row.row_index] = (_num_chars(row.request), row.warnings)
                self._waiting.append(row.request)
            elif row.error is not None:
                self._checkpoint.add(self._rows.errored(row.row_index, row.error, row.warnings))
            else:
                self._checkpoint.add(self._rows.skipped(row.row_index, row.warnings))
        self._is_exhausted = found < room

    def _submit(self) -> None:
        """Hand rows over up to the limit on characters; a single row of any size fits an empty window."""
        batch: list[Request] = []
        while self._waiting and self._chars < self._window.chars:
            request = self._waiting.popleft()
            row = int(request.request_id)
            self._chars += self._in_engine[row][0]
            params = with_seed(request.params, self._job_seed, row)
            batch.append(request if params is request.params else replace(request, params=params))
        if batch:
            session = self._session = self._session or self._open_session(batch)
            if self._partial is not None:
                batch = [self._partial.go_on(request, session) for request in batch]
            session.submit(batch)

    def _collect(self, timeout: float) -> None:
        if self._session is None or not self._session.num_outstanding:
            return
        for completion in self._session.poll(timeout):
            num_chars, warnings = self._in_engine.pop(row_of(completion))
            self._chars -= num_chars
            row = self._rows.completed(completion, warnings)
            self._checkpoint.add(row, completion.device_ns)
            for copy in self._copies(row):
                self._checkpoint.add(copy)


def _num_chars(request: Request) -> int:
    if request.prompt is not None:
        return len(request.prompt)
    return sum(_message_chars(message) for message in request.messages or ())


def _message_chars(message: Message) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else len(str(content))
