"""Speeds of devices that no job has run on yet, from their data sheets and the model's sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from batchinfer.engine.config import GPU_SEQS
from batchinfer.engine.devices import DEVICES, find_device
from batchinfer.engine.model_shape import ModelShape
from batchinfer.engine.roofline import Precision, Workload, batch_size, predict
from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.predict import Interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.engine.devices import Device
    from batchinfer.jobs.prices import Prices
    from batchinfer.jobs.spec import JobSpec
    from batchinfer.settings import Settings

SHARE = Interval(0.4, 0.6, 0.8)
"""Of the sequential bound's speed: what engines of this kind reach, an assumption and no measurement."""
BASIS = f"roofline, not measured: {SHARE.expected:.0%} ({SHARE.low:.0%} to {SHARE.high:.0%}) of the sequential bound"
PRECISIONS = {
    "none": Precision(),
    "int8": Precision("int8", "int8", head="int8"),
    "int8-weight-only": Precision("int8", head="int8"),
}
"""By a spec's quantization; the head is quantised with the layers. Float32 is counted as bfloat16."""


@dataclass(frozen=True, slots=True)
class RooflineSpeed:
    """How long a job takes on a device, by its roofline and the share of it that is assumed."""

    target: Device
    shape: ModelShape
    precision: Precision
    nanos_per_hour: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    basis: str = BASIS

    @property
    def device(self) -> str:
        """The name that was asked for."""
        return self.target.name

    def check(self) -> None:
        """Raises InvalidSpecError: the model does not fit."""
        batch_size(self.target, self.shape, self.precision, Workload(1, 1, 1))

    def seconds(
        self, *, num_rows: float, prompt_tokens: Interval, cached_share: float, completion_tokens: Interval
    ) -> Interval:
        """Sequential bound over the assumed share; the cached tokens count as one prefix of all rows.

        Raises:
            InvalidSpecError: not even one row fits beside the model.
        """
        if num_rows <= 0:
            return Interval(0.0, 0.0, 0.0)

        def bound(prompts: float, answers: float) -> float:
            prompt = max(1.0, prompts / num_rows)
            shared = cached_share * prompt * num_rows / (num_rows - 1) if num_rows > 1 else 0.0
            work = Workload(
                num_rows, prompt, max(1.0, answers / num_rows), min(shared, prompt - 1), max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
            )  # fmt: skip
            return predict(self.target, self.shape, self.precision, work).total.sequential

        return Interval(
            bound(prompt_tokens.low, completion_tokens.low) / SHARE.high,
            bound(prompt_tokens.expected, completion_tokens.expected) / SHARE.expected,
            bound(prompt_tokens.high, completion_tokens.high) / SHARE.low,
        )


def split_devices(names: Sequence[str]) -> tuple[str | None, list[Device]]:
    """A worker's own kind of device (``cpu``, ``cuda:0``), at most one, and the devices of the table.

    Raises:
        InvalidSpecError: two devices that the table does not have.
    """
    found = {name: find_device(name) for name in names}
    own = [name for name, device in found.items() if device is None]
    if len(own) > 1:
        raise InvalidSpecError(
            f"{own[0]!r} and {own[1]!r} are not in the table of devices: give one kind of worker at most, and any of "
            f"{', '.join(DEVICES)} (h200x8 for eight that work as one)",
            param="device",
        )
    return (own[0] if own else None), list({d.name: d for d in found.values() if d is not None}.values())


def roofline_speeds(
    devices: Sequence[Device], spec: JobSpec, settings: Settings, prices: Prices, nanos_per_hour: int | None
) -> list[RooflineSpeed]:
    """Speeds of a job on devices, ``nanos_per_hour`` each if given. The model's config is read; its weights are not, and nothing is downloaded.

    Raises:
        ModelError: the model is not on this machine.
        InvalidSpecError: it does not fit a device.
    """
    if not devices:
        return []
    from batchinfer.models.config_fields import config_fields

    shape = ModelShape.from_config(config_fields(spec.model))
    precision = PRECISIONS[spec.quantization.value]
    if spec.kv_cache_dtype.value == "int8":
        precision = replace(precision, kv="int8")
    speeds = []
    for device in devices:
        speed = RooflineSpeed(
            device, shape, precision, _nanos_per_hour(device, prices, nanos_per_hour),
            settings.max_num_seqs or GPU_SEQS, settings.max_num_batched_tokens or 8192,
        )  # fmt: skip
        speed.check()
        speeds.append(speed)
    return speeds


def device_speeds(
    names: Sequence[str], spec: JobSpec, settings: Settings, prices: Prices, nanos_per_hour: int | None
) -> tuple[str | None, list[RooflineSpeed]]:
    """A worker's own kind of device, if one is named, and the speeds of the others by the table.

    Raises what :func:`split_devices` and :func:`roofline_speeds` raise.
    """
    own, targets = split_devices(names)
    return own, roofline_speeds(targets, spec, settings, prices, nanos_per_hour)


def _nanos_per_hour(device: Device, prices: Prices, nanos_per_hour: int | None) -> int | None:
    """Of all its GPUs: what was given is of one, and so is the price book's where it has none for several."""
    if nanos_per_hour is not None:
        return nanos_per_hour * device.num_devices
    unknown = -1
    if (together := prices.device_rate(device.name, unknown)) != unknown:
        return together
    single = device.name.removesuffix(f"x{device.num_devices}") if device.num_devices > 1 else device.name
    one = prices.device_rate(single, unknown)
    return None if one == unknown else one * device.num_devices
