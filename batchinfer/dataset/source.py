"""The input of a job: Parquet or JSONL files seen as one sequence of rows."""

from __future__ import annotations

import base64
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchinfer.dataset.ids import check_unique
from batchinfer.dataset.input_file import InputFile, inspect_file, open_reader
from batchinfer.dataset.input_schema import SchemaUnifier
from batchinfer.dataset.jsonl_source import JSONL_ID_COLUMN, JSONL_SCHEMA
from batchinfer.dataset.listing import find_files
from batchinfer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from batchinfer.dataset.input_file import Inspection
    from batchinfer.dataset.roots import Roots

_FINGERPRINT_VERSION = 1
_INSPECTING_THREADS = 8
_MAX_NAMED = 10


class InputSource:
    """Rows of all input files in order: each input in the order given, the files of a folder or glob sorted by path.

    A row's index is global, 0-based, int64. Memory stays bounded whatever the files' size.
    """

    def __init__(
        self, files: Sequence[InputFile], schema: pa.Schema, *, limit: int | None = None, warnings: Sequence[str] = ()
    ) -> None:
        """Use :meth:`open` or :meth:`reopen`."""
        self.files = tuple(files)
        self.schema = schema
        """Canonical schema over all files: top-level text is ``large_string``, everything else as in the files."""
        total = files[-1].first_row + files[-1].num_rows if files else 0
        self.num_rows: int = total if limit is None else min(total, limit)
        self.warnings = tuple(warnings)
        """One sentence each, for people: huge row groups, columns missing in some files, ..."""
        self._limit = limit
        self._checked: set[str] = set()
        self._check_path: Callable[[str], None] | None = None

    @classmethod
    def open(cls, inputs: Sequence[str], limit: int | None = None, roots: Roots | None = None) -> InputSource:
        """Find the files, check every one and unify their schemas (what the planner does).

        Raises:
            InputError: nothing found; files that cannot be read (all are named); duplicate column names; types that
                do not fit together; malformed JSONL lines (with line numbers).
        """
        listing = find_files(inputs, roots)
        warnings = list(listing.warnings)
        with ThreadPoolExecutor(_INSPECTING_THREADS) as pool:
            inspections = list(pool.map(inspect_file, listing.files))
        bad = [inspection for inspection in inspections if inspection.problem is not None]
        if bad:
            more = f" (and {len(bad) - _MAX_NAMED} more files)" if len(bad) > _MAX_NAMED else ""
            first = bad[0].problem
            code = first.code if len(bad) == 1 and first is not None else None
            raise InputError("; ".join(str(one.problem) for one in bad[:_MAX_NAMED]) + more, param="inputs", code=code)
        schema = _unified_schema(inspections, warnings)
        files: list[InputFile] = []
        for inspection in inspections:
            warnings += inspection.warnings
            files.append(inspection.file(files[-1].end_row if files else 0))
        source = cls(files, schema, limit=limit, warnings=warnings)
        if source.num_rows == 0:
            source.warnings += ("The input has no rows.",)
        source._checked.update(file.path for file in files)
        return source

    @classmethod
    def reopen(cls, fingerprint: Mapping[str, Any], check: Callable[[str], None] | None = None) -> InputSource:
        """Open the input of an earlier :meth:`fingerprint` without looking at every file again (what workers do).

        Each file is checked against the fingerprint when it is first read, and its path by ``check``; new files in a
        folder are not seen.

        Raises:
            InputError: code ``input_changed`` (also while iterating).
        """
        if fingerprint.get("version") != _FINGERPRINT_VERSION:
            raise InputError("the job's input fingerprint was written by another version of batchinfer")
        files = [InputFile.from_json(entry) for entry in fingerprint["files"]]
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(fingerprint["schema"])))
        source = cls(files, schema, limit=fingerprint["limit"])
        source._check_path = check
        return source

    def fingerprint(self) -> dict[str, Any]:
        """Identity of the input, JSON-able; enough for :meth:`reopen`."""
        return {
            "version": _FINGERPRINT_VERSION,
            "limit": self._limit,
            "num_rows": self.num_rows,
            "schema": base64.b64encode(self.schema.serialize()).decode(),
            "files": [file.to_json() for file in self.files],
        }

    def digest(self) -> str:
        """SHA-256 of the fingerprint in hex: the input in one word, for footers."""
        text = json.dumps(self.fingerprint(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def verify_unchanged(self, fingerprint: Mapping[str, Any] | None = None) -> None:
        """Check the files as they are now against an earlier fingerprint, or against what this source was opened with.

        Raises:
            InputError: code ``input_changed``, naming the file.
        """
        files = self.files if fingerprint is None else [InputFile.from_json(entry) for entry in fingerprint["files"]]
        if [file.path for file in files] != [file.path for file in self.files]:
            raise InputError("the list of input files changed; submit it as a new job", code="input_changed")
        for file in files:
            file.check_unchanged()

    @property
    def default_id_column(self) -> str | None:
        """The column that must be unique by the format's own rule: ``custom_id`` of JSONL, none of Parquet."""
        return JSONL_ID_COLUMN if self.files and self.files[0].format == "jsonl" else None

    def iter_batches(
        self,
        row_start: int = 0,
        row_end: int | None = None,
        columns: Sequence[str] | None = None,
        batch_rows: int = 1024,
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield ``(index of the batch's first row, batch)`` over the half-open range; at most ``batch_rows`` rows each.

        ``columns`` projects and orders; None is all. Batches have exactly the types of :attr:`schema`.

        Raises:
            InputError: no such column; a damaged file; code ``input_changed``.
        """
        schema = self._projection(columns)
        stop = self.num_rows if row_end is None else min(row_end, self.num_rows)
        for file in self.files:
            begin, end = max(row_start, file.first_row), min(stop, file.end_row)
            if begin >= end:
                continue
            if file.path not in self._checked:
                if self._check_path is not None:
                    self._check_path(file.path)
                file.check_unchanged()
                self._checked.add(file.path)
            position = begin
            try:
                with open_reader(file) as reader:
                    local = (begin - file.first_row, end - file.first_row)
                    for batch in reader.iter_batches(*local, schema.names, batch_rows):
                        yield position, conform(batch, schema, file.path)
                        position += batch.num_rows
            except InputError:
                file.check_unchanged()  # damaged, or being written again while it is read
                raise
            if position != end:
                raise InputError(f"{file.path} ends {end - position} rows early", code="input_changed")

    def _projection(self, columns: Sequence[str] | None) -> pa.Schema:
        if columns is None:
            return self.schema
        self._require(columns)
        return pa.schema([self.schema.field(name) for name in columns])

    def _require(self, columns: Sequence[str]) -> None:
        missing = [name for name in columns if name not in self.schema.names]
        if missing:
            names = ", ".join(self.schema.names)
            raise InputError(f"the input has no column {', '.join(map(repr, missing))}; it has: {names}")

    def token_weights(self, columns: Sequence[str] | None = None) -> Iterator[tuple[int, int, int]]:
        """Yield ``(row_start, row_end, approximate bytes of the columns)`` per row group, in order, covering all rows."""
        for file in self.files:
            position = file.first_row
            for rows, num_bytes in file.weights(columns):
                if position >= self.num_rows:
                    return
                end = min(position + rows, self.num_rows)
                yield position, end, num_bytes * (end - position) // rows
                position += rows

    def check_ids(self, column: str) -> None:
        """Check that a column's values are unique and not null, in bounded memory.

        Raises:
            InputError: no such column; code ``duplicate_id`` with both row numbers; code ``null_id`` with the row.
        """
        self._require([column])
        check_unique(self.iter_batches(columns=[column], batch_rows=8192), column, self.num_rows)


def _unified_schema(inspections: Sequence[Inspection], warnings: list[str]) -> pa.Schema:
    if all(inspection.schema is None for inspection in inspections):
        return JSONL_SCHEMA
    unifier = SchemaUnifier()
    for inspection in inspections:
        unifier.add(inspection.path, inspection.schema)
    if missing := unifier.missing():
        warnings.append(f"Some files lack the column(s) {', '.join(map(repr, missing))}; their rows hold null there.")
    return unifier.schema()


def conform(batch: pa.RecordBatch, schema: pa.Schema, path: str) -> pa.RecordBatch:
    """Select, order and cast a file's columns to the canonical schema; a column that the file lacks is null.

    Raises:
        InputError: a value does not fit.
    """
    if not schema:  # from_arrays would forget how many rows there are
        return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, pa.struct([])))
    arrays = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        column = pa.nulls(batch.num_rows, field.type) if index < 0 else batch.column(index)
        try:
            # No cast without need: Arrow's casts of some nested types make invalid arrays.
            arrays.append(column if column.type.equals(field.type) else column.cast(field.type))
        except pa.ArrowException as error:
            raise InputError(f"column {field.name!r} of {path} does not become {field.type}: {error}") from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
