"""batchinfer: a million prompts in a Parquet file, a million answers back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchinfer.jobs.spec import JobSpec
from batchinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from batchinfer.client.client import Client
    from batchinfer.engine.engine import Engine

__version__ = "0.1.0"
__all__ = ["Client", "Engine", "JobSpec", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the engine, and with it torch, only when somebody asks for it; the client, and with it httpx, too."""
    if name == "Client":
        from batchinfer.client.client import Client  # noqa: PLC0415 -- httpx must not load with the package

        return Client
    if name == "Engine":
        from batchinfer.engine.engine import Engine  # noqa: PLC0415 -- torch must not load with the package

        return Engine
    raise AttributeError(f"module 'batchinfer' has no attribute {name!r}")
