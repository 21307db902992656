"""``convert``: OpenAI batch files and Parquet, either from the other."""

from __future__ import annotations

import time

import click

from batchinfer.cli.console import count, print_fields, print_json
from batchinfer.cli.options import json_option
from batchinfer.errors import InvalidSpecError

_QUIET_SECONDS = 2.0
_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


class _Counter:
    """Says on stderr how many rows are done, from the third second on."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, rows: int) -> None:
        if time.monotonic() - self._last >= _QUIET_SECONDS:
            self._last = time.monotonic()
            click.echo(f"{count(rows)} rows", err=True)


@click.command("convert")
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@click.option("--model", metavar="NAME", help="Model that the requests or answers name, where SOURCE does not say.")
@click.option("--id-column", metavar="NAME", help="Column of ids (default: custom_id or id, else the row's number).")
@click.option(
    "--endpoint",
    type=click.Choice(_ENDPOINTS),
    default=_ENDPOINTS[0],
    show_default=True,
    help="Whose answers results become.",
)
@json_option
def convert_command(
    *, source: str, target: str, model: str | None, id_column: str | None, endpoint: str, as_json: bool
) -> None:
    r"""Convert between OpenAI batch files and Parquet, without loss.

    \b
    requests.jsonl   -> requests.parquet   request lines; a job reads either
    requests.parquet -> requests.jsonl     back again, values as they were written
    prompts.parquet  -> requests.jsonl     rows of prompts or messages (with --model)
    results.parquet  -> answers.jsonl      a job's results, and answers.errors.jsonl for error rows

    Paths may be URIs such as s3://bucket/name.
    """
    from batchinfer.dataset import convert
    from batchinfer.dataset.filesystem import Location
    from batchinfer.dataset.parquet_source import ParquetReader

    to_parquet = target.endswith(".parquet")
    if to_parquet == source.endswith(".parquet") or not (to_parquet or target.endswith(".jsonl")):
        raise InvalidSpecError("one of SOURCE and TARGET ends in .parquet, the other in .jsonl", param="target")
    here, there = Location.parse(source), Location.parse(target)
    written: dict[str, object] = {"target": target}
    if to_parquet:
        written["rows"] = convert.requests_to_parquet(here, there, _Counter())
    else:
        with ParquetReader(here) as reader:
            has_results, num_rows = convert.is_results(reader.schema), reader.num_rows
        if has_results:
            errors = target.removesuffix(".jsonl") + ".errors.jsonl"
            answers, failed = convert.results_to_lines(here, target, errors, endpoint=endpoint, model=model)
            written = {"target": target if answers else None, "errors": errors if failed else None, "rows": num_rows}
        else:
            written["rows"] = convert.parquet_to_requests(here, there, _Counter(), model=model, id_column=id_column)
    if as_json:
        print_json(written)
    else:
        print_fields([(name, str(value)) for name, value in written.items() if value is not None])
