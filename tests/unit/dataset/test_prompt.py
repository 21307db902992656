from __future__ import annotations

import json

import pyarrow as pa
import pytest

from batchinfer.dataset.prompt import PromptConfig, RowReader
from batchinfer.errors import InputError
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


def read(columns, skip=(), first=0, **config):
    batch = pa.record_batch(columns)
    reader = RowReader(PromptConfig(**config), batch.schema)
    return reader.read(batch.select(reader.columns), first, skip)


def outcomes(rows):
    return [row.request.prompt or row.request.messages if row.request else row.error and row.error.code for row in rows]


def user(text):
    return {"role": "user", "content": text}


def test_rows_have_their_global_index_and_done_ones_are_left_out():
    rows = read({"prompt": ["a", "b", "c", "d"]}, first=100, skip={101, 103})
    assert [row.row_index for row in rows] == [100, 102]
    assert [row.request.request_id for row in rows] == ["100", "102"]


def test_without_configuration_a_row_uses_its_messages_else_its_prompt():
    """DESIGN 4: row by row, where both exist."""
    messages = pa.array([[user("m")], None, None], pa.list_(MESSAGE))
    rows = read({"prompt": ["p0", "p1", None], "messages": messages})
    assert outcomes(rows) == [[user("m")], "p1", ErrorCode.NULL_FIELD]
    assert outcomes(read({"messages": messages})) == [[user("m")], ErrorCode.NULL_FIELD, ErrorCode.NULL_FIELD]


def test_nothing_to_read_a_prompt_from_is_refused_with_the_columns():
    with pytest.raises(InputError, match=r"--template; the input has: text \(string\), n \(int64\)"):
        read({"text": ["x"], "n": [1]})
    with pytest.raises(InputError, match="nothing to read"):
        read({"prompt": [1]})


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(),
                                  pa.binary_view(), pa.dictionary(pa.int8(), pa.string()), pa.json_()])  # fmt: skip
def test_text_of_every_arrow_type_is_a_prompt(kind):
    values = pa.array(['"x"', None], pa.string())
    array = pa.ExtensionArray.from_storage(kind, values) if kind == pa.json_() else values.cast(kind)
    assert outcomes(read({"q": array}, prompt_column="q")) == ['"x"', ErrorCode.NULL_FIELD]


def test_a_column_of_nulls_only_is_text_without_values():
    assert outcomes(read({"q": pa.nulls(2)}, prompt_column="q", on_null="skip")) == [None, None]


@pytest.mark.parametrize(
    ("on_null", "expected"),
    [("error", ErrorCode.NULL_FIELD), ("skip", None), ("empty", ErrorCode.EMPTY_PROMPT)],
)
def test_a_null_does_what_was_asked_for(on_null, expected):
    columns = {"q": pa.array([None, "x"]), "m": pa.array([None, [user("x")]], pa.list_(MESSAGE))}
    assert outcomes(read(columns, prompt_column="q", on_null=on_null)) == [expected, "x"]
    assert outcomes(read(columns, messages_column="m", on_null=on_null)) == [expected, [user("x")]]
    content_null = {"m": pa.array([[user(None)]], pa.list_(MESSAGE))}
    assert outcomes(read(content_null, messages_column="m", on_null=on_null)) == [expected]


def test_empty_and_blank_prompts_are_error_rows():
    assert outcomes(read({"prompt": ["", "  \n\t", "x"]})) == [ErrorCode.EMPTY_PROMPT, ErrorCode.EMPTY_PROMPT, "x"]
    assert outcomes(read({"prompt": [""]}, system="Be brief.")) == [ErrorCode.EMPTY_PROMPT]


def test_bytes_that_are_not_utf8_are_an_error_row():
    rows = read({"prompt": pa.array([b"ok", b"a\xff", "ü".encode()])})
    assert outcomes(rows) == ["ok", ErrorCode.INVALID_ENCODING, "ü"]
    assert rows[1].error.message == "column 'prompt' is not valid UTF-8 (byte 1)"


def test_a_system_message_makes_a_prompt_a_chat_and_comes_first():
    system = {"role": "system", "content": "Be brief."}
    assert outcomes(read({"prompt": ["x"]}, system="Be brief.")) == [[system, user("x")]]
    own = [{"role": "system", "content": "My own."}, user("x")]
    messages = pa.array([[user("x")], own], pa.list_(MESSAGE))
    assert outcomes(read({"messages": messages}, system="Be brief.")) == [[system, user("x")], own]
    assert outcomes(read({"q": ["x"]}, template="<{{ q }}>", system="Be brief.")) == [[system, user("<x>")]]


JSON_MESSAGES = [
    ([user("x")], [user("x")]),
    ([user([{"type": "text", "text": "a"}, "b"])], [user("a\nb")]),
    ([user("x"), user("y")], [user("x"), user("y")]),  # whether two turns in a row are allowed, the model's template says
    ([{"role": "tool", "content": "4", "tool_call_id": "c", "name": None}],
     [{"role": "tool", "content": "4", "tool_call_id": "c"}]),
    ([user("x"), {"role": "assistant", "content": None, "tool_calls": [1]}],
     [user("x"), {"role": "assistant", "content": "", "tool_calls": [1]}]),
    ([], ErrorCode.INVALID_MESSAGES),
    ({"role": "user", "content": "x"}, ErrorCode.INVALID_MESSAGES),
    ("text", ErrorCode.INVALID_MESSAGES),
    ([1], ErrorCode.INVALID_MESSAGES),
    ([{"content": "x"}], ErrorCode.INVALID_MESSAGES),
    ([{"role": "user", "content": 3}], ErrorCode.INVALID_MESSAGES),
    ([user([{"type": "image_url", "image_url": {}}])], ErrorCode.INVALID_MESSAGES),
    ([user(""), {"role": "system", "content": "s"}], ErrorCode.EMPTY_PROMPT),
    ([{"role": "system", "content": "s"}], [{"role": "system", "content": "s"}]),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "expected"), JSON_MESSAGES)
def test_messages_as_json_text(messages, expected):
    assert outcomes(read({"messages": [json.dumps(messages)]})) == [expected]
    assert outcomes(read({"messages": [json.dumps(messages).encode()]})) == [expected]


def test_text_that_is_no_json_or_too_deep_is_an_error_row():
    deep = "[" * 400 + "]" * 400
    texts = ["{not json", "", "[" * 100_000, '[{"role": "user", "content": "x", "extra": ' + deep + "}]"]
    codes = outcomes(read({"messages": texts}))
    assert codes[:3] == [ErrorCode.INVALID_MESSAGES, ErrorCode.EMPTY_PROMPT, ErrorCode.INVALID_MESSAGES]


def test_messages_as_lists_of_structs_with_text_and_parts_and_as_maps():
    parts = pa.struct(
        [("role", pa.string()), ("content", pa.list_(pa.struct([("type", pa.string()), ("text", pa.string())])))]
    )
    column = pa.array([[user([{"type": "text", "text": "x"}])]], pa.large_list(parts))
    assert outcomes(read({"messages": column})) == [[user("x")]]
    maps = pa.array([[[("role", "user"), ("content", "x")]]], pa.list_(pa.map_(pa.string(), pa.string())))
    assert outcomes(read({"messages": maps})) == [[user("x")]]
    named = pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
    column = pa.array([[{**user("x"), "name": None}, {**user("y"), "name": "Ada"}]], pa.list_(named))
    assert outcomes(read({"messages": column})) == [[user("x"), {**user("y"), "name": "Ada"}]]


def test_surrogates_in_json_are_replaced_and_flagged():
    row = read({"messages": [json.dumps([user("cut \ud83d")])]})[0]
    assert (row.request.messages, row.warnings) == ([user("cut \ufffd")], ("text_replaced",))


def test_columns_that_are_named_must_exist_and_have_the_right_type():
    with pytest.raises(InputError, match=r"no column 'p'; it has: n \(int64\)"):
        read({"n": [1]}, prompt_column="p")
    with pytest.raises(InputError, match="'n' is int64, but prompt_column needs text"):
        read({"n": [1]}, prompt_column="n")
    with pytest.raises(InputError, match="'n' is int64, but messages_column needs JSON text"):
        read({"n": [1]}, messages_column="n")


PARAMS = SamplingParams(max_tokens=50, temperature=0.5)


def params(columns, **config):
    columns = {"prompt": ["x"] * len(next(iter(columns.values()))), **columns}
    return [row.request.params if row.request else row.error.message for row in read(columns, params=PARAMS, **config)]


def test_columns_named_like_parameters_override_them_row_by_row():
    found = params({
        "max_tokens": pa.array([5, None, 7], pa.int8()),
        "temperature": pa.array([None, 1, 0], pa.decimal128(3, 1)),
        "stop": pa.array([["a", "b"], None, []], pa.list_(pa.string())),
        "ignore_eos": [True, None, False],
        "stop_token_ids": pa.array([[1], None, None], pa.large_list(pa.int64())),
    })  # fmt: skip
    assert found == [
        SamplingParams(max_tokens=5, temperature=0.5, stop=("a", "b"), ignore_eos=True, stop_token_ids=(1,)),
        SamplingParams(max_tokens=50, temperature=1.0),
        SamplingParams(max_tokens=7, temperature=0.0),
    ]


def test_a_struct_column_overrides_single_columns():
    kind = pa.struct([("max_completion_tokens", pa.int32()), ("top_p", pa.float32())])
    column = pa.array([{"max_completion_tokens": 9, "top_p": None}, None], kind)
    assert params({"params": column, "max_tokens": [3, 3]}) == [
        SamplingParams(max_tokens=9, temperature=0.5),
        SamplingParams(max_tokens=3, temperature=0.5),
    ]


def test_penalties_bias_and_words_come_from_columns_and_from_a_struct():
    bias = pa.map_(pa.int32(), pa.float32())
    kind = pa.struct([("logit_bias", bias), ("bad_words", pa.list_(pa.string())), ("typical_p", pa.float64())])
    found = params({
        "repetition_penalty": [1.5, None],
        "presence_penalty": pa.array([1, None], pa.int8()),
        "logit_bias": ['{"5": -1, "7": 2.5}', None],
        "allowed_token_ids": pa.array([[1, 2], None], pa.list_(pa.int32())),
        "skip_special_tokens": [False, None],
        "params": pa.array([None, {"logit_bias": [(3, 1.0)], "bad_words": ["no"], "typical_p": 0.5}], kind),
    })  # fmt: skip
    assert found == [
        SamplingParams(
            max_tokens=50, temperature=0.5, repetition_penalty=1.5, presence_penalty=1, logit_bias={5: -1, 7: 2.5},
            allowed_token_ids=(1, 2), skip_special_tokens=False,
        ),
        SamplingParams(max_tokens=50, temperature=0.5, logit_bias={3: 1}, bad_words=("no",), typical_p=0.5),
    ]  # fmt: skip


def test_a_bias_that_is_no_table_is_an_error_row():
    messages = params({"logit_bias": ["nonsense", '{"x": 1}', '{"1": 500}', "[1]"]})
    assert all(message.startswith("logit_bias") for message in messages)
    assert "not a JSON object" in messages[0]


def test_whole_numbers_in_a_float_column_are_integers_and_others_an_error_row():
    found = params({"max_tokens": [8.0, 8.5, float("nan"), -1.0]})
    assert found[0].max_tokens == 8
    for message, words in zip(found[1:], ("8.5", "nan", "-1"), strict=True):
        assert message.startswith("max_tokens:")
        assert words in message


def test_values_out_of_range_are_error_rows_that_name_parameter_and_value():
    found = params({"temperature": [0.1, 900.0], "seed": pa.array([2**63, 1], pa.uint64())})
    assert found[0].startswith("seed:")
    assert found[1].startswith("temperature:")
    assert "900.0" in found[1]


def test_columns_that_only_look_like_parameters_are_data():
    """A template over weather data may use its temperature; text and odd structs cannot be parameters."""
    columns = {"temperature": [31.5], "seed": ["abc"], "params": pa.array([{"seed": 1, "colour": "red"}])}
    batch = pa.record_batch(columns)
    reader = RowReader(PromptConfig(template="{{ temperature }} degrees", params=PARAMS), batch.schema)
    assert reader.columns == ("temperature",)
    assert reader.read(batch, 0)[0].request.params == PARAMS
    assert ["'seed'" in text or "'params'" in text for text in reader.warnings] == [True, True]
    unrelated = RowReader(
        PromptConfig(), pa.schema([("prompt", pa.string()), ("params", pa.struct([("x", pa.int8())]))])
    )
    assert unrelated.warnings == ()


def test_which_columns_override_is_said():
    reader = RowReader(PromptConfig(), pa.schema([("prompt", pa.string()), ("seed", pa.int64())]))
    assert reader.warnings == ("Sampling parameters come from the column(s) 'seed'.",)


SCHEMA = {"type": "object", "properties": {"b": {"const": None}, "a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize("column", ["json_schema", "response_format", "guided_json"])
@pytest.mark.parametrize("value", [SCHEMA, FORMAT], ids=["schema", "format"])
def test_a_rows_schema_comes_by_any_of_its_names(column, value):
    """Properties keep their order, a null inside of JSON text stays."""
    rows = read({"prompt": ["x", "y"], column: [json.dumps(value), None]}, params=SamplingParams(guided_regex="a"))
    own, jobs = (row.request.params for row in rows)
    assert json.loads(own.json_schema) == SCHEMA
    assert list(json.loads(own.json_schema)["properties"]) == ["b", "a"]
    assert own.guided_regex is None
    assert (jobs.json_schema, jobs.guided_regex) == (None, "a")


def test_a_schema_may_be_a_struct_and_a_row_may_go_without():
    kind = pa.struct([("type", pa.string()), ("minimum", pa.int64()), ("items", pa.struct([("type", pa.string())]))])
    structs = pa.array([{"type": "integer", "minimum": 3}, {"type": "array", "items": {"type": "null"}}], kind)
    rows = read({"prompt": ["x", "y"], "json_schema": structs})
    assert [json.loads(row.request.params.json_schema) for row in rows] == [
        {"type": "integer", "minimum": 3}, {"type": "array", "items": {"type": "null"}},
    ]  # fmt: skip
    (free,) = read(
        {"prompt": ["x"], "response_format": ['{"type": "text"}']}, params=SamplingParams(json_schema=SCHEMA)
    )
    assert free.request.params.guide is None


def test_other_guides_come_in_columns_and_in_a_struct():
    params = [{"guided_choice": ["a", "b"], "temperature": 1.0}, {"guided_choice": None, "temperature": None}]
    rows = read({"prompt": ["x", "y"], "guided_regex": [None, "[0-9]"], "sampling_params": params})
    assert [row.request.params.guide for row in rows] == [("guided_choice", '["a", "b"]'), ("guided_regex", "[0-9]")]


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("json_schema", "{", "the schema is not JSON"),
        ("json_schema", "[1]", "a schema is a JSON object"),
        (
            "response_format",
            '{"type": "json_schema", "json_schema": {"name": "n"}}',
            "response_format json_schema needs",
        ),
        ("guided_regex", "x" * 300_000, "262144"),
    ],
)
def test_what_is_no_schema_is_an_error_row(column, value, words):
    bad, good = read({"prompt": ["x", "y"], column: [value, None]})
    assert bad.error.code is ErrorCode.INVALID_SCHEMA
    assert words in bad.error.message
    assert good.request is not None


def test_a_row_follows_one_guide():
    (row,) = read({"prompt": ["x"], "guided_regex": ["a"], "json_schema": ["{}"]})
    assert row.error.code is ErrorCode.INVALID_PARAMS
    assert "exclude each other" in row.error.message


def test_an_openai_body_asks_for_a_format():
    from batchinfer.dataset.openai_body import body_params

    assert body_params({"response_format": {"type": "text"}}) == {"json_schema": {"type": "text"}}
    params = SamplingParams(**body_params({"response_format": FORMAT}))
    assert json.loads(params.json_schema) == SCHEMA
    assert (
        SamplingParams(**body_params({"response_format": {"type": "json_object"}})).json_schema == '{"type":"object"}'
    )


def test_a_column_named_n_is_data_and_a_struct_s_field_the_number_of_samples():
    (row,) = read({"prompt": ["x"], "n": [7], "params": [{"n": 2, "temperature": 1.0}]})
    assert (row.request.params.n, row.request.params.temperature) == (2, 1.0)
    (row,) = read({"prompt": ["x"], "n": [7]})
    assert row.request.params.n == 1
