from __future__ import annotations

import json
import os

import pytest

from batchinfer.dataset.prompt import PromptConfig, RowReader
from batchinfer.dataset.source import InputSource
from batchinfer.errors import InputError
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode


def line(custom_id, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def chat(text, **params):
    return {"messages": [{"role": "user", "content": text}], **params}


def read(path, **config):
    """All rows of a file as the worker gets them."""
    source = InputSource.open([str(path)])
    reader = RowReader(PromptConfig(**config), source.schema)
    return [row for first, batch in source.iter_batches(columns=reader.columns) for row in reader.read(batch, first)]


def test_requests_of_chat_and_completion_with_their_parameters(tmp_path):
    lines = [
        line("a", **chat("hi", model="m", max_completion_tokens=7, temperature=0.5, stop="x", user="u", n=1)),
        line("b", prompt="Once upon", seed=3, stream=False),
        line("c", **chat([{"type": "text", "text": "parts"}])),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    rows = [row.request for row in read(tmp_path / "a.jsonl", params=SamplingParams(max_tokens=99))]
    assert rows[0].messages == [{"role": "user", "content": "hi"}]
    assert rows[0].params == SamplingParams(max_tokens=7, temperature=0.5, stop=("x",))
    assert (rows[1].prompt, rows[1].params) == ("Once upon", SamplingParams(max_tokens=99, seed=3))
    assert rows[2].messages == [{"role": "user", "content": "parts"}]


TOOL = {"type": "function", "function": {"name": "f"}}


def test_a_tool_choice_as_openai_says_it(tmp_path):
    choice = {"type": "function", "function": {"name": "f"}}
    (tmp_path / "a.jsonl").write_text(
        line("a", **chat("x", tools=[TOOL], tool_choice=choice, parallel_tool_calls=False))
    )
    (row,) = read(tmp_path / "a.jsonl")
    assert row.request.params == SamplingParams(tools=[TOOL], tool_choice="f", parallel_tool_calls=False)


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (chat("x", tools=[{"type": "function"}]), ErrorCode.INVALID_PARAMS, "tools: tools[0] is not"),
        (chat("x", tool_choice="required"), ErrorCode.INVALID_PARAMS, "tool_choice required needs tools"),
        (
            chat("x", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
            ErrorCode.INVALID_PARAMS,
            "'g' is none of auto, none, required and the tools: f",
        ),
        (
            chat("x", tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}),
            ErrorCode.INVALID_PARAMS,
            "tool_choice required and json_schema (response_format) exclude each other",
        ),
        (
            chat("x", tools=[TOOL], parallel_tool_calls=False),
            ErrorCode.INVALID_PARAMS,
            "parallel_tool_calls false needs",
        ),
        (chat("x", n=2), ErrorCode.INVALID_PARAMS, "samples at temperature 0"),
        (chat("x", functions=[]), ErrorCode.INVALID_PARAMS, "'functions' is not supported"),
        (chat("x", temperature="hot"), ErrorCode.INVALID_PARAMS, "temperature"),
        (chat("x", max_tokens=[1, [2]]), ErrorCode.INVALID_PARAMS, "max_tokens"),
        ({"messages": []}, ErrorCode.INVALID_MESSAGES, "empty"),
        ({"messages": [{"role": "user"}]}, ErrorCode.INVALID_MESSAGES, "messages[0] has no content"),
        ({"prompt": ["a", "b"]}, ErrorCode.INVALID_MESSAGES, "one string"),
        ({}, ErrorCode.INVALID_MESSAGES, "neither"),
        (chat("  "), ErrorCode.EMPTY_PROMPT, "no text"),
        ({"prompt": " \n"}, ErrorCode.EMPTY_PROMPT, "empty"),
    ],
)
def test_a_bad_body_is_an_error_row_and_its_neighbours_run(tmp_path, body, code, words):
    (tmp_path / "a.jsonl").write_text("\n".join([line("a", **chat("1")), line("b", **body), line("c", **chat("2"))]))
    rows = read(tmp_path / "a.jsonl")
    assert [row.request is not None for row in rows] == [True, False, True]
    assert rows[1].error.code == code
    assert words in rows[1].error.message


def test_bad_lines_are_refused_by_number_before_anything_runs(tmp_path):
    lines = [line("a", **chat("1")), "not json", "", "[1]", '{"custom_id": "", "body": {}}', '{"custom_id": "x"}']
    lines += ['{"custom_id": "y", "body": {}, "url": 3}', "[" * 100_000]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError) as caught:
        InputSource.open([str(tmp_path / "a.jsonl")])
    assert caught.value.code == "invalid_json_line"
    for words in ("line 2 is not JSON", "line 4 is not a JSON object", "line 5 has no custom_id", "line 6 has no body"):
        assert words in caught.value.message
    assert "line 3" not in caught.value.message  # blank lines are allowed
    (tmp_path / "a.jsonl").write_text("[" * 100_000)
    with pytest.raises(InputError, match="nested too deeply"):
        InputSource.open([str(tmp_path / "a.jsonl")])


def test_lone_surrogates_and_broken_utf8_become_replacement_characters_with_a_flag(tmp_path):
    """Written, flagged, never an aborted job. NUL and emoji are text like any other."""
    lines = [
        line("a", **chat("cut \ud83d emoji")).encode(),
        b'{"custom_id": "b", "body": {"prompt": "bytes \xff\xfe here"}}',
        line("c", **chat("nul \0 and \U0001f600")).encode(),
        b'{"custom_id": "d\\ud800", "body": {"prompt": "fine"}}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    rows = read(tmp_path / "a.jsonl")
    assert rows[0].request.messages[0]["content"] == "cut \ufffd emoji"
    assert rows[1].request.prompt == "bytes \ufffd\ufffd here"
    assert rows[2].request.messages[0]["content"] == "nul \0 and \U0001f600"
    assert [row.warnings for row in rows] == [("text_replaced",), ("text_replaced",), (), ()]
    ids = next(InputSource.open([str(tmp_path / "a.jsonl")]).iter_batches(columns=["custom_id"]))[1]
    assert ids.column(0).to_pylist() == ["a", "b", "c", "d\ufffd"]


def test_any_range_is_found_again_through_the_index(tmp_path):
    """Rows are numbered without blank lines; the index has every 1,024th."""
    lines = [line(str(i), prompt=f"p{i}") + ("\n\n" if i % 100 == 0 else "") for i in range(5000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text(line("5000", prompt="p"))
    opened = InputSource.open([str(tmp_path)])
    source = InputSource.reopen(json.loads(json.dumps(opened.fingerprint())))
    assert source.num_rows == 5001
    for start, stop in [(0, 5001), (1023, 1025), (2048, 2049), (4999, 5001), (3000, 3000)]:
        ids = [v for _, b in source.iter_batches(start, stop, ["custom_id"], 700) for v in b.column(0).to_pylist()]
        assert ids == [str(i) for i in range(start, stop)]
    spans = list(source.token_weights())
    assert [span[:2] for span in spans] == [
        (0, 1024), (1024, 2048), (2048, 3072), (3072, 4096), (4096, 5000), (5000, 5001)
    ]  # fmt: skip
    assert sum(span[2] for span in spans) == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_ids_are_unique_by_the_formats_own_rule(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join([line("a", prompt="1"), line("a", prompt="2")]))
    source = InputSource.open([str(tmp_path / "a.jsonl")])
    assert source.default_id_column == "custom_id"
    with pytest.raises(InputError, match="rows 0 and 1"):
        source.check_ids("custom_id")


def test_a_changed_file_is_noticed_by_size_or_content(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(line("a", prompt="1"))
    source = InputSource.open([str(path)])
    path.write_text(line("a", prompt="2"))
    os.utime(path, (1, 1))
    with pytest.raises(InputError, match="content differs"):
        source.verify_unchanged()


def test_an_empty_file_has_no_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    assert InputSource.open([str(tmp_path / "a.jsonl")]).num_rows == 0
