"""Reading a GGUF file: metadata and a table of tensors, the tensors' data left in the file.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. The
``gguf`` package's own reader makes several objects of each vocabulary entry: 1.7 s and some hundred MB for a vocabulary
of 49,152 where this takes 0.1 s. Block formats and dequantisation are the package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from batchinfer.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
_DEFAULT_ALIGNMENT = 32
ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies. ``shape`` is in torch order (rows first); ``offset`` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """A GGUF file, opened.

    Raises:
        ModelError: not a GGUF file, cut short, or of a version or block format that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            cursor = _Cursor(self._bytes)
            self.metadata, self.tensors = _read_header(cursor)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
        except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
            raise ModelError(f"{path} is not a GGUF file that can be read: {error}; download it again") from error
        last = max((entry.offset + entry.num_bytes for entry in self.tensors.values()), default=0)
        if last > len(self._bytes):
            raise ModelError(f"{path} is cut short: {len(self._bytes)} bytes of at least {last}; download it again")
        self._forget(0, len(self._bytes))

    @property
    def architecture(self) -> str:
        """The model's family in llama.cpp's words."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value of the model's own section: ``get("block_count")`` reads ``llama.block_count``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def read(self, name: str, rows: slice = ALL_ROWS) -> NDArray[np.float32]:
        """One tensor, or ``rows`` of its first dimension, dequantised, as float32 in torch order."""
        entry = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, entry.num_bytes, entry.offset)
        if plain := _PLAIN.get(entry.kind):
            values: NDArray[Any] = raw.view(plain).reshape(entry.shape)[rows]
        else:
            blocks = raw.reshape(entry.shape[0], -1)[rows]
            row_bytes = entry.num_bytes * entry.shape[-1] // math.prod(entry.shape)
            try:
                values = gguf.dequantize(blocks.reshape(-1, row_bytes), entry.kind)
            except NotImplementedError as error:
                raise ModelError(
                    f"{self.path}: tensor {name} has the block format {entry.kind.name}, which cannot be read; "
                    "take a Q4, Q5, Q6, Q8 or F16 file of the model"
                ) from error
        wanted = len(range(entry.shape[0])[rows])
        found = values.reshape(wanted, *entry.shape[1:]).astype(np.float32, copy=plain is not None)
        self._forget(entry.offset, entry.num_bytes)
        return found

    def _forget(self, start: int, length: int) -> None:
        """Take a part of the file out of this process's memory; it is read again where it is wanted again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = start - start % mmap.PAGESIZE
            self._bytes.madvise(mmap.MADV_DONTNEED, first, start + length - first)

    def close(self) -> None:
        """Let go of the file."""
        self._bytes.close()


class _Cursor:
    """A place in the file that moves on as values are read."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def scalars(self, code: str, count: int) -> list[Any]:
        form = f"<{count}{code}"
        values = struct.unpack_from(form, self._data, self.position)
        self.position += struct.calcsize(form)
        return list(values)

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.position + length
        if end > len(self._data):
            raise ValueError("a text runs past the end of the file")
        text = self._data[self.position : end].decode()
        self.position = end
        return text

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind}")
        element, count = self.scalar("I"), self.scalar("Q")
        if element == _ARRAY:
            raise ValueError("a list of lists, which no model uses")
        if count > len(self._data):
            raise ValueError("a list runs past the end of the file")
        if element in _SCALARS:
            return self.scalars(_SCALARS[element], count)
        return [self.value(element) for _ in range(count)]


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    if cursor.scalar("I") != gguf.GGUF_MAGIC:
        raise ValueError("it does not begin with GGUF")
    version, num_tensors, num_values = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    if version not in {2, 3}:
        raise ValueError(f"version {version} (2 and 3 are known)")
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    table = [_read_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    return metadata, {name: _entry(name, shape, kind, start + offset) for name, shape, kind, offset in table}


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    shape = tuple(reversed(cursor.scalars("Q", cursor.scalar("I"))))
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
    known = gguf.GGMLQuantizationType(kind)
    block, size = gguf.GGML_QUANT_SIZES[known]
    if not shape or not all(shape) or shape[-1] % block:
        raise ValueError(f"tensor {name} of shape {shape} does not divide into blocks of {block}")
    return TensorEntry(name, shape, known, offset, math.prod(shape) // block * size)
