"""Rows of tasks: which columns are read, and what a row without them becomes."""

import json

import pyarrow as pa
import pytest

from batchinfer.dataset.jsonl_source import JSONL_SCHEMA
from batchinfer.dataset.prompt import PromptConfig, RowReader
from batchinfer.dataset.schema import OPTIONAL_COLUMNS, ResultRow, ResultSchema
from batchinfer.errors import InputError
from batchinfer.jobs.spec import parse_spec
from batchinfer.tasks import TaskOptions
from batchinfer.types import RowStatus


def read(columns, task, **config):
    batch = pa.RecordBatch.from_pydict(columns)
    reader = RowReader(PromptConfig(task=TaskOptions(**task), **config), batch.schema)
    return reader.read(batch.select(reader.columns), 0)


def test_continuations_and_choices():
    columns = {"prompt": ["a", "b", "c", "d"], "choices": [[" x", " y"], [], None, [" z", None]]}
    rows = read(columns, {"task": "score", "score_stride": 7})
    assert rows[0].request.prompt == "a"
    assert rows[0].request.task == {"task": "score", "score_stride": 7, "texts": [" x", " y"]}
    assert rows[1].request.task["texts"] == []
    assert [row.error.code.value for row in rows[2:]] == ["null_field", "no_continuation"]
    (row,) = read({"prompt": ["a"], "text": [" one"]}, {"task": "score"}, continuation_column="text")
    assert row.request.task["texts"] == [" one"]
    (row,) = read({"prompt": ["a"]}, {"task": "score"})
    assert row.request.task == {"task": "score"}


def test_a_null_continuation_follows_on_null():
    columns = {"prompt": ["a"], "continuation": pa.array([None], pa.string())}
    assert read(columns, {"task": "score"}, on_null="skip")[0].skipped
    assert read(columns, {"task": "score"}, on_null="empty")[0].error.code.value == "no_continuation"


def test_queries_and_documents():
    columns = {"query": ["q"], "documents": [["one", "two"]], "prompt": ["not read"]}
    (row,) = read(columns, {"task": "rerank"})
    assert (row.request.prompt, row.request.task) == ("q", {"task": "rerank", "texts": ["one", "two"]})
    (row,) = read({"question": ["q"], "document": ["d"]}, {"task": "rerank"}, prompt_column="question")
    assert (row.request.prompt, row.request.task["texts"]) == ("q", ["d"])


@pytest.mark.parametrize(
    ("columns", "task", "config", "word"),
    [
        ({"query": ["q"]}, {"task": "rerank"}, {}, "'document' or 'documents'"),
        ({"query": ["q"], "document": [7]}, {"task": "rerank"}, {}, "int64"),
        ({"prompt": ["q"], "document": ["d"]}, {"task": "rerank"}, {}, "'query'"),
        ({"prompt": ["q"]}, {"task": "score"}, {"continuation_column": "c"}, "no column 'c'"),
    ],
)
def test_columns_that_are_not_there(columns, task, config, word):
    with pytest.raises(InputError, match=word):
        read(columns, task, **config)


def test_a_column_named_like_a_parameter_is_data_to_a_task():
    (row,) = read({"prompt": ["a"], "temperature": [99.0]}, {"task": "embed"})
    assert row.request.params.temperature == 0
    assert row.request.task == {"task": "embed"}


def test_lists_of_texts():
    texts = [["a b", "c"], [], None, ["a", None], ["x"] * 2049]
    rows = read({"texts": texts, "prompt": ["not read"] * 5}, {"task": "embed", "dimensions": 3}, embedding_lists=True)
    assert (rows[0].request.prompt, rows[0].request.messages) == (None, None)
    assert rows[0].request.task == {"task": "embed", "dimensions": 3, "texts": ["a b", "c"]}
    assert rows[1].request.task["texts"] == []  # the engine says that it is empty
    assert [row.error.code.value for row in rows[2:]] == ["null_field", "null_field", "invalid_params"]
    assert "item 1" in rows[3].error.message and "2048" in rows[4].error.message
    (row,) = read({"t": ["one"]}, {"task": "embed"}, embedding_lists=True, prompt_column="t")
    assert row.request.task["texts"] == ["one"]
    (row,) = read(
        {"t": pa.array([None], pa.string())},
        {"task": "embed"},
        embedding_lists=True,
        prompt_column="t",
        on_null="empty",
    )
    assert row.error.code.value == "empty_prompt"
    with pytest.raises(InputError, match="'texts' or 'prompt'"):
        read({"t": ["one"]}, {"task": "embed"}, embedding_lists=True)


def bodies(*bodies, lists=True, **config):
    """Rows of request bodies, read as the door reads them."""
    lines = [body if isinstance(body, str) else json.dumps(body) for body in bodies]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(lines, pa.large_string())], schema=pa.schema([JSONL_SCHEMA.field("body")])
    )
    reader = RowReader(PromptConfig(task=TaskOptions(task="embed"), embedding_lists=lists, **config), batch.schema)
    return reader.read(batch, 0)


@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        ("one", {"texts": ["one"]}),
        (["one", "two"], {"texts": ["one", "two"]}),
        ([5, 6], {"token_ids": [[5, 6]]}),
        ([[5, 6], [7]], {"token_ids": [[5, 6], [7]]}),
    ],
)
def test_inputs_of_embedding_requests(given, read_as):
    (row,) = bodies({"model": "m", "input": given, "user": "me", "encoding_format": "base64", "dimensions": 4})
    assert row.request.task == {"task": "embed", "dimensions": 4} | read_as
    assert (row.request.prompt, row.request.messages) == (None, None)


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        ({}, "empty_prompt", "input is missing"),
        ({"input": []}, "empty_prompt", "empty"),
        ({"input": 7}, "invalid_params", "list of token ids"),
        ({"input": ["a", 7]}, "invalid_params", "list of token ids"),
        ({"input": [True]}, "invalid_params", "list of token ids"),
        ({"input": [[1], ["a"]]}, "invalid_params", "list of token ids"),
        ({"input": ["a"] * 2049}, "invalid_params", "2049 texts"),
        ({"input": "a", "encoding_format": "int8"}, "invalid_params", "float or base64"),
        ({"input": "a", "encoding_format": ["float"]}, "invalid_params", "float or base64"),
        ({"input": "a", "dimensions": 0}, "invalid_params", "dimensions"),
        ({"input": "a", "dimensions": True}, "invalid_params", "dimensions"),
        ({"input": "a", "temperature": 1}, "invalid_params", "'temperature'"),
        ("[]", "invalid_messages", "not a JSON object"),
    ],
)
def test_a_bad_embedding_request_says_why(body, code, word):
    good, bad = bodies({"input": "a", "temperature": None}, body)
    assert good.request.task["texts"] == ["a"]
    assert bad.error.code.value == code
    assert word in bad.error.message


def test_embedding_requests_in_a_job_of_one_vector_a_row():
    one, several = bodies({"input": "a"}, {"input": ["a", "b"]}, lists=False)
    assert one.request.task["texts"] == ["a"]
    assert "--embedding-lists" in several.error.message
    with pytest.raises(InputError, match="leave system out"):
        bodies({"input": "a"}, system="s")


def test_a_lone_surrogate_in_a_text_to_embed_is_replaced():
    (row,) = bodies('{"input": ["a\\ud800", "b"]}')
    assert (row.request.task["texts"], row.warnings) == (["a\ufffd", "b"], ("text_replaced",))


def test_generating_rows_carry_nothing():
    (row,) = read({"prompt": ["a"], "choices": [["b"]]}, {})
    assert row.request.task is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "embed", "temperature": 0.5}, "temperature has no meaning"),
        ({"task": "score", "n": 3, "temperature": 1}, "no meaning"),
        ({"task": "embed", "labels": ["a", "b"]}, "labels is for task classify"),
        ({"pooling": "mean"}, "pooling is for task embed, not for generate"),
        ({"task": "classify", "labels": "a,a"}, "different"),
        ({"task": "classify", "labels": "a"}, "at least two"),
        ({"task": "score", "document_column": "d"}, "document_column is for task rerank"),
        ({"task": "generate", "embedding_lists": True}, "embedding_lists is for task embed"),
        ({"task": "embed", "embedding_lists": True, "template": "{{ a }}"}, "no messages_column, template or system"),
        ({"task": "rerank", "system": "s"}, "query and documents"),
        ({"task": "score", "sentinel": 0.1}, "sentinel"),
        ({"task": "sing"}, "task"),
    ],
)
def test_what_does_not_go_together_is_refused_at_submit(fields, message):
    from batchinfer.errors import InvalidSpecError

    with pytest.raises(InvalidSpecError, match=message):
        parse_spec({"inputs": ["x.parquet"], "model": "m", **fields})


@pytest.mark.parametrize("task", ["score", "embed", "classify", "rerank"])
def test_results_have_the_columns_of_their_task(task):
    spec = parse_spec({"inputs": ["x.parquet"], "model": "m", "task": task})
    names = spec.result_columns()
    assert names
    schema = ResultSchema(pa.schema([]), optional=names)
    assert schema.part_schema.names[-len(names) :] == list(names)
    assert parse_spec({"inputs": ["x.parquet"], "model": "m"}).result_columns() == ()


def test_values_fit_the_columns():
    extra = {
        "choice_scores": [{"logprob": -1.5, "num_tokens": 2, "num_bytes": 9, "logprob_per_token": -0.75, "logprob_per_byte": -0.1, "is_greedy": True}],
        "best_choice": {"sum": 0, "per_token": 0, "per_byte": 0}, "logprob": -1.5, "perplexity": 2.0,
        "embedding": [0.5, -0.25], "embeddings": [[0.5], [1.0]], "label": "a",
        "scores": [{"label": "a", "probability": 1.0}], "score": 0.5, "ranking": [{"index": 0, "score": 0.5, "rank": 1}],
    }  # fmt: skip
    schema = ResultSchema(pa.schema([]), optional=extra)
    row = ResultRow(0, RowStatus.SUCCEEDED, "m", 1, output="", extra=extra)
    (found,) = schema.to_batch([row]).to_pylist()
    assert {name: found[name] for name in extra} == extra
    assert set(extra) <= set(OPTIONAL_COLUMNS)
