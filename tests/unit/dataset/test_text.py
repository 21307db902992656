from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.dataset.text import repair_utf8, replace_in_tree, replace_surrogates


@given(st.text(st.characters(), max_size=20))
def test_replaced_text_can_be_encoded_and_differs_only_at_surrogates(text):
    """Character by character is the reference."""
    expected = "".join("\ufffd" if 0xD800 <= ord(char) <= 0xDFFF else char for char in text)
    replaced, flag = replace_surrogates(text)
    assert replaced == expected
    assert flag == (text != expected)
    replaced.encode()


def test_every_string_of_a_tree_is_replaced():
    tree = {"a\ud800": ["\udfff", 1, None, {"b": "ok"}]}
    assert replace_in_tree(tree) == ({"a\ufffd": ["\ufffd", 1, None, {"b": "ok"}]}, True)
    assert replace_in_tree({"a": [1.5, True]}) == ({"a": [1.5, True]}, False)


def broken(values):
    """A string array over any bytes, as a careless writer makes it."""
    array = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


@pytest.mark.parametrize("values", [[b"ok", b"\xff\xfe", None, b"\xe2\x82"], [b"", "ü".encode(), b"a\x00b"]])
def test_invalid_utf8_in_string_columns_is_repaired_at_any_depth(values):
    """Python's own decoder is the reference."""
    expected = [value if value is None else value.decode(errors="replace") for value in values]
    changed = [
        i for i, value in enumerate(values) if value is not None and value.decode(errors="replace").encode() != value
    ]
    plain = broken(values)
    offsets = pa.array(range(len(values) + 1), pa.int32())
    shapes = {
        "plain": (plain, expected),
        "large": (plain.cast(pa.large_string()), expected),
        "struct": (pa.StructArray.from_arrays([plain], ["s"]), [{"s": value} for value in expected]),
        "list": (pa.ListArray.from_arrays(offsets, plain), [[value] for value in expected]),
        "map": (
            pa.MapArray.from_arrays(offsets, pa.array(["k"] * len(values)), plain),
            [[("k", value)] for value in expected],
        ),
    }
    for name, (array, wanted) in shapes.items():
        repaired, positions = repair_utf8(array)
        assert repaired.type == array.type, name
        assert repaired.to_pylist() == wanted, name
        assert positions == changed, name
        repaired.validate(full=True)


def test_broken_dictionaries_are_repaired():
    indices = pa.array([0, 1, None, 1], pa.int32())
    array = pa.DictionaryArray.from_arrays(indices, broken([b"ok", b"\xff"]))
    repaired, positions = repair_utf8(array)
    assert (repaired.type, repaired.to_pylist(), positions) == (array.type, ["ok", "\ufffd", None, "\ufffd"], [1, 3])


def test_a_slice_is_repaired_at_its_own_positions():
    repaired, positions = repair_utf8(broken([b"\xff", b"a", b"\xff"]).slice(1))
    assert (repaired.to_pylist(), positions) == (["a", "\ufffd"], [1])
