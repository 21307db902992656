"""``estimate`` and ``explain``: what a job would be, before it runs."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchinfer.cli.connect import is_remote, load_settings, open_client, open_service, server_options, set_up_logs
from batchinfer.cli.console import count, duration, print_fields, print_json, print_table, usd
from batchinfer.cli.device_speeds import device_speeds
from batchinfer.cli.options import build_spec, json_option, spec_options
from batchinfer.cli.price import amount
from batchinfer.errors import InvalidSpecError
from batchinfer.money import nanos_to_usd

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.jobs.foresight import Question
    from batchinfer.jobs.foresight_views import EstimateView, ExplainView
    from batchinfer.jobs.money_views import IntervalView, UsdIntervalView
    from batchinfer.jobs.service import JobService
    from batchinfer.jobs.spec import JobSpec
    from batchinfer.settings import Settings

BAR_WIDTH = 32
_WORKERS = click.option(
    "--workers", type=click.IntRange(1, 10_000), default=1, show_default=True, help="Workers that share the job."
)
_DEVICE = click.option("--device", metavar="DEVICE", help="Only past jobs of this kind of device count, and its price.")


@click.command("estimate")
@spec_options
@click.option("--limit", type=click.IntRange(1), help="Only the first rows of the input.")
@_WORKERS
@_DEVICE
@click.option("--sample", type=click.IntRange(1, 1_000_000), default=512, show_default=True, help="Rows to tokenise.")
@click.option("--probe", type=click.IntRange(1, 10_000), metavar="ROWS",
              help="Run so many sampled rows first, as a job of its own that costs what it costs.")  # fmt: skip
@server_options
@json_option
def estimate_command(
    workers: int, device: str | None, sample: int, probe: int | None, as_json: bool, **flags: Any
) -> None:
    """Say what a job would be: rows, tokens, time and cost, with intervals.

    A sample of the rows is tokenised. Answers' length, time and cost are learnt from past jobs of the same options and
    model; without any, --probe runs a few rows, or the bounds are all there is to say.
    """
    spec = build_spec(flags)
    if is_remote():
        if probe is not None:
            raise InvalidSpecError("--probe runs rows on this machine; submit a job with --limit to the server instead")
        with open_client() as client:
            view = client.estimate(spec, workers=workers, device=device, sample=sample, base=Path.cwd())
    else:
        view = _estimate_here(spec, workers, device, sample=sample, probe=probe)
    if as_json:
        print_json(view)
    else:
        _print_estimate(view)


def _estimate_here(spec: JobSpec, workers: int, device: str | None, *, sample: int, probe: int | None) -> EstimateView:
    settings = load_settings()
    question = _question(settings, workers, device, sample_rows=sample)
    with open_service(settings, shares_disk=True) as service:
        resolved, foresight = service.foresee(spec, base=Path.cwd())
        if probe is not None:
            _probe(settings, service, resolved, probe)
        return foresight.estimate(resolved, question)


@click.command("explain")
@spec_options
@click.option("--limit", type=click.IntRange(1), help="Only the first rows of the input.")
@_WORKERS
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="DEVICE",
    help="Again for several. a100, h100, h200, l40s, rtx4090, rtx5090, b200, mi300x, or h200x8 for eight that "
    "work as one: time and cost by the data sheet. Any other, such as cpu: only past jobs on it count.",
)
@click.option("--usd-per-hour", metavar="USD", help="Price of one such GPU, in place of the price book's.")
@click.option("--rows", "max_rows", type=click.IntRange(1), metavar="ROWS", help="Look at the first ROWS only.")
@click.option("--kv-blocks", type=click.IntRange(1), default=4096, show_default=True, help="KV cache that is modelled.")
@server_options
@json_option
def explain_command(
    *, workers: int, devices: tuple[str, ...], usd_per_hour: str | None, max_rows: int | None, kv_blocks: int,
    as_json: bool, **flags: Any,
) -> None:  # fmt: skip
    """Show an input as the engine will see it, and what would make it cheaper.

    Every row is tokenised: prefixes that rows share, what the KV cache will have of them, copies, lengths, shards, time
    and cost for several workers, and advice with what each piece would save. For a GPU named by --device, time is what
    its data sheet allows, less what engines usually leave: a prediction, marked as such, for jobs not yet run on one.
    A server looks at the first rows only (2,000 unless --rows says otherwise), and the model must be on it.
    """
    spec = build_spec(flags)
    price = None if usd_per_hour is None else amount("--usd-per-hour", usd_per_hour)
    if is_remote():
        usd = None if price is None else nanos_to_usd(price)
        with open_client() as client:
            view = client.explain(
                spec, workers=workers, device=devices, usd_per_hour=usd, rows=max_rows, kv_blocks=kv_blocks,
                base=Path.cwd(),
            )  # fmt: skip
    else:
        view = _explain_here(spec, workers, devices, price, max_rows=max_rows, kv_blocks=kv_blocks)
    if as_json:
        print_json(view)
    else:
        _print_explanation(view)


def _explain_here(
    spec: JobSpec,
    workers: int,
    devices: tuple[str, ...],
    nanos_per_hour: int | None,
    *,
    max_rows: int | None,
    kv_blocks: int,
) -> ExplainView:
    settings = load_settings()
    with open_service(settings, shares_disk=True) as service, _progress() as on_progress:
        resolved, foresight = service.foresee(spec, base=Path.cwd())
        device, speeds = device_speeds(devices, resolved, settings, service.ledger, nanos_per_hour)
        question = _question(settings, workers, device, max_rows=max_rows, kv_blocks=kv_blocks)
        return foresight.explain(resolved, question, speeds=speeds, on_progress=on_progress)


def _question(settings: Settings, workers: int, device: str | None, **more: Any) -> Question:
    from batchinfer.jobs.foresight import Question

    return Question(usd_per_hour=settings.usd_per_hour, num_workers=workers, device=device or settings.device, **more)


class _progress:  # noqa: N801 -- used as a word
    """A line on a terminal's stderr that says how far it is; nothing elsewhere."""

    def __enter__(self) -> Callable[[int, int], None]:
        self._is_shown = False
        return self._show if sys.stderr.isatty() else lambda _done, _total: None

    def _show(self, done: int, total: int) -> None:
        self._is_shown = True
        click.echo(f"\rlooked at {done:,} of {total:,} rows", err=True, nl=False)

    def __exit__(self, *_error: object) -> None:
        if self._is_shown:
            click.echo("\r\x1b[K", err=True, nl=False)


def _probe(settings: Settings, service: JobService, spec: JobSpec, num_rows: int) -> None:
    """Run sampled rows as a job of its own; the ledger then knows one more past job of this spec."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from batchinfer.dataset.source import InputSource
    from batchinfer.jobs.survey import sample_ranges
    from batchinfer_workers.embedded import run_embedded

    set_up_logs(settings.log_level if "log_level" in settings.model_fields_set else "warning")
    source = InputSource.open(spec.inputs, spec.limit)
    if source.files and source.files[0].format == "jsonl":
        raise InvalidSpecError("--probe reads Parquet only; run a job with --limit instead", param="probe")
    with tempfile.TemporaryDirectory(prefix="batchinfer-probe-") as folder:
        path = str(Path(folder) / "probe.parquet")
        with pq.ParquetWriter(path, source.schema) as writer:
            for start, end in sample_ranges(source.num_rows, num_rows):
                for _, batch in source.iter_batches(start, end):
                    writer.write_table(pa.Table.from_batches([batch]))
        changes = {"inputs": (path,), "output": str(Path(folder) / "out"), "limit": None, "name": "probe",
                   "deadline": None, "id_column": None, "reuse_results": spec.reuse_results}  # fmt: skip
        view, _ = service.submit(spec.model_copy(update=changes), base=None)
        job = run_embedded(settings, view.id)
    click.echo(f"probe {job.id}: {job.counts.succeeded} of {job.counts.total} rows succeeded", err=True)


# -- for people -----------------------------------------------------------------------------------------------------------
def _tokens(value: IntervalView) -> str:
    return _range(f"{value.expected:,.0f}", f"{value.low:,.0f}", f"{value.high:,.0f}")


def _time(value: IntervalView | None) -> str:
    if value is None:
        return "unknown: no past job of this model; --probe 32 runs some rows"
    return _range(duration(value.expected), duration(value.low), duration(value.high))


def _money(value: UsdIntervalView | None) -> str:
    return "unknown" if value is None else _range(usd(value.expected), usd(value.low), usd(value.high))


def _range(expected: str, low: str, high: str) -> str:
    return expected if low == high else f"{expected}  ({low} to {high})"


def _estimate_fields(view: EstimateView) -> list[tuple[str, str]]:
    looked = "every row" if view.is_whole else f"{count(view.sampled_rows)} rows"
    errors = ", ".join(f"{code} {count(number)}" for code, number in sorted(view.errors.items()))
    workers = "1 worker" if view.num_workers == 1 else f"{view.num_workers} workers"
    return [
        ("rows", f"{count(view.num_rows)}  ({looked} tokenised)"),
        ("cannot run", errors),
        ("prompt tokens", _tokens(view.prompt_tokens)),
        ("answer tokens", f"{_tokens(view.completion_tokens)}  from {view.length_basis}"),
        ("device time", _time(view.device_seconds)),
        ("time", f"{_time(view.seconds)}  on {workers}" if view.seconds else ""),
        ("cost", f"{_money(view.cost_usd)}  at ${view.usd_per_hour.normalize():f} an hour"),
        ("list price", _money(view.list_usd) if view.list_usd else ""),
        ("time and cost from", view.speed_basis if view.seconds else ""),
        ("intervals", f"hold the outcome {view.confidence:.0%} of the time"),
    ]


def _print_estimate(view: EstimateView) -> None:
    print_fields(_estimate_fields(view))
    for warning in view.warnings:
        click.echo(f"note: {warning}", err=True)


def _print_explanation(view: ExplainView) -> None:
    exact = "" if view.shared_is_exact else "at least "
    unique = "" if view.unique_is_exact else "about "
    shards = view.shards
    print_fields(
        [
            *_estimate_fields(view.estimate),
            ("looked at", f"{count(view.looked_at)} rows" if view.looked_at < view.num_rows else ""),
            ("unique rows", f"{unique}{count(view.unique_rows)}"),
            ("shared prefixes", f"{exact}{view.shared_share:.0%} of the prompt tokens"),
            ("KV cache hits", f"{view.expected_hit_rate:.0%} expected, with {count(view.kv_blocks)} blocks"),
            ("shards", f"{count(shards.num_shards)} of {count(shards.rows_min)} to {count(shards.rows_max)} rows"),
        ]
    )
    _print_chart(view)
    if view.groups:
        click.echo("\nrows that begin alike")
        rows = [(count(g.num_rows), count(g.num_tokens), count(g.saved_tokens), str(g.first_row)) for g in view.groups]
        print_table(("ROWS", "TOKENS", "SAVED", "FOR EXAMPLE ROW"), rows)
    if view.makespans:
        click.echo("\ntime and cost")
        makespans = [
            (m.device or "unknown", str(m.num_workers), _time(m.seconds), _money(m.cost_usd), m.basis)
            for m in view.makespans
        ]
        print_table(("DEVICE", "WORKERS", "TIME", "COST", "FROM"), makespans)
    for advice in view.advice:
        click.echo(f"\n- {advice.text}")


def _print_chart(view: ExplainView) -> None:
    """Rows by prompt length, a bar a power of two."""
    most = max((bucket.num_rows for bucket in view.histogram), default=0)
    if not most:
        return
    click.echo(
        f"\nprompt tokens: {view.prompt_tokens_mean:,.0f} on the average, {count(view.prompt_tokens_max)} at most"
    )
    names = [f"{bucket.low:,}-{bucket.high:,}" for bucket in view.histogram]
    width = max(map(len, names))
    for name, bucket in zip(names, view.histogram, strict=True):
        bar = "█" * round(BAR_WIDTH * bucket.num_rows / most) or ("▏" if bucket.num_rows else "")
        click.echo(f"{name:>{width}}  {bar} {count(bucket.num_rows)}")
