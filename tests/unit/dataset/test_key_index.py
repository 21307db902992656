"""Row keys and their index, against a plain dictionary."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.dataset import key_index
from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.key_index import NOWHERE, KeyIndex, KeyIndexWriter, split_keys
from batchinfer.dataset.row_keys import RowKeys, make_scope
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request

# few upper halves, so that different keys share one
KEYS = st.builds(lambda high, low: bytes([high]) * 8 + bytes([low]) * 8, st.integers(0, 3), st.integers(0, 1))


@given(entries=st.lists(KEYS, max_size=40), asked=st.lists(KEYS, min_size=1, max_size=20), run=st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_an_index_finds_what_a_dictionary_has(tmp_path_factory, entries, asked, run):
    where = Location.parse(str(tmp_path_factory.mktemp("index") / "_keys.bin"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_index, "RUN_ROWS", run)
        with KeyIndexWriter(where) as writer:
            for row, key in enumerate(entries):
                writer.add(key, np.array([row]))
        assert writer.num_rows == len(entries)
        found = KeyIndex(where).find(*split_keys(b"".join(asked)))
    for key, row in zip(asked, found.tolist(), strict=True):
        places = [i for i, entry in enumerate(entries) if entry == key]
        assert row in places if places else row == NOWHERE


def test_a_failed_write_leaves_nothing(tmp_path):
    where = Location.parse(str(tmp_path / "_keys.bin"))
    with pytest.raises(RuntimeError), KeyIndexWriter(where) as writer:
        writer.add(b"x" * 16, np.array([1]))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_an_index_on_an_object_store(s3_endpoint):
    import boto3

    boto3.client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket="bucket")
    where = Location.parse("s3://bucket/out/_keys.bin")
    keys = np.random.default_rng(0).bytes(16 * 1000)
    with KeyIndexWriter(where) as writer:
        writer.add(keys, np.arange(1000))
    assert KeyIndex(where).find(*split_keys(keys)).tolist() == list(range(1000))


BASE = Request("1", SamplingParams(), prompt="hello")


@pytest.mark.parametrize(
    "other",
    [
        Request("1", SamplingParams(), prompt="hello "),
        Request("1", SamplingParams(max_tokens=7), prompt="hello"),
        Request("1", SamplingParams(seed=1), prompt="hello"),
        Request("1", SamplingParams(), messages=[{"role": "user", "content": "hello"}]),
        Request("1", SamplingParams(), prompt_token_ids=[1, 2]),
    ],
)
def test_whatever_may_change_an_answer_changes_the_key(other):
    keys = RowKeys("scope")
    assert keys.of(other) != keys.of(BASE)
    assert RowKeys("other").of(BASE) != keys.of(BASE)


def test_what_changes_no_answer_does_not():
    assert RowKeys("s").of(Request("77", SamplingParams(), prompt="hello")) == RowKeys("s").of(BASE)
    assert make_scope({"a": 1, "b": 2}) == make_scope({"b": 2, "a": 1})


def test_what_no_json_can_hold_has_no_key():
    assert RowKeys("s").of(Request("1", SamplingParams(), messages=[{"role": "user", "content": {1, 2}}])) is None
