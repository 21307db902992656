"""``replay``: is an answer still the same, to the byte?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from batchinfer.cli import exit_codes
from batchinfer.cli.connect import load_settings, open_service, set_up_logs
from batchinfer.cli.console import one_line, print_json
from batchinfer.cli.exit_codes import ExitCode
from batchinfer.cli.options import json_option

if TYPE_CHECKING:
    from batchinfer_workers.replay import ReplayReport


@click.command("replay", epilog=exit_codes.epilog())
@click.argument("job_id", metavar="JOB")
@click.option("--row", "row_index", type=click.IntRange(0), required=True, help="Index of the row, 0 is the first.")
@json_option
def replay_command(job_id: str, row_index: int, as_json: bool) -> ExitCode:
    """Run one row of a job again, alone, and say whether the bytes are equal.

    The row runs here, with the job's stored spec, in an engine of its own. Compared are the answer's text, why it
    ended, its token counts, and whatever the job stores besides: token ids, log-probabilities, samples. It is refused
    where the input's file or the model's files are no longer those that the job ran on.
    """
    from batchinfer_workers.replay import replay_row

    settings = load_settings()
    set_up_logs(settings.log_level if "log_level" in settings.model_fields_set else "warning")
    with open_service(settings) as service:
        job = service.job(job_id)
        report = replay_row(
            job, service.ledger.shards(job.id), row_index, settings, tell=lambda text: click.echo(text, err=True)
        )
    if as_json:
        print_json({**asdict(report), "equal": report.equal})
    else:
        _print(report)
    return ExitCode.OK if report.equal else ExitCode.FAILED


def _print(report: ReplayReport) -> None:
    name = f"row {report.row_index} of {report.job_id}"
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    if report.equal:
        click.echo(f"equal: {name} ({', '.join(report.compared)})")
        return
    click.echo(f"NOT equal: {name}")
    for difference in report.differences:
        place = "" if difference.position is None else f" at {difference.position}"
        click.echo(f"  {difference.column}{place}")
        for side, value in (("stored", difference.stored), ("replayed", difference.replayed)):
            click.echo(f"    {side:<9}{one_line(json.dumps(value, ensure_ascii=False, default=str), 160)}")
