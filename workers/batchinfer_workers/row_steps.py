"""What is asked of the engine for a row, one request after the other, until the row has ended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from batchinfer_workers.engine_session import row_of
from batchinfer_workers.result_rows import with_seed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchinfer.dataset.prompt import RowInput
    from batchinfer.dataset.schema import ResultRow
    from batchinfer.dataset.staged_row import StagedRow
    from batchinfer.types import Completion, Request
    from batchinfer_workers.result_rows import ResultRows


@dataclass(frozen=True, slots=True)
class Ended:
    """A row's outcome, and the device time in nanoseconds that its cost stands for."""

    row: ResultRow
    device_ns: int = 0


class RowSteps:
    """Rows that are at work: one request each, or one after the other through the stages of the job."""

    def __init__(self, rows: ResultRows, job_seed: int | None) -> None:
        self._rows = rows
        self._job_seed = job_seed
        self._begun: dict[int, tuple[tuple[str, ...], StagedRow | None]] = {}

    def begin(self, row: RowInput) -> Request | Ended:
        """The first request of a row, or the outcome of one that asks nothing."""
        if row.request is None:
            return Ended(self._unrun(row))
        self._begun[row.row_index] = (row.warnings, row.staged)
        return self._seeded(row.request, row.staged)

    def take(self, completion: Completion) -> Request | Ended:
        """What comes after an answer."""
        row_index = row_of(completion)
        warnings, staged = self._begun[row_index]
        if staged is None:
            del self._begun[row_index]
            return Ended(self._rows.completed(completion, warnings), completion.device_ns)
        request = staged.take(completion)
        if request is not None:
            return self._seeded(request, staged)
        del self._begun[row_index]
        return Ended(self._rows.staged(staged), sum(answer.device_ns for answer in staged.answers.values()))

    def go_on(self, row_index: int, answers: Iterable[Completion]) -> Request | Ended | None:
        """What comes after the answers that an earlier attempt had, which paid for them; None without any."""
        step: Request | Ended | None = None
        for answer in answers:
            step = self.take(replace(answer, request_id=f":{row_index}", device_ns=0))
            if isinstance(step, Ended):
                break
        return step

    def answers(self) -> dict[int, list[Completion]]:
        """Answers of rows that are between or in later stages, in order, by row index."""
        staged = {row: state for row, (_, state) in self._begun.items() if state is not None and state.answers}
        return {row: list(state.answers.values()) for row, state in staged.items()}

    def kept_chars(self, row_index: int) -> int:
        """About how much text is kept of a row for its later stages."""
        _, staged = self._begun[row_index]
        return staged.num_chars if staged is not None else 0

    def _unrun(self, row: RowInput) -> ResultRow:
        if row.staged is not None:
            return self._rows.staged(row.staged)
        if row.error is not None:
            return self._rows.errored(row.row_index, row.error, row.warnings)
        return self._rows.skipped(row.row_index, row.warnings)

    def _seeded(self, request: Request, staged: StagedRow | None) -> Request:
        """With a seed, where one matters: of the row, and of the stage if there are several."""
        seed = self._job_seed if staged is None else staged.stage.seed(self._job_seed)
        params = with_seed(request.params, seed, int(request.request_id))
        return request if params is request.params else replace(request, params=params)
