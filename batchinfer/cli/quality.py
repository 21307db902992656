"""``quality``: what a precision does to people's own rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchinfer.cli.connect import load_settings, open_service, set_up_logs
from batchinfer.cli.console import count, one_line, print_fields, print_json, print_table
from batchinfer.cli.options import json_option
from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.paths import resolve_paths
from batchinfer.jobs.spec import Dtype, KVCacheDtype, Quantization, parse_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.jobs.drift import Drift

_PRECISION = ("model", "dtype", "quantization", "kv_cache_dtype", "max_model_len")


@click.command("quality")
@click.argument("target", metavar="JOB|FILE")
@click.option("--model", metavar="PATH_OR_ID", help="The model; by default the job's, and needed for a file.")
@click.option("--rows", type=click.IntRange(1, 1_000_000), default=100, show_default=True, help="Rows of the sample.")
@click.option(
    "--dtype", type=click.Choice([choice.value for choice in Dtype]), help="Precision to look at; by default the job's."
)
@click.option(
    "--quantization",
    type=click.Choice([choice.value for choice in Quantization]),
    help="Quantisation; by default the job's.",
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice([choice.value for choice in KVCacheDtype]),
    help="KV cache; by default the job's.",
)
@click.option("--max-model-len", type=int, help="Longest row in tokens; longer ones are cut.")
@click.option("--prompt-column", metavar="NAME", help="Of a file: column with the prompt text.")
@click.option("--messages-column", metavar="NAME", help="Of a file: column with chat messages.")
@click.option("--template", metavar="JINJA", help="Of a file: template over the row's columns.")
@click.option("--system", metavar="TEXT", help="Of a file: system message put before each row's messages.")
@json_option
def quality_command(target: str, rows: int, as_json: bool, **flags: Any) -> None:
    """Hold answers against the reference precision and say where they differ.

    A sample of the rows, at equal distances, is computed twice: in the job's precision (or that of the flags) and by
    transformers' own float32 model, token by token after the same text. Shown are the Kullback-Leibler divergence, how
    often the likeliest token is the same, and the perplexity of both. The answers are those of the job, or of a file's
    column `output`; a file without one has its prompts compared.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    settings = load_settings()
    set_up_logs(settings.log_level if "log_level" in settings.model_fields_set else "warning")
    with click.progressbar(length=rows, label="comparing", file=sys.stderr) as bar:
        drift, about = _check(target, rows, given, settings, bar.update)
    if as_json:
        print_json({**about, **drift.figures()})
    else:
        _print(drift, about)


def _check(
    target: str, rows: int, given: dict[str, Any], settings: Any, tell: Callable[[int], None]
) -> tuple[Drift, dict[str, Any]]:
    from batchinfer_workers.quality import check_file, check_job

    if target.startswith("job_") and "/" not in target:
        if strange := sorted(set(given) - set(_PRECISION)):
            raise InvalidSpecError(
                f"{strange[0]} is the job's; leave it out, or give its result file", param=strange[0]
            )
        with open_service(settings) as service:
            job = service.job(target)
            spec = parse_spec(job.spec.model_dump(mode="json", exclude_unset=True) | given)
            drift = check_job(service.ledger, job, spec, settings, count=rows, tell=tell)
    else:
        if "model" not in given:
            raise InvalidSpecError("a file has no model of its own: give --model", param="model")
        spec = resolve_paths(
            parse_spec({"inputs": [target], **given}), base=Path.cwd(), job_id="quality", must_exist=True
        )
        drift = check_file(spec, settings, count=rows, tell=tell)
    precision = {name: getattr(spec, name) for name in _PRECISION[:-1]}
    return drift, {"target": target, **precision}


def _print(drift: Drift, about: dict[str, Any]) -> None:
    found = drift.figures()
    print_fields(
        [
            ("compared", f"{count(found['tokens_compared'])} tokens of {count(found['rows_compared'])} rows"),
            (
                "precision",
                f"dtype {about['dtype']}, quantization {about['quantization']}, KV {about['kv_cache_dtype']}",
            ),
            ("KL", f"mean {found['kl_mean']:.6f}, 99 % below {found['kl_p99']:.5f}, largest {found['kl_max']:.4f}"),
            ("agreement", f"{100 * found['agreement']:.2f} % of the likeliest tokens"),
            ("perplexity", f"{found['perplexity']:.4f}, in the reference {found['reference_perplexity']:.4f}"),
        ]
    )
    if found["differences"]:
        click.echo()
        print_table(
            ("ROW", "POSITION", "KL", "TOKEN", "REFERENCE", "THE ANSWER HAS"),
            [
                (str(place["row_index"]), str(place["position"]), f"{place['kl']:.4f}",
                 *(one_line(repr(place.get(name, "")), 24) for name in ("token", "reference_token", "follows")))
                for place in found["differences"]
            ],
        )  # fmt: skip
