"""A client of a batchinfer server."""

from batchinfer.client.client import Client
from batchinfer.client.transport import RetryPolicy

__all__ = ["Client", "RetryPolicy"]
