"""``price``: the price book."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

import click

from batchinfer.cli.connect import open_door, server_options
from batchinfer.cli.console import print_fields, print_json, print_table
from batchinfer.cli.options import json_option
from batchinfer.errors import InvalidSpecError, NotFoundError
from batchinfer.money import nanos_to_usd, usd_to_nanos

if TYPE_CHECKING:
    from batchinfer.jobs.money_views import ModelPriceView


@click.group("price")
def price_command() -> None:
    """Set and show list prices of models and hourly prices of devices.

    A list price is what tokens cost by a price list, beside the metered cost of the device. It counts for rows that
    run after it was set; the past keeps its price.
    """


def amount(flag: str, text: str) -> int:
    """Read ``0.15`` or ``$1,000`` as nano-dollars. Raises InvalidSpecError."""
    try:
        usd = Decimal(text.strip().removeprefix("$").replace(",", ""))
    except InvalidOperation:
        usd = Decimal(-1)
    if not usd.is_finite() or usd < 0:
        raise InvalidSpecError(f"{flag} {text!r} is not an amount in dollars, such as {flag} 0.15")
    return usd_to_nanos(usd)


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidSpecError(f"--valid-from {text!r} is no ISO 8601 time, such as 2026-12-01T00:00Z") from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


_VALID_FROM = click.option("--valid-from", metavar="TIME", help="ISO 8601, in UTC if it has no zone (default: now).")


@price_command.command("set")
@click.argument("model", metavar="MODEL")
@click.option("--input", "input_usd", required=True, metavar="USD", help="Per million prompt tokens.")
@click.option(
    "--cached-input", "cached_usd", metavar="USD", help="Per million cached prompt tokens (default: as --input)."
)
@click.option("--output", "output_usd", required=True, metavar="USD", help="Per million generated tokens.")
@_VALID_FROM
@server_options
@json_option
def set_command(  # noqa: PLR0917 -- click passes them by name
    model: str, input_usd: str, cached_usd: str | None, output_usd: str, valid_from: str | None, as_json: bool
) -> None:
    """Set a model's list price from now on. MODEL is written as `batchinfer status` shows it."""
    given, cached, output = (
        nanos_to_usd(amount(flag, text))
        for flag, text in (
            ("--input", input_usd),
            ("--cached-input", cached_usd or input_usd),
            ("--output", output_usd),
        )
    )
    with open_door() as door:
        view = door.prices.set(
            model, input_usd=given, cached_input_usd=cached, output_usd=output, valid_from=_moment(valid_from)
        )
    _print(view, as_json)


@price_command.command("set-device")
@click.argument("device", metavar="DEVICE")
@click.option("--per-hour", required=True, metavar="USD", help="What an hour of it costs.")
@_VALID_FROM
@server_options
@json_option
def set_device_command(device: str, per_hour: str, valid_from: str | None, as_json: bool) -> None:
    """Set what an hour of a kind of device costs from now on.

    DEVICE is written as `batchinfer workers` shows it; `cuda` stands for `cuda:0`, `cuda:1` and so on. It counts for
    shards that are leased after it was set, in place of the worker's own BATCHINFER_USD_PER_HOUR.
    """
    nanos = amount("--per-hour", per_hour)
    with open_door() as door:
        view = door.prices.set_device(device, nanos_to_usd(nanos), valid_from=_moment(valid_from))
    if as_json:
        print_json(view)
    else:
        click.echo(f"{device} costs ${view.usd_per_hour.normalize():f} an hour from {view.valid_from.isoformat()}")


@price_command.command("show")
@click.argument("model", metavar="MODEL")
@server_options
@json_option
def show_command(model: str, as_json: bool) -> None:
    """Show a model's list price now."""
    with open_door() as door:
        book = door.prices.list(model=model)
    now = datetime.now(UTC)
    price = next((price for price in book.models if price.valid_from <= now), None)
    if price is None:
        raise NotFoundError(
            f"no list price for {model}; set one with: batchinfer price set {model} --input USD --output USD"
        )
    _print(price, as_json)


@price_command.command("ls")
@click.option("--model", metavar="MODEL", help="Only this model's.")
@click.option("--device", metavar="DEVICE", help="Only this device's.")
@server_options
@json_option
def ls_command(model: str | None, device: str | None, as_json: bool) -> None:
    """List every price that was set, the latest of each model and device first."""
    with open_door() as door:
        book = door.prices.list(model=model, device=device)
    if as_json:
        print_json(book)
        return
    rows = [
        (
            p.model,
            _when(p.valid_from),
            *(f"{usd.normalize():f}" for usd in (p.input_usd, p.cached_input_usd, p.output_usd)),
        )
        for p in book.models
    ]
    if rows:
        print_table(("MODEL", "VALID FROM", "INPUT", "CACHED INPUT", "OUTPUT"), rows)
    devices = [(p.device, _when(p.valid_from), f"{p.usd_per_hour.normalize():f}") for p in book.devices]
    if devices:
        print_table(("DEVICE", "VALID FROM", "PER HOUR"), devices)
    if not rows and not devices:
        click.echo("no price is set: `batchinfer price set MODEL --input USD --output USD`", err=True)


def _when(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")


def _print(price: ModelPriceView, as_json: bool) -> None:
    amounts = {"input": price.input_usd, "cached_input": price.cached_input_usd, "output": price.output_usd}
    if as_json:
        print_json(
            {"model": price.model, "usd_per_million_tokens": {name: f"{usd:f}" for name, usd in amounts.items()}}
        )
        return
    per_million = [
        (name.replace("_", " "), f"${usd.normalize():f} per million tokens") for name, usd in amounts.items()
    ]
    print_fields([("model", price.model), *per_million])
