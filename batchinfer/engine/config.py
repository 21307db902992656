"""What an engine is built from. Plain values only, so that it crosses process borders as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from batchinfer.errors import InvalidSpecError

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "int8-weight-only")
KV_CACHE_DTYPES = ("auto", "int8")
SPECULATIONS = ("off", "ngram", "auto")
ATTENTION_BACKENDS = ("auto", "native", "triton", "torch")
CPU_SEQS, CPU_INT8_KV_SEQS = 64, 128
"""Most sequences that run at once on a CPU: INT8 keys and values of twice as many take about the memory of bfloat16's."""
GPU_SEQS = 256
"""And on a GPU: of so many rows products are no longer bound by reading the weights, and a shard's window still looks ahead."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine's settings; two engines with equal configs are interchangeable.

    Raises:
        InvalidSpecError: a value is out of range; the message and ``param`` name the field.
    """

    model: str
    """A GGUF file, a safetensors folder or a hub id."""
    dtype: str = "auto"
    """One of :data:`DTYPES`; ``auto`` is the model's own on a GPU and float32 on a CPU (bfloat16 beside INT8)."""
    quantization: str = "none"
    """One of :data:`QUANTIZATIONS`."""
    kv_cache_dtype: str = "auto"
    """One of :data:`KV_CACHE_DTYPES`; ``auto`` is the precision of attention, ``int8`` halves that and more."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens; None is the model's own limit."""
    max_num_seqs: int | None = None
    """Most sequences that run at once; None is 256 on a GPU, and on a CPU 64, or 128 with an INT8 KV cache."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step; None takes what was measured for this machine and model (``calibrate``)."""
    calibrate: bool = True
    """Measure times of steps where they are not known yet, which takes two or three seconds at the first start on a
    machine. Answers do not depend on it."""
    block_size: int = 16
    """Tokens a KV cache block."""
    num_kv_blocks: int | None = None
    """Blocks of the KV cache; None lets ``kv_cache_bytes`` decide."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache in bytes; None takes what ``max_num_seqs`` full contexts need, within the memory there is."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that the engine may take in all: weights, the largest step, and the KV cache."""
    enforce_eager: bool = False
    """On a GPU: launch each kernel of each step, and capture no CUDA graphs. Slower, starts sooner, takes less memory."""
    async_scheduling: bool | None = None
    """Schedule a step while the one before it still runs; None is yes on a GPU and no on a CPU, where it gains nothing.
    Answers are the same to the byte."""
    attention_backend: str = "auto"
    """One of :data:`ATTENTION_BACKENDS`; ``auto`` is ``triton`` on a GPU, ``native`` on a CPU, and ``torch`` where that
    cannot serve. ``triton`` on a CPU is for tests: it needs Triton's interpreter."""
    enable_prefix_caching: bool = True
    """Share the KV cache blocks of equal prefixes."""
    speculation: str = "off"
    """One of :data:`SPECULATIONS`: ``ngram`` guesses next tokens from the row's own text, ``auto`` only where that is
    measured to pay (fused layers on a CPU). Answers are the same to the byte."""
    adapter_cache_bytes: int = 1024**3
    """Memory in which LoRA adapters' weights are kept for further rows; one step's are held, however large."""
    seed: int = 0
    """From it and the request id the seed of an unseeded row is derived."""
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``; ``auto`` takes a GPU where there is one."""
    tensor_parallel_size: int = 1
    """Devices of this machine over which the model's weights and KV cache are divided, a process each."""
    cache_dir: str | None = None
    """Where converted tokenizers and downloads are kept; None is the library's default."""

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidSpecError("model is empty; give a GGUF file, a safetensors folder or a hub id", param="model")
        _require_one_of("dtype", self.dtype, DTYPES)
        _require_one_of("quantization", self.quantization, QUANTIZATIONS)
        _require_one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _require_one_of("speculation", self.speculation, SPECULATIONS)
        _require_one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidSpecError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1, such as 0.9",
                param="gpu_memory_utilization",
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidSpecError(f"{name} is {value}; it must be at least {least}", param=name)

    def max_num_seqs_on(self, device: str) -> int:
        """Most sequences that run at once on a kind of device, ``cpu`` or ``cuda``."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        if device == "cuda":
            return GPU_SEQS
        return CPU_INT8_KV_SEQS if self.kv_cache_dtype == "int8" else CPU_SEQS

    def to_json(self) -> str:
        """Write as JSON text; :meth:`from_json` reads it back to an equal config."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            InvalidSpecError: an unknown field, or a value out of range.
        """
        data: dict[str, Any] = json.loads(text)
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise InvalidSpecError(f"unknown engine setting {unknown[0]!r}; known are {', '.join(sorted(known))}")
        return cls(**data)


_LEAST = {
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "num_kv_blocks": 1,
    "kv_cache_bytes": 1,
    "adapter_cache_bytes": 0,
    "tensor_parallel_size": 1,
    "seed": 0,
}


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidSpecError(f"{name} is {value!r}; choose one of {', '.join(allowed)}", param=name)
