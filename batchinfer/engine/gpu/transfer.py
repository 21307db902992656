"""Copies to and from the device that nobody waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Event(Protocol):
    """A place in the device's queue."""

    def synchronize(self) -> None:
        """Wait until everything before that place is done."""


class Done:
    """The event of a device that has no queue."""

    def synchronize(self) -> None:
        """Return at once."""


def is_queued(device: torch.device) -> bool:
    """Whether work for a device is queued, and done while the host goes on."""
    return device.type == "cuda"


def mark(device: torch.device) -> Event:
    """An event behind what has been queued so far."""
    if not is_queued(device):
        return Done()
    event: Event = torch.cuda.current_stream(device).record_event()
    return event


def staged(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers (lists or a NumPy array) in host memory that the device can read by itself."""
    return torch.tensor(values, dtype=dtype, pin_memory=is_queued(device))


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers on the device. The host does not wait: torch keeps pinned memory until the copy is done."""
    return staged(values, dtype, device).to(device, non_blocking=True)


def empty_on_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room in host memory for a copy from the device, or to it."""
    return torch.empty(shape, dtype=dtype, pin_memory=is_queued(device))
