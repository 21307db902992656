"""Which device each rank has, and which configurations can be divided at all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from batchinfer.errors import ModelError
from batchinfer.models.deferred import read_all
from batchinfer.models.load import choose_device

if TYPE_CHECKING:
    from batchinfer.engine.config import EngineConfig
    from batchinfer.models.load import LoadedModel


def config_of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """The configuration of one rank: the same but for its device.

    Raises:
        ModelError: there are not enough devices, or one was chosen, or the recipe cannot be divided.
    """
    size = config.tensor_parallel_size
    if config.quantization == "int8":
        raise ModelError(
            f"quantization int8 is calibrated on a whole model and cannot run with tensor_parallel_size {size}; "
            "use quantization none or int8-weight-only, or tensor_parallel_size 1",
            param="quantization",
        )
    if config.async_scheduling:
        raise ModelError(
            f"async_scheduling cannot run with tensor_parallel_size {size}, whose ranks are told each step when it is "
            "computed; leave it out",
            param="async_scheduling",
        )
    device = choose_device(config.device)
    if device.type == "cpu":
        return config
    if ":" in config.device:
        raise ModelError(
            f"device {config.device} is one device, and tensor_parallel_size {size} takes {size}: "
            "set device to cuda, and choose GPUs with CUDA_VISIBLE_DEVICES",
            param="device",
        )
    if (count := torch.cuda.device_count()) < size:
        raise ModelError(
            f"tensor_parallel_size {size} needs {size} GPUs and {count} are visible; "
            "see CUDA_VISIBLE_DEVICES, or use a smaller size",
            param="tensor_parallel_size",
        )
    return replace(config, device=f"cuda:{rank}")


def place_weights(loaded: LoadedModel) -> None:
    """Read a share of a model onto its GPU: what it leaves free there is for the cache. On a CPU the layers read it."""
    if loaded.device.type == "cuda":
        read_all(loaded.model)
        loaded.model.to(loaded.device)


def use_device(device: torch.device, size: int) -> None:
    """Make a rank's process work on its device; ranks on a CPU share its cores."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
