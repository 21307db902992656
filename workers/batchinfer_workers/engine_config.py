"""From a job's spec and this machine's settings to an engine's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchinfer.engine.config import EngineConfig

if TYPE_CHECKING:
    from batchinfer.jobs.spec import JobSpec
    from batchinfer.settings import Settings


def engine_config(spec: JobSpec, settings: Settings) -> EngineConfig:
    """What the job asks for, within what this machine has. Jobs with equal configurations share an engine."""
    machine: dict[str, Any] = {
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "num_kv_blocks": settings.num_kv_blocks,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "device": settings.device,
        "tensor_parallel_size": settings.tensor_parallel_size,
    }
    return EngineConfig(
        model=spec.model,
        dtype=spec.dtype.value,
        quantization=spec.quantization.value,
        kv_cache_dtype=spec.kv_cache_dtype.value,
        speculation="auto" if spec.speculation.value == "ngram" else "off",
        calibrate=settings.calibrate,
        max_model_len=spec.max_model_len,
        **{name: value for name, value in machine.items() if value is not None},
    )
