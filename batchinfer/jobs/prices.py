"""The price book: list prices of models and hourly prices of devices, each from a moment on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, insert, select

from batchinfer.db.tables import DevicePriceRow, PriceRow, Worker
from batchinfer.errors import NotFoundError
from batchinfer.jobs.ledger_base import LedgerBase
from batchinfer.money import Price

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class ModelPrice:
    """A model's list price from a moment on."""

    model: str
    valid_from: datetime
    price: Price


@dataclass(frozen=True, slots=True)
class DevicePrice:
    """What an hour of a kind of device costs from a moment on."""

    device: str
    valid_from: datetime
    nanos_per_hour: int


class Prices(LedgerBase):
    """Set and look up prices. A price that was set is never changed, except at the very same moment."""

    def set_price(self, model: str, price: Price, *, valid_from: datetime | None = None) -> ModelPrice:
        """Set a model's list price from a moment on (default: now)."""

        def work(connection: Connection, now: datetime) -> ModelPrice:
            moment, row = valid_from or now, PriceRow
            connection.execute(delete(row).where(row.model == model, row.valid_from == moment))
            connection.execute(
                insert(row).values(
                    model=model, valid_from=moment, input_nanos=price.input_nanos,
                    cached_input_nanos=price.cached_input_nanos, output_nanos=price.output_nanos,
                )
            )  # fmt: skip
            return ModelPrice(model, moment, price)

        return self._write(work)

    def price_at(self, model: str, at: datetime | None = None) -> Price | None:
        """The list price in force at a moment (default: now), or None."""

        def work(connection: Connection, now: datetime) -> Price | None:
            row = PriceRow
            query = select(row).where(row.model == model, row.valid_from <= (at or now))
            found = connection.execute(query.order_by(row.valid_from.desc()).limit(1)).one_or_none()
            return None if found is None else _model_price(found).price

        return self._read(work)

    def set_device_price(self, device: str, nanos_per_hour: int, *, valid_from: datetime | None = None) -> DevicePrice:
        """Set what an hour of a device costs from a moment on (default: now). It counts for leases given after it."""

        def work(connection: Connection, now: datetime) -> DevicePrice:
            moment, row = valid_from or now, DevicePriceRow
            connection.execute(delete(row).where(row.device == device, row.valid_from == moment))
            connection.execute(insert(row).values(device=device, valid_from=moment, nanos_per_hour=nanos_per_hour))
            return DevicePrice(device, moment, nanos_per_hour)

        return self._write(work)

    def worker_price(self, worker_id: str) -> int:
        """Nano-dollars an hour of a worker now: the price book's for its device, else its own. Raises NotFoundError."""
        return self._read(lambda connection, now: hourly_price(connection, worker_id, now))

    def device_rate(self, device: str | None, otherwise: int) -> int:
        """Nano-dollars an hour of a kind of device now; ``otherwise`` where the price book has none."""
        if device is None:
            return otherwise
        return self._read(lambda connection, now: _book_price(connection, device, now, otherwise))

    def model_prices(self, *, model: str | None = None, limit: int = 1000) -> list[ModelPrice]:
        """Every list price ever set, by model, the latest first."""

        def work(connection: Connection, _now: datetime) -> list[ModelPrice]:
            query = select(PriceRow).order_by(PriceRow.model, PriceRow.valid_from.desc()).limit(limit)
            if model is not None:
                query = query.where(PriceRow.model == model)
            return [_model_price(row) for row in connection.execute(query)]

        return self._read(work)

    def device_prices(self, *, device: str | None = None, limit: int = 1000) -> list[DevicePrice]:
        """Every hourly price ever set, by device, the latest first."""

        def work(connection: Connection, _now: datetime) -> list[DevicePrice]:
            query = (
                select(DevicePriceRow).order_by(DevicePriceRow.device, DevicePriceRow.valid_from.desc()).limit(limit)
            )
            if device is not None:
                query = query.where(DevicePriceRow.device == device)
            return [DevicePrice(row.device, row.valid_from, row.nanos_per_hour) for row in connection.execute(query)]

        return self._read(work)


def hourly_price(connection: Connection, worker_id: str, now: datetime) -> int:
    """Nano-dollars an hour of a worker: the price book's for its kind of device, else what it registered with.

    Raises:
        NotFoundError: no such worker.
    """
    worker = connection.execute(select(Worker).where(Worker.id == worker_id)).one_or_none()
    if worker is None:
        raise NotFoundError(f"worker {worker_id} is not registered", param="worker_id")
    return _book_price(connection, worker.device, now, int(worker.nanos_per_hour))


def _book_price(connection: Connection, device: str, now: datetime, otherwise: int) -> int:
    row = DevicePriceRow
    kinds = device_kinds(device)
    query = select(row).where(row.device.in_(kinds), row.valid_from <= now).order_by(row.valid_from.desc())
    latest: dict[str, int] = {}
    for found in connection.execute(query):
        latest.setdefault(found.device, found.nanos_per_hour)
    return next((latest[kind] for kind in kinds if kind in latest), otherwise)


def device_kinds(device: str) -> list[str]:
    """Names under which a device's price may stand, the closest first: ``cuda:1``, then ``cuda``."""
    return list(dict.fromkeys((device, device.partition(":")[0])))


def _model_price(row: Any) -> ModelPrice:
    price = Price(row.input_nanos, row.cached_input_nanos, row.output_nanos)
    return ModelPrice(row.model, row.valid_from, price)
