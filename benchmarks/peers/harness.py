"""The measurement itself: every contender in turn on every workload, round after round."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.machine import QUIET_PERCENT
from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.workloads import Item, make

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.peers.catalogue import Contender

WARM_UP = [Item(list(range(100, 108)), 4), Item(list(range(200, 212)), 4)]
"""Run once after loading, untimed: first calls build what later ones reuse."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. ``scale`` is the share of each workload's rows; timeouts are in seconds a run and a load."""

    workloads: tuple[str, ...]
    rounds: int
    scale: float = 1.0
    timeout_s: float = 240.0
    load_timeout_s: float = 300.0


class Harness:
    """Keeps each contender loaded and lets one at a time work, so that all meet the same minutes of the machine.

    ``describe`` and ``runs`` grow as it goes; a contender that fails a workload is not asked for it again, and one
    that ended is started anew for the next.
    """

    def __init__(self, contenders: list[Contender], plan: Plan, say: Callable[[str], None]) -> None:
        self.runs: list[dict[str, Any]] = []
        self.describe: dict[str, dict[str, Any]] = {one.name: _description(one) for one in contenders}
        self._contenders = contenders
        self._plan = plan
        self._say = say
        self._processes: dict[str, PeerProcess] = {}
        self._given_up: dict[tuple[str, str], str] = {}

    def run(self) -> None:
        """Run the whole plan; failures become entries, never exceptions."""
        with ExitStack() as stack:
            stack.callback(self._close_all)
            for contender in self._contenders:
                self._start(contender)
            for turn, workload, contender in self._turns():
                self._measure(turn, workload, contender)

    def _turns(self) -> Iterator[tuple[int, str, Contender]]:
        for turn in range(self._plan.rounds):
            for workload in self._plan.workloads:
                for contender in self._contenders:
                    yield turn, workload, contender

    def _start(self, contender: Contender) -> PeerProcess | None:
        """Start and warm one up; None, and a note of why, where that is impossible."""
        about = self.describe[contender.name]
        if contender.missing or about.get("error"):
            return None
        process = PeerProcess(contender, timeout_s=self._plan.timeout_s, load_timeout_s=self._plan.load_timeout_s)
        try:
            process.load()
            process.run(WARM_UP)
        except PeerError as error:
            about["error"] = f"does not start: {error}"
            self._say(f"{contender.name}: {about['error']}\n{process.log_tail()}")
            process.close()
            return None
        about |= {"versions": process.versions, "load_seconds": process.load_seconds}
        self._processes[contender.name] = process
        self._say(f"{contender.name}: loaded in {process.load_seconds:.1f} s")
        return process

    def _measure(self, turn: int, workload: str, contender: Contender) -> None:
        name = contender.name
        process = self._processes.get(name)
        if (name, workload) in self._given_up or (process is None and (process := self._start(contender)) is None):
            return
        entry: dict[str, Any] = {"engine": name, "workload": workload, "round": turn}
        try:
            measured = process.run(make(workload, self._plan.scale, turn))
        except PeerError as error:
            entry["error"] = self._given_up[name, workload] = str(error)
            self._say(f"{workload}  {name:<26}  failed: {error}")
            process.close()
            del self._processes[name]
        else:
            entry |= {
                "seconds": round(measured.seconds, 3),
                "tokens": measured.num_tokens,
                "tokens_per_second": round(measured.num_tokens / measured.seconds, 1),
                "others_percent": measured.others_percent,
                "is_disturbed": measured.others_percent > QUIET_PERCENT,
            }
            self._say(
                f"{workload}  {name:<26}{entry['tokens_per_second']:>9.1f} tokens/s{measured.seconds:>9.1f} s"
                f"   others {measured.others_percent:.1f} %"
            )
        about = self.describe[name]
        about["peak_rss_mb"] = max(about.get("peak_rss_mb", 0), process.peak_rss_mb)
        self.runs.append(entry)

    def _close_all(self) -> None:
        for process in self._processes.values():
            process.close()


def _description(contender: Contender) -> dict[str, Any]:
    about: dict[str, Any] = {
        "precision": contender.precision,
        "is_ours": contender.is_ours,
        "is_equal": contender.is_equal,
        "settings": {key: value for key, value in contender.settings.items() if key != "model"},
        "environment": {key: value.rpartition("/")[2] for key, value in contender.environment.items()},
    }
    return about | ({"error": contender.missing} if contender.missing else {})
