"""Rows of a job with stages, each with the first thing that the engine is asked of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from batchinfer.dataset.adapter_paths import AdapterPaths
from batchinfer.dataset.prompt import RowInput, RowReader
from batchinfer.dataset.row_params import ParamReader
from batchinfer.dataset.staged_row import StagedRow, StageProgram
from batchinfer.dataset.values import column_values
from batchinfer.errors import InputError, RowFailure
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from collections.abc import Container

    import pyarrow as pa

    from batchinfer.dataset.prompt import PromptConfig
    from batchinfer.dataset.staged_row import StagePlan


class Reader(Protocol):
    """Turns batches of the input into rows."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What must be read."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """For people, one sentence each."""
        ...

    def read(self, batch: pa.RecordBatch, first_index: int, skip: Container[int] = ()) -> list[RowInput]:
        """Read a batch whose first row has the global index ``first_index``, leaving out the row indexes in ``skip``."""
        ...


class StageReader:
    """See :class:`~batchinfer.dataset.prompt.RowReader`; columns named like sampling parameters are data here.

    Raises:
        InputError, InvalidSpecError: what :class:`~batchinfer.dataset.staged_row.StageProgram` raises.
    """

    def __init__(self, config: PromptConfig, schema: pa.Schema) -> None:
        self._program = StageProgram(_with_adapters(config), schema, config.on_null)
        self.columns: tuple[str, ...] = self._program.columns
        """See :class:`Reader`."""
        overriding = ParamReader(schema, config.params, self.columns).columns
        names = ", ".join(map(repr, overriding))
        note = f"The column(s) {names} do not override sampling parameters: stages have their own."
        self.warnings: tuple[str, ...] = (note,) if overriding else ()
        """See :class:`Reader`."""

    def read(self, batch: pa.RecordBatch, first_index: int, skip: Container[int] = ()) -> list[RowInput]:
        """See :class:`Reader`."""
        values = {name: column_values(name, batch.column(name)) for name in self.columns}
        indexes = range(first_index, first_index + batch.num_rows)
        return [self._row(values, position, i) for position, i in enumerate(indexes) if i not in skip]

    def _row(self, values: dict[str, list[Any]], position: int, row_index: int) -> RowInput:
        row = StagedRow(row_index, {name: [column[position]] for name, column in values.items()}, self._program)
        request = row.advance()
        skipped = row.status is RowStatus.SKIPPED
        return RowInput(row_index, request, row.named_error, skipped, row.warnings, row)


def _with_adapters(config: PromptConfig) -> list[StagePlan]:
    """The stages with the job's adapter by its folder. Raises InputError."""
    paths = AdapterPaths(config.adapter_folder, config.roots)
    try:
        return [replace(plan, params=paths.resolve(plan.params)) for plan in config.stages]
    except RowFailure as error:
        raise InputError(str(error), param="adapter", code=error.error.code) from None


def row_reader(config: PromptConfig, schema: pa.Schema) -> Reader:
    """What reads the rows of a job, with stages or without.

    Raises:
        InputError, InvalidSpecError: the input does not have what the job needs, or a template is wrong.
    """
    return StageReader(config, schema) if config.stages else RowReader(config, schema)
