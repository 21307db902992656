"""The tensors of a folder of safetensors files by the names of transformers' parameters, read one at a time."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import torch

from batchinfer.models.mapped_file import MappedFile

if TYPE_CHECKING:
    from pathlib import Path

    from batchinfer.models.deferred import Index
    from batchinfer.models.skeleton import Loader

EXPERT_NAMES = {
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj"), "down_proj"),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3"), "w2"),
}
"""Where files keep each expert by itself, what its gate and up projections are called, and its down projection."""
_STACK = re.compile(r"(?P<layer>.*\.)mlp\.experts\.(?P<kind>gate_up_proj|down_proj)")


class TensorFiles:
    """All of a folder's tensors; nothing is read until a loader is called."""

    def __init__(self, folder: Path, model_type: str) -> None:
        self._model_type = model_type
        index = folder / "model.safetensors.index.json"
        files: set[str] = (
            set(json.loads(index.read_text())["weight_map"].values())
            if index.exists()
            else {path.name for path in folder.glob("*.safetensors")}
        )
        opened = [MappedFile(folder / name) for name in sorted(files)]
        self._files = {name: file for file in opened for name in file.names}

    def __getitem__(self, name: str) -> Loader:
        """What reads a parameter.

        Raises:
            KeyError: no file has it.
        """
        if name in self._files:
            return lambda index: self._read(name, index)
        match = _STACK.fullmatch(name)
        if match is None or self._model_type not in EXPERT_NAMES:
            return self._renamed(name)
        where, gate_up, down = EXPERT_NAMES[self._model_type]
        parts = gate_up if match["kind"] == "gate_up_proj" else (down,)
        prefix = f"{match['layer']}{where}"
        num_experts = 0
        while f"{prefix}.{num_experts}.{parts[0]}.weight" in self._files:
            num_experts += 1
        names = [[f"{prefix}.{i}.{part}.weight" for part in parts] for i in range(num_experts)]
        if not names or any(part not in self._files for expert in names for part in expert):
            raise KeyError(name)

        def load(index: Index) -> torch.Tensor:
            if index is None:
                return torch.stack([load(i) for i in range(num_experts)])
            assert isinstance(index, int), "experts are read one by one"
            return torch.cat([self._read(part, None) for part in names[index]])

        return load

    def _renamed(self, name: str) -> Loader:
        """A router, which Mixtral's files keep under another name."""
        other = name.replace(".mlp.", ".block_sparse_moe.")
        if self._model_type != "mixtral" or other not in self._files:
            raise KeyError(name)
        return lambda index: self._read(other, index)

    def _read(self, name: str, index: Index) -> torch.Tensor:
        return self._files[name].get(name, index)
