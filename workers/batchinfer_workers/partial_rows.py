"""Tokens of rows that have not ended: kept in a hidden file, so that the next attempt goes on from there."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from batchinfer import __version__
from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.staged_file import write_file
from batchinfer.engine.wire import completion_from_json, completion_to_json, progress_from_json, progress_to_json
from batchinfer.errors import FencedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchinfer.dataset.layout import OutputLayout
    from batchinfer.jobs.leases import Lease
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.types import Completion, Request
    from batchinfer_workers.engine_session import EngineSession

ANSWER_SECONDS = 3.0
"""How long the engine has to say how far its rows are; a step must end first."""
WHAT_RUNS = ("kernels", "layers", "recipe", "kv_cache_dtype")
"""Statistics of an engine that decide its bytes: rows go on only in one that is alike."""
_log = logging.getLogger(__name__)


class PartialRows:
    """What one attempt finds of the one before, and leaves to the next. One file an attempt, replaced as it grows."""

    def __init__(
        self,
        ledger: Ledger,
        lease: Lease,
        layout: OutputLayout,
        *,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``seconds`` lie between two savings."""
        self._ledger = ledger
        self._lease = lease
        self._layout = layout
        self._seconds = seconds
        self._clock = clock
        self._saved_at = clock()
        self._num_files = 0
        self._path: str | None = None
        self._found: dict[str, Any] | None = None
        self._found_answers: dict[str, Any] = {}

    @property
    def is_due(self) -> bool:
        """Whether it is time to save."""
        return self._clock() - self._saved_at >= self._seconds

    def go_on(self, request: Request, session: EngineSession) -> Request:
        """The request with the tokens that an earlier attempt had generated for it, if there are any.

        Rows with adapters begin again: the file does not say what was in theirs.
        """
        if self._found is None:
            self._found = self._read(session)
        samples = self._found.pop(request.request_id, None)
        if samples is None or request.params.adapter is not None:
            return request
        return replace(request, progress=progress_from_json(samples))

    def answers_of(self, request: Request, session: EngineSession) -> list[Completion]:
        """What the stages before gave for a row in an earlier attempt, in order; asked of a row's first request."""
        if self._found is None:
            self._found = self._read(session)
        answers = self._found_answers.pop(request.request_id, ())
        if request.params.adapter is not None:
            self._found.pop(request.request_id, None)
            return []
        return [completion_from_json(answer) for answer in answers]

    def save(self, session: EngineSession, answers: Mapping[int, Sequence[Completion]] = MappingProxyType({})) -> None:
        """Ask the engine how far its rows are, and keep that with the ``answers`` of rows that have begun a later stage.

        Raises:
            FencedError: the lease was lost.
        """
        self._saved_at = self._clock()
        rows = {
            str(row): progress_to_json(samples) for row, samples in session.progress_of_rows(ANSWER_SECONDS).items()
        }
        rows = {**(self._found or {}), **rows}
        kept = {str(row): [completion_to_json(one) for one in given] for row, given in answers.items()}
        kept = {**self._found_answers, **kept}
        if not rows and not kept:
            return
        self._num_files += 1
        shard, attempt_id = self._lease.shard, self._lease.attempt_id
        path = self._layout.progress_path(shard.index, attempt_id, self._num_files)
        document = {"engine": self._what_runs(session), "rows": rows} | ({"answers": kept} if kept else {})
        try:
            write_file(Location.parse(path), json.dumps(document, separators=(",", ":")).encode())
            self._ledger.note_progress(attempt_id, path)
            if self._path is not None:
                Location.parse(self._path).delete()
        except FencedError:
            raise
        except Exception:  # noqa: BLE001 -- good to have: without it, rows begin again
            _log.warning("the progress of attempt %s could not be kept", attempt_id, exc_info=True)
            return
        self._path = path

    def _read(self, session: EngineSession) -> dict[str, Any]:
        path = self._ledger.last_progress(self._lease.attempt_id)
        if path is None:
            return {}
        try:
            document = json.loads(Location.parse(path).read_bytes())
        except (OSError, ValueError) as error:
            _log.warning("rows begin again, since %s cannot be read: %s", path, error)
            return {}
        if document["engine"] != self._what_runs(session):
            _log.warning("rows begin again: another engine had begun them (%s)", document["engine"])
            return {}
        self._found_answers = document.get("answers", {})
        rows: dict[str, Any] = document["rows"]
        return rows

    def _what_runs(self, session: EngineSession) -> dict[str, Any]:
        stats = session.engine_stats()
        about = {name: stats.get(name) for name in WHAT_RUNS}
        return {**about, "model": session.model_stamp, "version": __version__}
