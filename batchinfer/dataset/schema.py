"""The explicit schema of results: never inferred, so that an all-null first batch decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchinfer.types import FinishReason, RowError, RowStatus, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One row's outcome. Costs are nano-dollars; ``attempt`` is the attempt id that wrote it.

    ``output`` is None unless the row succeeded. ``clamped_max_tokens`` becomes the warning ``max_tokens_clamped:N``.
    """

    row_index: int
    status: RowStatus
    model: str
    attempt: int
    output: str | None = None
    finish_reason: FinishReason | None = None
    error: RowError | None = None
    usage: Usage = field(default_factory=Usage)
    cost_nanos: int = 0
    list_cost_nanos: int | None = None
    token_ids: tuple[int, ...] | None = None
    clamped_max_tokens: int | None = None
    warnings: tuple[str, ...] = ()


class ResultSchema:
    """Columns added to the input's.

    Raises:
        InvalidSpecError: result columns clash with the input's; the message names them and the way out (a prefix).
    """

    part_schema: pa.Schema
    """``row_index`` and the other result columns."""
    output_schema: pa.Schema
    """Input columns, then result columns."""

    def __init__(self, input_schema: pa.Schema, prefix: str = "", *, include_token_ids: bool = False) -> None:
        raise NotImplementedError

    def to_batch(self, rows: Sequence[ResultRow]) -> pa.RecordBatch:
        """Rows as a batch of :attr:`part_schema`; text that UTF-8 cannot represent becomes U+FFFD and is flagged."""
        raise NotImplementedError
