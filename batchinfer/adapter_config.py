"""A LoRA adapter's folder, as peft writes it: where its files are and what its configuration asks for. No torch here."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from batchinfer.errors import RowFailure
from batchinfer.types import ErrorCode, RowError

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 256
MAX_CONFIG_BYTES = 1 << 20
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "a bias of its own (lora_bias)",
    "modules_to_save": "whole modules (modules_to_save)",
    "rank_pattern": "ranks by layer (rank_pattern)",
    "alpha_pattern": "scales by layer (alpha_pattern)",
    "target_parameters": "bare parameters (target_parameters)",
    "trainable_token_indices": "trained embeddings (trainable_token_indices)",
    "layer_replication": "repeated layers (layer_replication)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "arrow_config": "routing between adapters (arrow_config)",
    "use_monte_lora": "MonteCLoRA",
    "monteclora_config": "MonteCLoRA",
}
"""What of peft's LoRA changes the product in other ways than ``B @ A``, and what people call it."""
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the model's own weights as they are."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What counts of ``adapter_config.json``."""

    rank: int
    scale: float
    """What ``B @ A`` is multiplied by: alpha / rank, with rsLoRA alpha / sqrt(rank)."""

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read and check a folder's configuration.

        Raises:
            RowFailure: ``adapter_not_found``: the folder or one of its two files is not there; ``invalid_adapter``:
                the configuration cannot be read, or asks for what is not supported.
        """
        folder = Path(folder)
        for path in (folder / CONFIG_NAME, folder / WEIGHTS_NAME):
            if not path.is_file():
                raise _missing(folder, path)
        return cls.parse(_read(folder / CONFIG_NAME), folder)

    @classmethod
    def parse(cls, config: dict[str, Any], folder: Path) -> Self:
        """Check a configuration; ``folder`` is for messages. Raises RowFailure: ``invalid_adapter``."""
        kind = config.get("peft_type")
        if kind != "LORA":
            raise invalid(folder, f"its peft_type is {kind!r}; only LORA adapters are supported")
        for name, what in _REFUSED.items():
            if config.get(name):
                raise invalid(folder, f"it uses {what}, which is not supported: merge it into the model with peft")
        if config.get("bias") not in (None, "none"):
            raise invalid(folder, f"it trained biases (bias {config['bias']!r}): only bias 'none' is supported")
        if config.get("init_lora_weights") not in _PLAIN_BEGINNINGS:
            raise invalid(
                folder,
                f"it began as {config['init_lora_weights']!r}, which changes the model's own weights too: convert it to "
                "plain LoRA with peft's save_pretrained(path_initial_model_for_weight_conversion=...)",
            )
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
            raise invalid(folder, f"its rank r is {rank!r}; it must be 1 to {MAX_RANK}")
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
            raise invalid(folder, f"its lora_alpha is {alpha!r}; it must be a number")
        return cls(rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def invalid(folder: str | Path, reason: str) -> RowFailure:
    """The failure of a row whose adapter cannot be used."""
    return RowFailure(RowError(ErrorCode.INVALID_ADAPTER, f"adapter {folder} cannot be used: {reason}"))


def not_found(name: str | Path, reason: str) -> RowFailure:
    """The failure of a row whose adapter is not there."""
    return RowFailure(RowError(ErrorCode.ADAPTER_NOT_FOUND, f"there is no adapter {name}: {reason}"))


def _missing(folder: Path, path: Path) -> RowFailure:
    if not folder.is_dir():
        return not_found(folder, f"give a folder with {CONFIG_NAME} and {WEIGHTS_NAME}")
    if path.name == WEIGHTS_NAME and (folder / "adapter_model.bin").exists():
        return invalid(folder, f"its weights are pickled (adapter_model.bin): save them as {WEIGHTS_NAME}")
    return not_found(folder, f"the folder has no {path.name}")


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise invalid(path.parent, f"{path.name} is longer than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise invalid(path.parent, f"{path.name} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise invalid(path.parent, f"{path.name} is no JSON object")
    return config
