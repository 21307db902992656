"""``batchinfer worker --gpus``: a worker process for each GPU or group of them, each of which sees no other."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchinfer.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
RESTART_SECONDS = 5.0
"""A worker that failed is started again after so long."""
WATCH_SECONDS = 0.2
USAGE_ERROR = 2
_PROGRAM = (sys.executable, "-c", "from batchinfer.cli.main import main; main()", "worker")
_log = logging.getLogger(__name__)


def count_gpus() -> int:
    """GPUs that this process sees."""
    import torch  # noqa: PLC0415 -- seconds to import

    return torch.cuda.device_count()


def gpu_groups(
    wanted: str,
    group_size: int,
    *,
    environment: Mapping[str, str] = os.environ,
    count: Callable[[], int] = count_gpus,
) -> list[str]:
    """What each worker's ``CUDA_VISIBLE_DEVICES`` is: neighbours of the list, ``group_size`` a worker.

    ``all`` are those that are visible; else names as that variable has them, with commas between.

    Raises:
        UserError: there are none, one is named twice, or they do not divide into such groups.
    """
    if wanted.strip().lower() == "all":
        visible = environment.get(VISIBLE)
        names = _names(visible) if visible is not None else [str(index) for index in range(count())]
    else:
        names = _names(wanted)
    if not names:
        raise UserError(f"--gpus {wanted}: no GPU is visible; leave it out to work on the CPU", param="gpus")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--gpus names GPU {twice} twice; each worker needs its own", param="gpus")
    if len(names) % group_size:
        raise UserError(
            f"{len(names)} GPUs do not divide into groups of {group_size}; "
            "name as many with --gpus, or choose another --tensor-parallel-size",
            param="gpus",
        )
    return [",".join(names[first : first + group_size]) for first in range(0, len(names), group_size)]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def run_gpu_workers(
    groups: Sequence[str],
    arguments: Sequence[str],
    *,
    metrics_port: int = 0,
    program: Sequence[str] = _PROGRAM,
    restart_seconds: float = RESTART_SECONDS,
) -> int:
    """Run a worker with these arguments for each group of GPUs until SIGTERM or SIGINT, which they get too.

    A worker that fails is started again; one that says that it was started wrongly ends all. Workers answer Prometheus
    on ``metrics_port`` and the ports above it. Returns the exit code: the first that is not 0. Call it in the main thread.
    """
    workers = [
        _Worker(visible, [*program, *arguments], metrics_port + place if metrics_port else 0, restart_seconds)
        for place, visible in enumerate(groups)
    ]
    signals: list[int] = []
    # the handler only notes them: it may run in the middle of a worker's start, which would not hear of it
    old = {
        number: signal.signal(number, lambda number, _frame: signals.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        while any([worker.watch(signals) for worker in workers]):  # noqa: C419 -- each is looked at
            if not signals and any(worker.code == USAGE_ERROR for worker in workers):
                signals.append(signal.SIGTERM)
            time.sleep(WATCH_SECONDS)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return next((worker.code for worker in workers if worker.code), os.EX_OK)


@dataclass
class _Worker:
    """One worker's process, whichever it is at the moment."""

    visible: str
    command: Sequence[str]
    metrics_port: int
    restart_seconds: float
    process: subprocess.Popen[bytes] | None = None
    code: int = 0
    has_run: bool = False
    starts_at: float = field(default_factory=time.monotonic)
    num_sent: int = 0
    """Signals that the process got."""

    def watch(self, signals: Sequence[int]) -> bool:
        """Start the process where it is due, pass all signals on, note its end; whether it runs or will run again."""
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                for number in signals[self.num_sent :]:
                    self.process.send_signal(number)
                    self.num_sent += 1
                return True
            self.process = None
            self.code = code if code >= 0 else 128 - code
            self.starts_at = time.monotonic() + self.restart_seconds
            _log.info("the worker on GPU %s ended with code %d", self.visible, self.code)
        if signals or self.code == USAGE_ERROR or (self.code == 0 and self.has_run):
            return False
        if time.monotonic() >= self.starts_at:
            self._start()
        return True

    def _start(self) -> None:
        if self.has_run:
            _log.warning("the worker on GPU %s is started again", self.visible)
        environment = {**os.environ, VISIBLE: self.visible}
        if self.metrics_port:
            environment["BATCHINFER_METRICS_PORT"] = str(self.metrics_port)
        self.has_run, self.code = True, 0
        # a session of its own: a terminal's Ctrl-C must not come to it twice, which would end it on the spot
        self.process = subprocess.Popen(self.command, env=environment, start_new_session=True)  # noqa: S603 -- our own program
