"""A row of the input becomes a request to the engine, an error, or is skipped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from batchinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Container

    import pyarrow as pa

    from batchinfer.types import Request, RowError


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """Where a row's prompt and parameters come from; field names are JobSpec's. At most one of the first three is set."""

    prompt_column: str | None = None
    messages_column: str | None = None
    template: str | None = None
    system: str | None = None
    on_null: Literal["error", "skip", "empty"] = "error"
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class RowInput:
    """One row, ready: exactly one of ``request`` (its id is ``str(row_index)``), ``error`` and ``skipped`` is set.

    ``warnings`` go into the row's result as they are (``text_replaced`` where a character had to become U+FFFD).
    """

    row_index: int
    request: Request | None = None
    error: RowError | None = None
    skipped: bool = False
    warnings: tuple[str, ...] = ()


class RowReader:
    """Turns batches of rows into :class:`RowInput`. A bad row never raises; a bad configuration does, before any row.

    Raises:
        InputError: a column that the configuration or the template names does not exist, or has a type that cannot be
            read as asked; nothing to read a prompt from. The message lists the columns.
        InvalidSpecError: the template's syntax is wrong, or it asks for what is not allowed.
    """

    columns: tuple[str, ...]
    """What must be read: pass it to ``InputSource.iter_batches(columns=...)``."""
    warnings: tuple[str, ...]
    """For people: which columns override sampling parameters, which look like it but have another type."""

    def __init__(self, config: PromptConfig, schema: pa.Schema) -> None:
        raise NotImplementedError

    def read(self, batch: pa.RecordBatch, first_index: int, skip: Container[int] = ()) -> list[RowInput]:
        """Read a batch whose first row has the global index ``first_index``, leaving out the row indexes in ``skip``."""
        raise NotImplementedError
