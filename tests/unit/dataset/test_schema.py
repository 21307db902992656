from __future__ import annotations

import hashlib
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.dataset.layout import OutputLayout
from batchinfer.dataset.schema import ResultRow, ResultSchema
from batchinfer.dataset.sink import PartWriter, iter_done_rows, read_part
from batchinfer.errors import InvalidSpecError
from batchinfer.types import ErrorCode, FinishReason, RowError, RowStatus, Usage

INPUT = pa.schema([("prompt", pa.string()), ("row", pa.int64())])
NAMES = ["row_index", "status", "output", "finish_reason", "error", "usage", "cost_usd", "list_cost_usd", "model",
         "attempt", "warnings"]  # fmt: skip


def test_the_output_has_the_inputs_columns_and_then_ours():
    schema = ResultSchema(INPUT, optional=["token_ids"])
    assert schema.output_schema.names == ["prompt", "row", *NAMES, "token_ids"]
    assert schema.output_schema.field("cost_usd").type == pa.decimal128(18, 9)
    assert schema.output_schema.field("output").type == pa.large_string()
    assert ResultSchema(INPUT, "bi_").part_schema.names == [f"bi_{name}" for name in NAMES]


def test_a_column_named_like_ours_is_refused_with_the_way_out():
    """Case does not help: DuckDB and Spark do not tell Output from output."""
    taken = pa.schema([("status", pa.int8()), ("Output", pa.int8()), ("x", pa.int8())])
    with pytest.raises(InvalidSpecError, match=r"'status', 'output'.*--column-prefix") as caught:
        ResultSchema(taken)
    assert caught.value.param == "column_prefix"
    ResultSchema(taken, "bi_")


def test_a_first_batch_of_errors_only_and_of_successes_only_have_one_schema():
    """Nothing is inferred from values."""
    schema = ResultSchema(INPUT)
    success = ResultRow(0, RowStatus.SUCCEEDED, "m", 1, "hi", FinishReason.STOP, usage=Usage(3, 1, 2), cost_nanos=1)
    error = ResultRow(1, RowStatus.ERRORED, "m", 1, error=RowError(ErrorCode.ENGINE_ERROR, "boom"))
    batches = [schema.to_batch([row]) for row in (success, error)]
    assert [batch.schema for batch in batches] == [schema.part_schema] * 2
    assert batches[0].to_pylist()[0] == {
        "row_index": 0, "status": "succeeded", "output": "hi", "finish_reason": "stop", "error": None,
        "usage": {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2}, "cost_usd": Decimal("0.000000001"),
        "list_cost_usd": None, "model": "m", "attempt": 1, "warnings": None,
    }  # fmt: skip
    assert batches[1].to_pylist()[0]["error"] == {
        "code": "engine_error", "type": "server_error", "message": "boom", "retryable": True
    }  # fmt: skip
    assert schema.to_batch([]).num_rows == 0


@given(st.lists(st.one_of(st.none(), st.integers(-(10**18) + 1, 10**18 - 1)), min_size=1, max_size=9))
def test_costs_are_exact_to_the_nano_dollar(nanos):
    """Decimal arithmetic is the reference."""
    rows = [
        ResultRow(i, RowStatus.SUCCEEDED, "m", 1, cost_nanos=n or 0, list_cost_nanos=n) for i, n in enumerate(nanos)
    ]
    batch = ResultSchema(INPUT).to_batch(rows)
    assert batch.column("list_cost_usd").to_pylist() == [None if n is None else Decimal(n) / 10**9 for n in nanos]
    assert batch.column("cost_usd").to_pylist() == [Decimal(n or 0) / 10**9 for n in nanos]
    batch.validate(full=True)


def test_a_cost_beyond_the_column_is_refused_not_wrapped():
    with pytest.raises(ValueError, match="decimal128"):
        ResultSchema(INPUT).to_batch([ResultRow(0, RowStatus.SUCCEEDED, "m", 1, cost_nanos=10**18)])


def test_text_that_utf8_cannot_hold_is_replaced_and_flagged_beside_other_warnings():
    rows = [
        ResultRow(0, RowStatus.SUCCEEDED, "m", 1, output="cut \ud83d", clamped_max_tokens=7),
        ResultRow(1, RowStatus.SUCCEEDED, "m", 1, output="nul \0 ok", warnings=("text_replaced",)),
        ResultRow(2, RowStatus.ERRORED, "m\udfff", 1, error=RowError(ErrorCode.ENGINE_ERROR, "bad \ud800")),
    ]
    found = ResultSchema(INPUT).to_batch(rows).to_pylist()
    assert [row["output"] for row in found] == ["cut \ufffd", "nul \0 ok", None]
    assert [row["warnings"] for row in found] == [["max_tokens_clamped:7", "text_replaced"], ["text_replaced"], None]
    assert found[2]["error"]["message"] == "bad \ufffd"


def test_token_ids_are_kept_where_they_are_asked_for():
    rows = [
        ResultRow(i, RowStatus.SUCCEEDED, "m", 1, extra={} if ids is None else {"token_ids": ids})
        for i, ids in enumerate([(1, 2), (), None])
    ]
    batch = ResultSchema(INPUT, optional=["token_ids"]).to_batch(rows)
    assert batch.column("token_ids").to_pylist() == [[1, 2], [], None]


def test_scores_and_samples_have_their_place_in_the_schema():
    top = [{"token_id": 3, "token": "a", "logprob": -0.5}]
    entry = {"token_id": 4, "token": "b", "logprob": -1.5, "rank": 2, "top": top}
    first = {"token_id": 1, "token": "<s>", "logprob": None, "rank": None, "top": []}
    sample = {"sample_index": 0, "output": "b", "finish_reason": "stop", "token_ids": [4], "cumulative_logprob": -1.5}
    extra = {
        "logprobs": [entry],
        "prompt_logprobs": [first, entry],
        "cumulative_logprob": -1.5,
        "samples": [{**sample, "logprobs": [entry], "reasoning": "hm", "reasoning_tokens": 1, "tool_calls": None}],
    }
    schema = ResultSchema(pa.schema([]), optional=list(extra))
    rows = [ResultRow(i, RowStatus.SUCCEEDED, "m", 1, extra=given) for i, given in enumerate((extra, {}))]
    found = schema.to_batch(rows).select(list(extra)).to_pylist()
    assert found == [extra, dict.fromkeys(extra)]


def test_a_part_is_sorted_hashed_and_counted(tmp_path):
    writer = PartWriter(OutputLayout(str(tmp_path), "job_1"), ResultSchema(INPUT, "bi_"), 3, 17)
    rows = [ResultRow(i, RowStatus.SUCCEEDED, "m", 17, output=str(i)) for i in (5, 2, 9)]
    first, second = writer.write(rows), writer.write(rows[:1])
    assert first.path != second.path
    assert "_parts/shard-00003/" in first.path
    data = Path(first.path).read_bytes()
    assert (first.num_rows, first.num_bytes, first.sha256) == (3, len(data), hashlib.sha256(data).hexdigest())
    assert read_part(first.path).column("bi_output").to_pylist() == ["2", "5", "9"]
    assert pq.read_table(first.path).num_rows == 3
    assert iter_done_rows([first.path, second.path]).tolist() == [2, 5, 5, 9]
    assert iter_done_rows([]).tolist() == []
    with pytest.raises(ValueError, match="twice"):
        writer.write([rows[0], rows[0]])
    with pytest.raises(ValueError, match="at least one"):
        writer.write([])
