"""A safetensors file that is read through and not kept: its pages leave the process's memory on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safetensors import safe_open

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from batchinfer.models.deferred import Index

MAX_MAPPED = 32 * 1024**2
"""Bytes read after which the file is mapped anew; the pages of a mapping count as the process's until it ends."""


class MappedFile:
    """Tensors by name. Those that were given hold on to their mapping: copy what shall outlive the reading.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map()
        self.names: frozenset[str] = frozenset(self._file.keys())
        self.metadata: dict[str, str] = self._file.metadata() or {}

    def shape(self, name: str) -> list[int]:
        """Of a tensor, which is not read for it."""
        found: list[int] = self._file.get_slice(name).get_shape()
        return found

    def get(self, name: str, index: Index = None) -> torch.Tensor:
        """A tensor, or a part of it."""
        if self._num_bytes > MAX_MAPPED:
            self._map()
        tensor: torch.Tensor = self._file.get_tensor(name) if index is None else self._file.get_slice(name)[index]
        self._num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def _map(self) -> None:
        opened: Any = safe_open(self._path, framework="pt")  # its methods have no annotations
        self._file = opened
        self._num_bytes = 0
