"""``worker``: work on jobs until stopped."""

from __future__ import annotations

from typing import Any

import click

from batchinfer.cli.connect import load_settings, log_format_option, set_up_logs
from batchinfer.cli.machine_options import MACHINE_SETTINGS, machine_options


@click.command("worker")
@click.option(
    "--model", "models", multiple=True, metavar="PATH_OR_ID", help="Only jobs of this model; may be repeated."
)
@click.option("--pool", "pools", multiple=True, metavar="NAME", help="A pool that it is in; may be repeated.")
@click.option(
    "--device-kind",
    "device_kinds",
    multiple=True,
    metavar="NAME",
    help="A name of its hardware that jobs may ask for; may be repeated.",
)
@click.option("--ticker-only", is_flag=True, help="Run no rows; only keep leases, deadlines and wake-ups going.")
@click.option(
    "--gpus",
    metavar="all|0,1,...",
    help="Start a worker process for each of these GPUs, or for each --tensor-parallel-size of them.",
)
@machine_options
@log_format_option
def worker_command(
    models: tuple[str, ...],
    pools: tuple[str, ...],
    device_kinds: tuple[str, ...],
    ticker_only: bool,
    log_format: str | None,
    **machine: Any,
) -> int:
    """Work on jobs until stopped.

    SIGTERM or Ctrl-C drains: finished rows are committed, the rest goes back at once, and the process ends within
    seconds. A second signal ends it on the spot; leases then expire by themselves. With --gpus one command runs a worker
    a GPU, each of which sees its own alone; without, choose GPUs with CUDA_VISIBLE_DEVICES.
    """
    from batchinfer_workers.gpu_workers import gpu_groups, run_gpu_workers
    from batchinfer_workers.worker import run_worker

    settings = load_settings(
        log_format=log_format,
        pools=pools or None,
        device_kinds=device_kinds or None,
        **{name: machine[name] for name in MACHINE_SETTINGS},
    )
    set_up_logs(settings.log_level, settings.log_format)
    if machine["gpus"] is not None:
        groups = gpu_groups(machine["gpus"], settings.tensor_parallel_size or 1)
        return run_gpu_workers(groups, _arguments(), metrics_port=settings.metrics_port)
    return run_worker(settings, models=models or None, ticker_only=ticker_only)


def _arguments() -> list[str]:
    """The flags that this command was given, but for ``--gpus``."""
    context = click.get_current_context()
    found = []
    for option in context.command.params:
        value = context.params[str(option.name)]
        if option.name == "gpus" or value is None or (value is False and not option.secondary_opts):
            continue
        if isinstance(value, bool):
            found.append(option.opts[0] if value else option.secondary_opts[0])
        else:
            for part in value if isinstance(value, tuple) else (value,):
                found += [option.opts[0], str(part)]
    return found
