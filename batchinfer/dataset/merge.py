"""Parts and input rows become the one file of a shard; shards become the one file of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from batchinfer.dataset.schema import ResultSchema
    from batchinfer.dataset.sink import PartFile
    from batchinfer.dataset.source import InputSource
    from batchinfer.types import RowStatus


@dataclass(frozen=True, slots=True)
class BaseFile:
    """An earlier result to build on (retry): the shard's published file, or the job's single output file.

    ``first_row`` is the global row index of the file's first row (0 for a single output file).
    """

    path: str
    first_row: int


def base_rows_with_status(
    base: BaseFile, row_start: int, row_end: int, statuses: Collection[RowStatus], *, prefix: str = ""
) -> dict[int, RowStatus]:
    """Rows of the base within the range that have one of the statuses: what a retry runs again, and what it replaces."""
    raise NotImplementedError


def merge_shard(
    source: InputSource,
    schema: ResultSchema,
    row_start: int,
    row_end: int,
    parts: Sequence[str],
    destination: str,
    *,
    base: BaseFile | None = None,
    metadata: Mapping[str, str] | None = None,
) -> PartFile:
    """Join the input's columns with the results of ``[row_start, row_end)`` in input order, streaming, into one file.

    ``parts`` win over ``base``. ``destination`` is ``layout.merged_path(...)``; ``metadata`` goes into the footer
    (keys without the ``batchinfer.`` prefix: job_id, spec_hash, model, engine_version, ...).

    Raises:
        BatchInferError: a row has no result, or two parts have the same row.
        InputError: code ``input_changed``.
    """
    raise NotImplementedError
