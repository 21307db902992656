"""Text that may not be text: lone surrogates, bytes that are not UTF-8."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from batchinfer.dataset.input_schema import is_bytes, is_string, map_type

_SURROGATES = re.compile("[\ud800-\udfff]")
REPLACED = "text_replaced"
"""The warning of a row in which a character became U+FFFD."""


def replace_surrogates(text: str) -> tuple[str, bool]:
    """Replace each lone surrogate, which UTF-8 cannot hold, by U+FFFD; say whether there was one."""
    if text.isascii():
        return text, False
    replaced, count = _SURROGATES.subn("\ufffd", text)
    return replaced, count > 0


def replace_in_tree(value: Any) -> tuple[Any, bool]:
    """:func:`replace_surrogates` in every string of a JSON-like value, keys too."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        items = [replace_in_tree(item) for item in value]
        return [item for item, _ in items], any(hit for _, hit in items)
    if isinstance(value, dict):
        pairs = [(replace_surrogates(str(key)), replace_in_tree(item)) for key, item in value.items()]
        return {k: v for (k, _), (v, _) in pairs}, any(a or b for (_, a), (_, b) in pairs)
    return value, False


def repair_utf8(array: pa.Array) -> tuple[pa.Array, list[int]]:
    """Make a column's strings valid UTF-8, however deeply nested; return it and the positions that changed.

    Arrow does not check strings that it reads, so a file may carry any bytes in them; a reader of the output would
    stumble. Invalid sequences become U+FFFD. A valid column costs one scan and is returned as it is.
    """
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        pass
    else:
        return array, []
    storage = array.storage if isinstance(array, pa.ExtensionArray) else array
    plain = storage.dictionary_decode() if pa.types.is_dictionary(storage.type) else storage
    as_bytes = plain.cast(map_type(plain.type, _bytes_of))
    values = [scalar.as_py() for scalar in as_bytes]
    repaired = [_decode(value, plain.type) for value in values]
    changed = [
        i for i, value in enumerate(repaired) if value != _decode(values[i], plain.type, errors="surrogateescape")
    ]
    fixed = pa.array(repaired, plain.type)
    if pa.types.is_dictionary(storage.type):
        fixed = fixed.dictionary_encode().cast(storage.type)
    return (pa.ExtensionArray.from_storage(array.type, fixed) if storage is not array else fixed), changed


def _bytes_of(kind: pa.DataType) -> pa.DataType:
    return pa.large_binary() if is_string(kind) else kind


def _decode(value: Any, kind: pa.DataType, errors: str = "replace") -> Any:
    """Bytes where the type says string become text again."""
    if value is None or is_bytes(kind):
        return value
    if is_string(kind):
        return value.decode("utf-8", errors)
    if pa.types.is_struct(kind):
        return {field.name: _decode(value[field.name], field.type, errors) for field in kind}
    if pa.types.is_map(kind):
        return [(_decode(k, kind.key_type, errors), _decode(v, kind.item_type, errors)) for k, v in value]
    if pa.types.is_nested(kind):
        return [_decode(item, kind.value_type, errors) for item in value]
    return value
