"""``doctor``: is this installation fit for work, and if not, how to mend it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from batchinfer.cli.checkup import CheckStatus, run_checks
from batchinfer.cli.console import print_json
from batchinfer.cli.exit_codes import ExitCode
from batchinfer.cli.options import json_option

if TYPE_CHECKING:
    from batchinfer.cli.checkup import Check

_MARKS = {CheckStatus.OK: "ok  ", CheckStatus.WARNING: "warn", CheckStatus.FAILED: "FAIL"}


@click.command("doctor")
@click.option(
    "--storage", metavar="PATH_OR_URI", help="Also check that results can be written there, such as s3://bucket/x."
)
@json_option
def doctor_command(storage: str | None, as_json: bool) -> ExitCode:
    """Check this installation and say how to mend what is wrong.

    The exit code is 1 if something fails; warnings do not count.
    """
    checks = run_checks(storage)
    is_healthy = all(check.status is not CheckStatus.FAILED for check in checks)
    if as_json:
        print_json({"healthy": is_healthy, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks)
    return ExitCode.OK if is_healthy else ExitCode.FAILED


def _print(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        click.echo(f"{_MARKS[check.status]}  {check.name:<{width}}  {check.detail}")
        if check.mend:
            click.echo(f"{'':6}{'':{width}}  -> {check.mend}")
