"""The loop of a running shard: read rows, keep the engine's window full, collect what it gives, commit now and then."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from batchinfer_workers.engine_session import row_of
from batchinfer_workers.row_steps import Ended, RowSteps

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
        self._steps = RowSteps(rows, job_seed)
        self._checkpoint = checkpoint
        self._window = window
        self._open_session = open_session
        self._copies = copies
        self._partial = partial
        self._session: EngineSession | None = None
        self._waiting: deque[Request] = deque()
        self._in_engine: dict[int, int] = {}  # about how many characters each row holds
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
            self._partial.save(self._session, self._steps.answers())

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
            step = self._steps.begin(row)
            if isinstance(step, Ended):
                self._end(step)
            else:
                self._expect(step)
                self._waiting.append(step)
        self._is_exhausted = found < room

    def _submit(self) -> None:
        """Hand rows over up to the limit on characters; a single row of any size fits an empty window."""
        batch: list[Request] = []
        while self._waiting and self._chars < self._window.chars:
            request = self._waiting.popleft()
            self._chars += self._in_engine[int(request.request_id)]
            batch.append(request)
        if batch:
            session = self._session = self._session or self._open_session(batch)
            batch = [begun for request in batch if (begun := self._go_on(request, session)) is not None]
        if batch:
            session.submit(batch)

    def _go_on(self, request: Request, session: EngineSession) -> Request | None:
        """The request from where an earlier attempt left the row; None if that had all that the row needs."""
        if self._partial is None:
            return request
        row = int(request.request_id)
        step = self._steps.go_on(row, self._partial.answers_of(request, session))
        if isinstance(step, Ended):
            self._chars -= self._in_engine.pop(row)
            self._end(step)
            return None
        if step is not None:
            self._chars -= self._in_engine[row]
            self._expect(step)
            self._chars += self._in_engine[row]
        return self._partial.go_on(step or request, session)

    def _collect(self, timeout: float) -> None:
        if self._session is None or not self._session.num_outstanding:
            return
        for completion in self._session.poll(timeout):
            self._chars -= self._in_engine.pop(row_of(completion))
            step = self._steps.take(completion)
            if not isinstance(step, Ended):  # rows that have begun go first: they are held in memory until they end
                self._expect(step)
                self._waiting.appendleft(step)
                continue
            self._end(step)
            for copy in self._copies(step.row):
                self._checkpoint.add(copy)

    def _expect(self, request: Request) -> None:
        """A row has its place in the window until it ends, whichever stage it is at."""
        row = int(request.request_id)
        self._in_engine[row] = _num_chars(request) + self._steps.kept_chars(row)

    def _end(self, ended: Ended) -> None:
        self._checkpoint.add(ended.row, ended.device_ns)


def _num_chars(request: Request) -> int:
    if request.prompt is not None:
        return len(request.prompt)
    return sum(_message_chars(message) for message in request.messages or ())


def _message_chars(message: Message) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else len(str(content))
