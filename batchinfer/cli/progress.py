"""How a job's progress is shown while somebody waits: a bar on a terminal, plain lines or JSON lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

import click

from batchinfer.cli.console import count, duration, print_json, rate, usd

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.jobs.views import JobView

LINE_SECONDS = 5.0
"""Time between two plain lines."""


class ProgressDisplay(Protocol):
    """Shows one job's progress."""

    def update(self, view: JobView) -> None:
        """Show how far the job is now."""
        ...

    def close(self) -> None:
        """Leave the terminal in order."""
        ...


def progress_line(view: JobView) -> str:
    """Rows, speed, time left and cost in one line."""
    rows = view.rows
    done = None if rows.remaining is None or rows.total is None else rows.total - rows.remaining
    parts = [view.state]
    if done is not None:
        parts.append(f"{count(done)}/{count(rows.total)} rows")
    if rows.errored:
        parts.append(f"{count(rows.errored)} errored")
    if view.progress.tokens_per_second is not None:
        parts.append(f"{rate(view.progress.tokens_per_second)} tokens/s")
    if view.progress.eta_seconds is not None:
        parts.append(f"ETA {duration(view.progress.eta_seconds)}")
    parts.append(usd(view.cost.metered_usd + view.cost.overhead_usd))
    return "  ".join(parts)


class LineDisplay:
    """Plain lines on stderr: at once when the state changes, else every few seconds."""

    def __init__(self, write: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write or (lambda line: click.echo(line, err=True))
        self._clock = clock
        self._last_at = float("-inf")
        self._last_state = ""

    def update(self, view: JobView) -> None:
        """Write a line if it is time for one."""
        now = self._clock()
        if view.state == self._last_state and now - self._last_at < LINE_SECONDS:
            return
        self._last_at, self._last_state = now, view.state
        self._write(f"{view.id}  {progress_line(view)}")

    def close(self) -> None:
        """Nothing is open."""


class JsonLineDisplay:
    """One JSON document a line on stdout, each time something changed."""

    def __init__(self) -> None:
        self._last: JobView | None = None

    def update(self, view: JobView) -> None:
        """Print the job if it is not as it was."""
        if view != self._last:
            print_json(view, is_line=True)
        self._last = view

    def close(self) -> None:
        """Nothing is open."""


class BarDisplay:
    """A bar that redraws itself on stderr."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar: Any = Progress(
            TextColumn("{task.fields[state]}", style="bold"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[line]}"),
            console=Console(stderr=True),
            transient=False,
        )
        self._task = self._bar.add_task("job", total=None, state="", line="")
        self._bar.start()

    def update(self, view: JobView) -> None:
        """Redraw the bar."""
        rows = view.rows
        done = (rows.total or 0) - (rows.remaining or 0)
        line = progress_line(view).removeprefix(view.state).strip()
        self._bar.update(self._task, total=rows.total, completed=done, state=view.state, line=line)

    def close(self) -> None:
        """Draw the bar a last time and leave it standing."""
        self._bar.stop()


def choose_display(*, as_json_lines: bool = False) -> ProgressDisplay:
    """The display that fits: JSON lines if asked for, a bar if stderr is a terminal, else plain lines."""
    if as_json_lines:
        return JsonLineDisplay()
    return BarDisplay() if sys.stderr.isatty() else LineDisplay()
