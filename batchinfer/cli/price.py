"""``price``: the price book, from which list prices come."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

import click

from batchinfer.cli.connect import open_service
from batchinfer.cli.console import print_fields, print_json
from batchinfer.cli.options import json_option
from batchinfer.errors import InvalidSpecError, NotFoundError
from batchinfer.money import Price, nanos_to_usd, usd_to_nanos


@click.group("price")
def price_command() -> None:
    """Set and show list prices of models.

    A list price is what tokens cost by a price list, beside the metered cost of the device. It counts for rows that
    run after it was set; the past keeps its price.
    """


def _amount(flag: str, text: str) -> int:
    try:
        usd = Decimal(text.strip().removeprefix("$"))
    except InvalidOperation:
        usd = Decimal(-1)
    if not usd.is_finite() or usd < 0:
        raise InvalidSpecError(f"{flag} {text!r} is not an amount in dollars, such as {flag} 0.15")
    return usd_to_nanos(usd)


@price_command.command("set")
@click.argument("model", metavar="MODEL")
@click.option("--input", "input_usd", required=True, metavar="USD", help="Per million prompt tokens.")
@click.option(
    "--cached-input", "cached_usd", metavar="USD", help="Per million cached prompt tokens (default: as --input)."
)
@click.option("--output", "output_usd", required=True, metavar="USD", help="Per million generated tokens.")
@json_option
def set_command(model: str, input_usd: str, cached_usd: str | None, output_usd: str, as_json: bool) -> None:
    """Set a model's list price from now on. MODEL is written as `batchinfer status` shows it."""
    price = Price(
        _amount("--input", input_usd),
        _amount("--cached-input", cached_usd or input_usd),
        _amount("--output", output_usd),
    )
    with open_service() as service:
        service.ledger.set_price(model, price)
    _print(model, price, as_json)


@price_command.command("show")
@click.argument("model", metavar="MODEL")
@json_option
def show_command(model: str, as_json: bool) -> None:
    """Show a model's list price now."""
    with open_service() as service:
        price = service.ledger.price_at(model)
    if price is None:
        raise NotFoundError(
            f"no list price for {model}; set one with: batchinfer price set {model} --input USD --output USD"
        )
    _print(model, price, as_json)


def _print(model: str, price: Price, as_json: bool) -> None:
    amounts = {
        "input": nanos_to_usd(price.input_nanos),
        "cached_input": nanos_to_usd(price.cached_input_nanos),
        "output": nanos_to_usd(price.output_nanos),
    }
    if as_json:
        print_json({"model": model, "usd_per_million_tokens": {name: f"{usd:f}" for name, usd in amounts.items()}})
        return
    per_million = [
        (name.replace("_", " "), f"${usd.normalize():f} per million tokens") for name, usd in amounts.items()
    ]
    print_fields([("model", model), *per_million])
