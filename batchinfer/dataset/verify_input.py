"""The input's own columns in the output, compared row by row with the input."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchinfer.dataset.parquet_source import ParquetReader
from batchinfer.dataset.row_stream import RowStream
from batchinfer.dataset.source import InputSource
from batchinfer.dataset.text import repair_utf8
from batchinfer.errors import InputError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchinfer.dataset.filesystem import Location
    from batchinfer.dataset.manifest import Manifest, ManifestFile

_BATCH_ROWS = 4096
_MAX_NAMED = 5


def compare_with_input(manifest: Manifest, files: Sequence[tuple[ManifestFile, Location]]) -> tuple[bool, list[str]]:
    """Compare files whose rows are all there with the input; ``(False, [])`` if the input is gone or has changed."""
    try:
        source = InputSource.reopen(manifest.input_fingerprint)
        source.verify_unchanged()
    except (UserError, KeyError, OSError):
        return False, []
    problems: list[str] = []
    for entry, where in files:
        try:
            problems += _compare_file(source, entry, where)
        except InputError as error:
            problems.append(error.message)
    return True, problems


def _compare_file(source: InputSource, entry: ManifestFile, where: Location) -> Iterator[str]:
    """One sentence for each column that differs, naming the first rows."""
    different: dict[str, list[int]] = {}
    with ParquetReader(where) as reader:
        absent = [name for name in source.schema.names if name not in reader.schema.names]
    if absent:
        yield f"{entry.name} has lost the input's column(s) {', '.join(absent)}"
        return
    stream = RowStream(where, source.schema, 0, entry.num_rows)
    for start, batch in source.iter_batches(entry.row_start, entry.row_end, batch_rows=_BATCH_ROWS):
        found = stream.pull(batch.num_rows)
        for name, ours in zip(source.schema.names, batch.columns, strict=True):
            rows = _different_rows(ours, found.column(name))
            different.setdefault(name, []).extend(start + row for row in rows)
    for name, rows in different.items():
        if rows:
            shown = ", ".join(map(str, rows[:_MAX_NAMED]))
            yield f"{entry.name}: column {name!r} is not the input's in {len(rows)} row(s): {shown}"


def _different_rows(ours: pa.Array, theirs: pa.ChunkedArray) -> list[int]:
    if theirs.equals(pa.chunked_array([ours])):
        return []
    # Arrow says "different" for NaN, for other dictionaries of equal values and for text that had to be repaired.
    left = repair_utf8(ours)[0]
    return [row for row in range(len(left)) if not _same(_plain(left[row]), _plain(theirs[row]))]


def _plain(scalar: pa.Scalar) -> Any:
    """Python values, exact even for times that Python cannot hold: those stay the integers that they are."""
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.DictionaryScalar | pa.ExtensionScalar):
        return _plain(scalar.value)
    if isinstance(scalar, pa.StructScalar):
        return {name: _plain(scalar[name]) for name in scalar}
    if pa.types.is_nested(scalar.type):
        return [_plain(item) for item in scalar.values]
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        return getattr(scalar, "value", None)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return bool(left == right)
