"""OpenAI batch files become Parquet and come back with every value as it was written."""

import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.dataset.convert import REQUESTS_SCHEMA, parquet_to_requests, requests_to_parquet
from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.json_members import members
from batchinfer.dataset.prompt import PromptConfig, RowReader
from batchinfer.dataset.source import InputSource
from batchinfer.errors import InputError
from tests.program import batchinfer


def ignore(_rows):
    pass


def exact(text):
    """A JSON text as Python values in which numbers keep their spelling and objects the order of their members."""
    return json.loads(
        text, parse_float=lambda s: ("number", s), parse_int=lambda s: ("number", s), object_pairs_hook=list
    )


def lines_of(path):
    """Lines, the order of their outermost members aside."""
    return [sorted(exact(line)) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def there_and_back(folder, text):
    source, middle, back = folder / "a.jsonl", folder / "a.parquet", folder / "b.jsonl"
    source.write_text(text, encoding="utf-8")
    count = requests_to_parquet(Location.parse(str(source)), Location.parse(str(middle)), ignore)
    assert pq.read_metadata(middle).num_rows == count
    again = parquet_to_requests(
        Location.parse(str(middle)), Location.parse(str(back)), ignore, model=None, id_column=None
    )
    assert again == count
    assert lines_of(back) == lines_of(source)
    return pq.read_table(middle)


ODD = r"""
{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "seed": 12345678901234567890123, "temperature": 0.10, "top_p": 1e-1, "x": -0.0, "y": 1E400, "nested": {"a": [1, {"b": null}], "": ""}, "messages": []}, "mine": {"k": [1.50, null]}, "n": null}

  { "body" : {"b":1,"a":2,"b2":"é☾\ud83e\udd9c \ud800 \u0000 \/"} , "custom_id" : null }
{"custom_id": 7, "method": null, "url": {"a": 1.0}, "body": [1.0]}
{"custom_id": "\ud800", "body": "text"}
{}
"""


def test_odd_lines_come_back_as_they_were(tmp_path):
    table = there_and_back(tmp_path, ODD)
    assert table.schema.names == REQUESTS_SCHEMA.names
    assert table["custom_id"].to_pylist() == ["a", None, None, None, None]
    assert '"temperature": 0.10,' in table["body"][0].as_py()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
    | st.decimals(allow_nan=False, allow_infinity=False).map(lambda d: Raw(format(d, "f"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
OBJECTS = st.dictionaries(
    st.sampled_from(["custom_id", "method", "url", "body", "extra", "x", "é"]) | st.text(max_size=3), VALUES
)


class Raw(float):
    """A number that is written as it was."""

    def __new__(cls, text):
        made = super().__new__(cls, Decimal(text))
        made.text = text
        return made

    def __repr__(self):
        return self.text


@settings(max_examples=60, deadline=None)
@given(st.lists(OBJECTS, max_size=6), st.booleans())
def test_any_objects_come_back(tmp_path_factory, objects, is_ascii):
    text = "\n".join(json.dumps(item, ensure_ascii=is_ascii) for item in objects)
    there_and_back(tmp_path_factory.mktemp("convert"), text)


@pytest.mark.parametrize(
    ("line", "words"),
    [("[1]", "not a JSON object"), ('{"a": 1', "character 8"), ('{"a": 1, "a": 2}', "'a' stands there twice"),
     ('{"a": NaN}', "NaN is no JSON"), ('{"a": ' + "[" * 100_000, "nested too deeply"), ('{"a": 1} x', "follows")],
)  # fmt: skip
def test_a_line_that_is_no_object_is_named(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_text('{"custom_id": "a", "body": {}}\n' + line)
    with pytest.raises(InputError, match=r"line 2: ") as caught:
        requests_to_parquet(
            Location.parse(str(tmp_path / "a.jsonl")), Location.parse(str(tmp_path / "b.parquet")), ignore
        )
    assert words in str(caught.value)
    assert not (tmp_path / "b.parquet").exists()


def test_members_keep_their_spelling():
    assert members(' {"a" :1.50,"b":[ 1 ] }') == {"a": "1.50", "b": "[ 1 ]"}


def requests_of(path):
    source = InputSource.open((str(path),))
    reader = RowReader(PromptConfig(), source.schema)
    batches = source.iter_batches(0, source.num_rows, columns=reader.columns)
    return [row for first, batch in batches for row in reader.read(batch, first)]


def test_a_job_reads_the_same_requests_from_either(tmp_path):
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 7, "seed": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    batchinfer("convert", str(tmp_path / "a.jsonl"), str(tmp_path / "a.parquet"))
    from_lines, from_parquet = requests_of(tmp_path / "a.jsonl"), requests_of(tmp_path / "a.parquet")
    assert from_lines == from_parquet
    assert from_lines[0].request.params.max_tokens == 7


def test_rows_of_prompts_become_requests_that_ask_for_the_same(tmp_path):
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    table = pa.table({
        "id": ["x", "y"], "prompt": ["Hi ☾", None], "temperature": [0.5, None], "max_tokens": [None, 3],
        "messages": pa.array([None, [{"role": "user", "content": "Yo"}]], pa.list_(message)),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet")
    done = batchinfer("convert", str(tmp_path / "a.parquet"), str(tmp_path / "a.jsonl"), "--model", "m", "--json")
    assert done.json["rows"] == 2
    first, second = (json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines())
    assert first == {"custom_id": "x", "method": "POST", "url": "/v1/completions",
                     "body": {"model": "m", "prompt": "Hi ☾", "temperature": 0.5}}  # fmt: skip
    assert second["body"] == {"model": "m", "messages": [{"role": "user", "content": "Yo"}], "max_tokens": 3}
    before, after = requests_of(tmp_path / "a.parquet"), requests_of(tmp_path / "a.jsonl")
    assert [row.request for row in before] == [row.request for row in after]


def test_a_column_without_a_place_is_refused(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"], "price": [1.5]}), tmp_path / "a.parquet")
    done = batchinfer("convert", str(tmp_path / "a.parquet"), str(tmp_path / "a.jsonl"), "--model", "m", exit_code=None)
    assert "'price' has no place" in done.stderr
    assert not (tmp_path / "a.jsonl").exists()
