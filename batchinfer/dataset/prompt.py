"""A row of the input becomes a request to the engine, an error, or is skipped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchinfer.dataset.adapter_paths import AdapterPaths
from batchinfer.dataset.embedding_input import embedding_builder
from batchinfer.dataset.nulls import OnNull, RowSkipped
from batchinfer.dataset.prompt_builders import choose_builder
from batchinfer.dataset.row_params import ParamReader
from batchinfer.dataset.task_columns import TaskReader
from batchinfer.dataset.text import REPLACED, replace_surrogates
from batchinfer.dataset.values import column_values
from batchinfer.errors import RowFailure
from batchinfer.sampling_params import SamplingParams
from batchinfer.tasks import TaskOptions
from batchinfer.types import ErrorCode, Request, RowError

if TYPE_CHECKING:
    from collections.abc import Container

    import pyarrow as pa

    from batchinfer.dataset.roots import Roots
    from batchinfer.dataset.staged_row import StagedRow, StagePlan
    from batchinfer.types import Message


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """Where a row's prompt and parameters come from; field names are JobSpec's. At most one of the first three is set."""

    prompt_column: str | None = None
    messages_column: str | None = None
    template: str | None = None
    system: str | None = None
    on_null: OnNull = "error"
    params: SamplingParams = field(default_factory=SamplingParams)
    task: TaskOptions = field(default_factory=TaskOptions)
    continuation_column: str | None = None
    document_column: str | None = None
    embedding_lists: bool = False
    adapter_folder: str | None = None
    roots: Roots | None = None
    """Where adapters may be; None is everywhere."""
    stages: tuple[StagePlan, ...] = ()
    """What rows are asked one after the other, in place of the one prompt."""


@dataclass(frozen=True, slots=True)
class RowInput:
    """One row, ready: exactly one of ``request`` (its id is ``str(row_index)``), ``error`` and ``skipped`` is set.

    ``warnings`` go into the row's result as they are (``text_replaced`` where a character had to become U+FFFD).
    A row of a job with stages has itself as ``staged``, too; it may also have been filtered.
    """

    row_index: int
    request: Request | None = None
    error: RowError | None = None
    skipped: bool = False
    warnings: tuple[str, ...] = ()
    staged: StagedRow | None = None


class RowReader:
    """Turns batches of rows into :class:`RowInput`. A bad row never raises; a bad configuration does, before any row.

    Raises:
        InputError: a column that the configuration or the template names does not exist, or has a type that cannot be
            read as asked; nothing to read a prompt from. The message lists the columns.
        InvalidSpecError: the template's syntax is wrong, or it asks for what is not allowed.
    """

    def __init__(self, config: PromptConfig, schema: pa.Schema) -> None:
        self._task = TaskReader(config, schema)
        self._builder = embedding_builder(config, schema) or choose_builder(
            schema,
            prompt_column=self._task.prompt_column,
            messages_column=config.messages_column,
            template=config.template,
            on_null=config.on_null,
        )
        used = (*self._builder.columns, *self._task.columns)
        self._params = ParamReader(schema, config.params, used if config.task.generates else schema.names)
        self._adapters = AdapterPaths(config.adapter_folder, config.roots)
        self._system = None if config.system is None else replace_surrogates(config.system)[0]
        self.columns: tuple[str, ...] = tuple(dict.fromkeys((*used, *self._params.columns)))
        """What must be read: pass it to ``InputSource.iter_batches(columns=...)``."""
        self.warnings: tuple[str, ...] = self._params.warnings
        """For people: which columns override sampling parameters, which look like it but have another type."""

    def read(self, batch: pa.RecordBatch, first_index: int, skip: Container[int] = ()) -> list[RowInput]:
        """Read a batch whose first row has the global index ``first_index``, leaving out the row indexes in ``skip``."""
        values = {name: column_values(name, batch.column(name)) for name in self.columns}
        indexes = range(first_index, first_index + batch.num_rows)
        return [self._row(values, position, i) for position, i in enumerate(indexes) if i not in skip]

    def _row(self, values: dict[str, list[Any]], position: int, row_index: int) -> RowInput:
        try:
            built = self._builder.build(values, position)
            params = self._adapters.resolve(self._params.read(values, position, built.params))
            prompt, messages = built.prompt, built.messages
            task = self._task.read(values, position, built)
            if prompt is not None and not prompt.strip():
                return RowInput(row_index, error=RowError(ErrorCode.EMPTY_PROMPT, "the prompt is empty"))
        except RowSkipped:
            return RowInput(row_index, skipped=True)
        except RowFailure as error:
            return RowInput(row_index, error=error.error)
        except RecursionError:
            return RowInput(row_index, error=RowError(ErrorCode.INVALID_MESSAGES, "the row is nested too deeply"))
        if self._system is not None:
            prompt, messages = None, self._with_system(prompt, messages)
        warnings = (REPLACED,) if built.replaced else ()
        return RowInput(row_index, Request(str(row_index), params, prompt, messages, task=task), warnings=warnings)

    def _with_system(self, prompt: str | None, messages: list[Message] | None) -> list[Message]:
        """The job's system message first; a row that has its own keeps it, being more specific."""
        turns: list[Message] = [{"role": "user", "content": prompt}] if messages is None else messages
        if turns[0]["role"] in ("system", "developer"):
            return turns
        return [{"role": "system", "content": self._system}, *turns]
