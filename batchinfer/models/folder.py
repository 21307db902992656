"""A folder of a transformers model: ``config.json``, a tokenizer and safetensors weights."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from batchinfer.errors import ModelError
from batchinfer.models.parallel.shard import Division
from batchinfer.models.reason import reason
from batchinfer.models.skeleton import build_skeleton, defer
from batchinfer.models.tensor_files import TensorFiles

if TYPE_CHECKING:
    from pathlib import Path

    from batchinfer.models.parallel.shard import Shard

_log = logging.getLogger(__name__)
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_folder(folder: Path) -> list[Path]:
    """The files that make the model what it is: configs and weights.

    Raises:
        ModelError: no config, or no safetensors weights; pickled weights are never read.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: give the folder of a transformers model or a .gguf file")
    weights = list(folder.glob("*.safetensors"))
    if not weights:
        pickled = next((path.name for pattern in PICKLED for path in folder.glob(pattern)), None)
        advice = (
            f"only {pickled}, which may run code when it is read: convert it with save_pretrained"
            if pickled
            else "weights: the download is not complete"
        )
        raise ModelError(f"{folder} has no .safetensors {'file, ' if pickled else ''}{advice}")
    return [*folder.glob("*.json"), *weights]


def read_config(folder: Path) -> Any:
    """The transformers config of a model's folder.

    Raises:
        ModelError: it cannot be read, or its architecture is unknown or needs code of its own.
    """
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its many checks raise
        raise ModelError(f"the model in {folder} cannot be loaded: {reason(error)}") from error


def own_dtype(config: Any) -> torch.dtype:
    """The type that a config states for its weights; float32 where it states none."""
    for part in (config, config.get_text_config()):
        if isinstance(dtype := getattr(part, "dtype", None), torch.dtype):
            return dtype
    return torch.float32


def defer_folder_model(folder: Path, config: Any, *, attn_implementation: str, dtype: torch.dtype) -> Any | None:
    """The model of ``folder`` whose weights are read when they are converted; None if its files do not allow that."""
    try:
        model = build_skeleton(config, attn_implementation, dtype)
        defer(model, TensorFiles(folder, config.model_type), dtype)
        _read_generation_config(model, folder)
    except Exception as error:  # noqa: BLE001 -- the other way of loading says what is wrong, or copes
        _log.info("%s is loaded as a whole: %s", folder, reason(error))
        return None
    return model


def defer_folder_part(folder: Path, config: Any, shard: Shard, *, attn_implementation: str, dtype: torch.dtype) -> Any:
    """One rank's share of the model of ``folder``; its weights, and no others, are read when they are converted.

    Raises:
        ModelError: the model cannot be divided so, or its files cannot be read in parts.
    """
    division = Division(config, shard)
    try:
        model = build_skeleton(division.config, attn_implementation, dtype)
        division.narrow(model)
        defer(model, division.loaders(TensorFiles(folder, config.model_type)), dtype)
        _read_generation_config(model, folder)
    except Exception as error:  # transformers and safetensors raise whatever their many checks raise
        raise ModelError(f"the model in {folder} cannot be read in parts: {reason(error)}") from error
    return model


def _read_generation_config(model: Any, folder: Path) -> None:
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


def load_folder_model(
    folder: Path, config: Any, *, attn_implementation: str, dtype: torch.dtype, device: torch.device
) -> Any:
    """The model of ``folder`` in ``dtype`` on ``device``; weights are read tensor by tensor, never as a second copy.

    Raises:
        ModelError: the architecture is no decoder that is known, or weights are missing or misshapen.
    """
    causal_lm: Any = AutoModelForCausalLM  # its annotations are incomplete
    try:
        model, report = causal_lm.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises whatever its many readers raise
        raise ModelError(f"the model in {folder} cannot be loaded: {reason(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{folder} lacks {len(missing)} weights, such as {missing[0]}: download it again")
    return model.to(device)
