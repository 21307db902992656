"""One row a sample: nothing lost, nothing paid twice."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.long_samples import long_location, write_long
from batchinfer.dataset.schema import ResultRow, ResultSchema
from batchinfer.errors import BatchInferError
from batchinfer.types import ErrorCode, FinishReason, RowError, RowStatus, Usage


def sample(row, index):
    return {
        "sample_index": index, "output": f"{row}.{index}", "finish_reason": "length", "token_ids": [row, index],
        "cumulative_logprob": -1.0 * index, "logprobs": None,
    }  # fmt: skip


def result(row, num_samples):
    if num_samples == 0:
        error = RowError(ErrorCode.EMPTY_PROMPT, "empty")
        return ResultRow(row, RowStatus.ERRORED, "m", 1, error=error)
    extra = {"samples": [sample(row, i) for i in range(num_samples)], "token_ids": [row, 0]}
    return ResultRow(
        row, RowStatus.SUCCEEDED, "m", 1, f"{row}.0", FinishReason.STOP, usage=Usage(3, 0, 5), cost_nanos=7, extra=extra
    )


def write(path, counts, prefix=""):
    given = pa.schema([("output" if prefix else "prompt", pa.large_string())])
    schema = ResultSchema(given, prefix, ["samples", "token_ids"])
    batch = schema.to_batch([result(i, count) for i, count in enumerate(counts)])
    prompts = pa.array([f"p{i}" for i in range(len(counts))], pa.large_string())
    table = pa.Table.from_arrays([prompts, *batch.columns], schema=schema.output_schema)
    pq.write_table(table, path, row_group_size=3)


@pytest.mark.parametrize("prefix", ["", "bi_"])
def test_each_sample_is_a_row_and_a_row_without_samples_stays_one(tmp_path, prefix):
    counts = [2, 0, 3, 1, 128, 0, 40]
    write(tmp_path / "x.parquet", counts, prefix)
    where = long_location(Location.parse(str(tmp_path / "x.parquet")))
    assert where.name == "x.samples.parquet"
    write_long([Location.parse(str(tmp_path / "x.parquet"))], where, prefix, {"job_id": "j"})
    rows = pq.read_table(where.path).to_pylist()
    expected = [(row, index) for row, count in enumerate(counts) for index in (range(count) if count else [None])]
    assert [(row[prefix + "row_index"], row[prefix + "sample_index"]) for row in rows] == expected
    own = "output" if prefix else "prompt"
    for row, (index, number) in zip(rows, expected, strict=True):
        assert row[own] == f"p{index}"
        assert row[prefix + "output"] == (None if number is None else f"{index}.{number}")
        assert row[prefix + "token_ids"] == (None if number is None else [index, number])
        assert row[prefix + "finish_reason"] == (None if number is None else "length")
    assert sum(float(row[prefix + "cost_usd"] or 0) for row in rows) == pytest.approx(7e-9 * 5)
    assert sum(row[prefix + "usage"]["completion_tokens"] for row in rows if row[prefix + "usage"]) == 5 * 5
    assert prefix + "samples" not in rows[0]


def test_it_is_written_again_for_its_job_and_never_over_a_file_of_others(tmp_path):
    write(tmp_path / "x.parquet", [2])
    files, where = [Location.parse(str(tmp_path / "x.parquet"))], Location.parse(str(tmp_path / "x.samples.parquet"))
    for _ in range(2):
        write_long(files, where, "", {"job_id": "j"})
    with pytest.raises(BatchInferError, match="not of this job"):
        write_long(files, where, "", {"job_id": "other"})
