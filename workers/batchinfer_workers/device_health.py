"""Whether this worker's device can be trusted with rows: no after a fault of the hardware, yes when it answers again."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from batchinfer.errors import DeviceUnhealthyError

if TYPE_CHECKING:
    from collections.abc import Callable

PROBE_SECONDS, MOST_PROBE_SECONDS = 30.0, 600.0
"""Time until a device is asked after a fault; twice as long after each further one, and after each answer that fails."""
PROBE_TIMEOUT_SECONDS = 120.0
_PROBE = """
import sys, torch
name = sys.argv[1]
devices = [name] if ":" in name else [f"cuda:{i}" for i in range(max(1, torch.cuda.device_count()))]
for device in devices:
    x = torch.ones(2048, 2048, device=device)
    y = x @ x
    torch.cuda.synchronize(device)
    assert bool((y == 2048).all()), f"{device} multiplies wrongly"
"""
_log = logging.getLogger(__name__)


def probe_device(device: str) -> str | None:
    """Multiply on the GPU (``auto`` and ``cuda``: on each) in a process of its own; what is wrong, None if nothing."""
    command = [sys.executable, "-c", _PROBE, device if device.startswith("cuda") else "cuda"]
    try:
        ended = subprocess.run(  # noqa: S603 -- our own interpreter and our own code
            command, check=False, capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"it does not answer within {PROBE_TIMEOUT_SECONDS:g} seconds"
    if ended.returncode == 0:
        return None
    said = ended.stderr.strip().splitlines()
    return said[-1] if said else f"the probe ended with exit code {ended.returncode}"


class DeviceHealth:
    """Knows of the device's last fault, and asks it again now and then. Thread-safe.

    ``probe`` says what is wrong with the device, None if nothing; it may take long, and runs in a thread of its own.
    """

    def __init__(self, probe: Callable[[], str | None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._probe = probe
        self._clock = clock
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._since: datetime | None = None
        self._wait = PROBE_SECONDS
        self._next = 0.0
        self._is_probing = False

    @property
    def reason(self) -> str | None:
        """What is wrong with the device; None while it is well."""
        return self._reason

    @property
    def seconds_ill(self) -> float:
        """How long it has not been well; 0 while it is."""
        with self._lock:
            return 0.0 if self._since is None else (datetime.now(UTC) - self._since).total_seconds()

    @property
    def fault(self) -> dict[str, str] | None:
        """What is wrong and since when, for the worker's record."""
        with self._lock:
            if self._reason is None or self._since is None:
                return None
            return {"reason": self._reason, "since": self._since.isoformat(timespec="seconds")}

    def note(self, error: Exception) -> None:
        """An engine ended: if its device is to blame, the worker takes no rows until the device answers again."""
        if not isinstance(error, DeviceUnhealthyError):
            return
        with self._lock:
            if self._reason is None:
                self._since = datetime.now(UTC)
                self._postpone()
                _log.error("%s; this worker takes no shards until the device answers a probe", error)
            self._reason = str(error)

    def look(self) -> None:
        """Ask the device, if it is time; returns at once."""
        with self._lock:
            if self._reason is None or self._is_probing or self._clock() < self._next:
                return
            self._is_probing = True
        threading.Thread(target=self._ask, name="device-probe", daemon=True).start()

    def _postpone(self) -> None:
        self._next = self._clock() + self._wait
        self._wait = min(2 * self._wait, MOST_PROBE_SECONDS)

    def _ask(self) -> None:
        try:
            wrong = self._probe()
        except Exception as error:  # noqa: BLE001 -- a probe that cannot run is no answer
            wrong = f"{type(error).__name__}: {error}"
        with self._lock:
            self._is_probing = False
            if wrong is None:
                self._reason = self._since = None
                _log.warning("the device answers again: this worker takes shards")
            else:
                self._postpone()
                _log.warning("the device is still not well: %s", wrong)
