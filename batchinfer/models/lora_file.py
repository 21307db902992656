"""A LoRA adapter on disk, checked against the model that it is to change; its weights are read when they are needed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from batchinfer.adapter_config import CONFIG_NAME, WEIGHTS_NAME, AdapterConfig, invalid, not_found
from batchinfer.errors import ModelError
from batchinfer.models.fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch

    from batchinfer.models.fused.adapted import AdapterSlots, Delta, Target

_KEY = re.compile(r"(?:.*\.)?(layers\.\d+\.(?:self_attn|mlp)\.\w+)\.lora_([AB])(?:\.\w+)?\.weight")
_FLOATS = ("F32", "F16", "BF16")

Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and time of change of an adapter's files."""


def stamp_of(folder: Path) -> Stamp:
    """A stamp that changes with the files. Raises RowFailure: ``adapter_not_found``."""
    try:
        stats = [(folder / name).stat() for name in (CONFIG_NAME, WEIGHTS_NAME)]
    except OSError:
        AdapterConfig.read(folder)  # says what is missing
        raise not_found(folder, "its files cannot be read") from None
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


class LoraFile:
    """An adapter that fits the model. The file stays mapped, so that it can be read later, whatever becomes of its name.

    Raises:
        RowFailure: ``adapter_not_found``, or ``invalid_adapter`` with what does not fit.
    """

    def __init__(self, folder: Path, slots: AdapterSlots) -> None:
        config = AdapterConfig.read(folder)
        self._folder = folder
        self._slots = slots
        self._scale = config.scale
        try:
            self._file: Any = safe_open(folder / WEIGHTS_NAME, framework="pt")
            self._keys = self._pairs()
            self._check(config.rank)
            content = fingerprint([folder / CONFIG_NAME, folder / WEIGHTS_NAME])
        except (SafetensorError, OSError, ModelError) as error:
            raise invalid(folder, f"{WEIGHTS_NAME} cannot be read: {error}") from None
        self.fingerprint = content
        """Hash of the content, which prefixes in the KV cache are told apart by."""
        self.num_bytes = sum(
            slots.linears[name].num_bytes(config.rank for _ in modules) for name, modules in self._by_projection()
        )
        """Memory that its weights need once they are loaded."""

    def load(self) -> dict[str, Delta]:
        """Read the weights, by projection."""
        return {
            name: self._slots.linears[name].delta(
                ((self._slots.targets[module].offset, *self._matrices(module)) for module in modules), self._scale
            )
            for name, modules in self._by_projection()
        }

    def _by_projection(self) -> Iterable[tuple[str, list[str]]]:
        found: dict[str, list[str]] = {}
        for module in self._keys:
            found.setdefault(self._slots.targets[module].projection, []).append(module)
        return found.items()

    def _matrices(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        pair = self._keys[module]
        return self._file.get_tensor(pair["A"]), self._file.get_tensor(pair["B"])

    def _pairs(self) -> dict[str, dict[str, str]]:
        """Names of the tensors ``A`` and ``B`` of each module."""
        found: dict[str, dict[str, str]] = {}
        for key in self._file.keys():  # noqa: SIM118 -- it is no dict
            match = _KEY.fullmatch(key)
            if match is None or match[1] not in self._slots.targets:
                raise invalid(
                    self._folder,
                    f"it holds {key}, and this model takes adapters of {_names(self._slots.targets)} only",
                )
            found.setdefault(match[1], {})[match[2]] = key
        if not found:
            raise invalid(self._folder, "it holds no tensors")
        return found

    def _check(self, rank: int) -> None:
        for module, pair in self._keys.items():
            target: Target = self._slots.targets[module]
            for letter, shape in (("A", [rank, target.in_features]), ("B", [target.out_features, rank])):
                if letter not in pair:
                    raise invalid(self._folder, f"{module} has no lora_{letter}")
                tensor = self._file.get_slice(pair[letter])
                if tensor.get_shape() != shape or tensor.get_dtype() not in _FLOATS:
                    raise invalid(
                        self._folder,
                        f"{pair[letter]} is {tensor.get_dtype()} {tensor.get_shape()}, where this model needs floats "
                        f"{shape}: it was made for another model",
                    )


def _names(targets: Mapping[str, Target]) -> str:
    return ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in targets)) or "no module"
