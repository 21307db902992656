"""What this worker says it serves: models, pools, and names of its hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.jobs.serving import Serves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.settings import Settings


def serves_of(settings: Settings, models: Sequence[str] | None) -> Serves:
    """From the settings; the kind of the device, such as ``cuda`` of ``cuda:0``, is one of the hardware's names."""
    device = (settings.device or "").partition(":")[0]
    kinds = dict.fromkeys((*([device] if device else []), *settings.device_kinds))
    return Serves(None if models is None else tuple(models), settings.pools, tuple(kinds))
