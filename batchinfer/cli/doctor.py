"""``doctor``: is this installation fit for work, and if not, how to mend it."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import click

from batchinfer.cli import checks_machine, checks_services
from batchinfer.cli.checks import Check, CheckStatus, fail
from batchinfer.cli.connect import load_settings
from batchinfer.cli.console import print_json
from batchinfer.cli.exit_codes import ExitCode
from batchinfer.cli.options import json_option
from batchinfer.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MARKS = {CheckStatus.OK: "ok  ", CheckStatus.WARNING: "warn", CheckStatus.FAILED: "FAIL"}


@click.command("doctor")
@click.option(
    "--storage", metavar="PATH_OR_URI", help="Also check that results can be written there, such as s3://bucket/x."
)
@click.option("--build", is_flag=True, help="First compile the CPU kernels into the cache, for every CPU they know.")
@json_option
def doctor_command(storage: str | None, build: bool, as_json: bool) -> ExitCode:
    """Check this installation and say how to mend what is wrong.

    The exit code is 1 if something fails; warnings do not count.
    """
    checks = [*(_built() if build else ()), *run_checks(storage)]
    is_healthy = all(check.status is not CheckStatus.FAILED for check in checks)
    if as_json:
        print_json({"healthy": is_healthy, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks)
    return ExitCode.OK if is_healthy else ExitCode.FAILED


def _built() -> Iterator[Check]:
    """Compiling takes up to a minute: each line shows that it goes on."""
    for check in checks_machine.build_kernels():
        click.echo(f"{check.name}: {check.detail}", err=True)
        yield check


def _print(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        click.echo(f"{_MARKS[check.status]}  {check.name:<{width}}  {check.detail}")
        if check.mend:
            click.echo(f"{'':6}{'':{width}}  -> {check.mend}")


def run_checks(storage: str | None = None) -> list[Check]:
    """Run all checks, the cheap ones first."""
    try:
        settings = load_settings()
    except UserError as error:
        return [fail("settings", str(error), "correct or unset the variable"), checks_machine.check_python()]
    checks: list[Callable[[], Check]] = [
        checks_machine.check_python,
        lambda: checks_services.check_settings(settings),
        lambda: checks_services.check_price(settings),
        lambda: checks_services.check_folder(settings.home),
        lambda: checks_services.check_broker(settings.broker_url),
        checks_machine.check_cpu,
        checks_machine.check_memory,
        checks_machine.check_compiler,
        checks_machine.check_torch,
        checks_machine.check_kernels,
        checks_machine.check_calibration,
        checks_machine.check_gpu,
        checks_machine.check_transformers,
        lambda: checks_machine.check_engine(settings.engine_factory),
        lambda: checks_machine.check_model_cache(settings),
    ]
    checks.append(lambda: checks_services.check_clock(settings))
    places = dict.fromkeys([settings.files_folder, *settings.output_roots, *([storage] if storage else [])])
    checks += [partial(checks_services.check_storage, place) for place in places]
    return [*checks_services.check_database(settings), *(check() for check in checks)]
