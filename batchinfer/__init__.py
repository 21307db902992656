"""batchinfer: a million prompts in a Parquet file, a million answers back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchinfer.client.client import Client
    from batchinfer.engine.engine import Engine
    from batchinfer.jobs.spec import JobSpec
    from batchinfer.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["Client", "Engine", "JobSpec", "SamplingParams", "__version__"]

_MODULES = {
    "Client": "batchinfer.client.client",
    "Engine": "batchinfer.engine.engine",
    "JobSpec": "batchinfer.jobs.spec",
    "SamplingParams": "batchinfer.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import what somebody asks for, and with it torch, httpx or pydantic, only then."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'batchinfer' has no attribute {name!r}")
