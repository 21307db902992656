from __future__ import annotations

import re
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from batchinfer.dataset.prompt import PromptConfig, RowReader
from batchinfer.dataset.source import InputSource
from batchinfer.dataset.verify import verify
from tests.arrow_strategies import tables
from tests.dataset_job import DatasetJob

SLOW = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def same(left, right):
    """Equal values in their text, which tells NaN from nothing."""
    try:
        return repr(left.to_pylist()) == repr(right.to_pylist())
    except (ValueError, OverflowError):  # times that Python cannot hold
        arrays = (column.combine_chunks() for column in (left, right))
        texts = [array.to_string(window=100, container_window=100, skip_new_lines=True) for array in arrays]
        plain = [re.sub("large_(?=string|binary|list)|_view", "", text) for text in texts]
        return plain[0] == plain[1]


def read_whole(paths):
    """Row group by row group: pyarrow cannot join nested dictionaries."""
    files = [pq.ParquetFile(path) for path in paths]
    return pa.concat_tables([file.read_row_group(i) for file in files for i in range(file.num_row_groups)])


@SLOW
@given(table=tables(), group=st.integers(1, 5))
def test_every_column_of_every_type_passes_through_unchanged(table, group):
    """The file as pyarrow reads it by itself is the reference, for types (text is large) and for values."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = f"{folder}/in.parquet", f"{folder}/out"
        try:
            pq.write_table(table, path, row_group_size=group)
        except pa.ArrowNotImplementedError:
            reject()  # pyarrow itself cannot write some views inside structs
        job = DatasetJob(
            [path], out, shard_rows=3, part_rows=2, prefix="bi_", config=PromptConfig(template="{{ 1 }} is constant")
        )
        assert job.run().counts["succeeded"] == table.num_rows
        before = read_whole([path])
        after = read_whole([job.layout.shard_path(i) for i in range(len(job.ranges()))])
        for name, column in zip(before.column_names, before.columns, strict=True):
            kind = column.type
            if pa.types.is_string(kind):
                assert after.column(name).type == pa.large_string()
            elif "view" not in str(kind):
                assert after.column(name).type == kind
            assert same(column, after.column(name)), name
        report = verify(out)
        assert report.problems == ()
        assert report.input_checked


@SLOW
@given(table=tables())
def test_a_template_over_any_columns_never_raises(table):
    """Each row is a prompt or an error row, whatever its values are; none mentions the word None for a null."""
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(table, f"{folder}/in.parquet")
        source = InputSource.open([f"{folder}/in.parquet"])
        names = " ".join(f"{{{{ row[{name!r}] }}}}" for name in source.schema.names)
        reader = RowReader(PromptConfig(template="x " + names), source.schema)
        rows = [row for first, batch in source.iter_batches() for row in reader.read(batch, first)]
        assert [row.row_index for row in rows] == list(range(table.num_rows))
        for row in rows:
            assert (row.request is None) != (row.error is None)
            assert row.request is None or "None" not in row.request.prompt
