"""Devices that no job has run on: who makes the server hands in what knows them, for the API imports no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from batchinfer.errors import InvalidSpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.jobs.foresight import DeviceSpeed
    from batchinfer.jobs.prices import Prices
    from batchinfer.jobs.spec import JobSpec
    from batchinfer.settings import Settings


class DeviceSpeeds(Protocol):
    """Splits names of devices into a worker's own kind and those of a table."""

    def __call__(
        self, names: Sequence[str], spec: JobSpec, settings: Settings, prices: Prices, nanos_per_hour: int | None, /
    ) -> tuple[str | None, Sequence[DeviceSpeed]]:
        """The kind, None if none is named, and a job's speeds on the others at ``nanos_per_hour``, None: the price book's.

        Raises:
            InvalidSpecError: a second kind that the table does not have, or the model does not fit.
            ModelError: the model's config cannot be read here.
        """
        ...


def no_table(
    names: Sequence[str], _spec: JobSpec, _settings: Settings, _prices: Prices, _nanos_per_hour: int | None, /
) -> tuple[str | None, Sequence[DeviceSpeed]]:
    """A :class:`DeviceSpeeds` without a table: a name is that of a worker's kind of device."""
    if len(names) > 1:
        raise InvalidSpecError("this server has no table of devices: name one that past jobs ran on", param="device")
    return (names[0] if names else None), ()
