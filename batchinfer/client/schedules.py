"""Schedules on a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.client.noun import Noun, given
from batchinfer.client.uploads import is_elsewhere
from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.schedule_views import BackfillView, RunList, RunView, ScheduleList, ScheduleView

if TYPE_CHECKING:
    from pathlib import Path

    from batchinfer.jobs.schedule_spec import ScheduleSpec

_PATH = "/v1/schedules"


class Schedules(Noun):
    """``client.schedules``: jobs that come back by the clock."""

    def add(self, spec: ScheduleSpec, *, base: Path | None = None) -> ScheduleView:
        """Add a schedule. Its inputs are the server's: URIs, absolute paths there, or ids of uploaded files.

        ``base`` is for a door to one's own database, which starts relative paths there; a server has no such folder.

        Raises:
            InvalidSpecError: an input is a relative path.
        """
        del base
        body = spec.model_dump(mode="json", exclude_unset=True)
        inputs = body["job"].get("inputs", ())
        for path in [inputs] if isinstance(inputs, str) else inputs:
            if not is_elsewhere(path):
                raise InvalidSpecError(
                    f"--input {path!r} is a relative path: a schedule on a server reads URIs such as s3://bucket/key, "
                    "or absolute paths there",
                    param="inputs",
                )
        return self._send(ScheduleView, "POST", _PATH, body)

    def list(self, *, limit: int = 20, after: str | None = None) -> ScheduleList:
        """A page of schedules, by name."""
        return self._get(ScheduleList, _PATH, limit=limit, after=after)

    def get(self, name: str) -> ScheduleView:
        """One schedule, by name or id."""
        return self._get(ScheduleView, f"{_PATH}/{name}")

    def remove(self, name: str) -> ScheduleView:
        """Remove a schedule; its jobs stay."""
        return self._send(ScheduleView, "DELETE", f"{_PATH}/{name}", again=False)

    def pause(self, name: str) -> ScheduleView:
        """Hold a schedule; jobs at work go on."""
        return self._send(ScheduleView, "POST", f"{_PATH}/{name}/pause", again=True)

    def resume(self, name: str) -> ScheduleView:
        """Let a schedule go on."""
        return self._send(ScheduleView, "POST", f"{_PATH}/{name}/resume", again=True)

    def trigger(self, name: str, *, logical_date: str | None = None) -> RunView:
        """Run a schedule's job now."""
        return self._send(RunView, "POST", f"{_PATH}/{name}/trigger", given(logical_date=logical_date))

    def backfill(self, name: str, *, start: str, end: str, parallel: int = 1, retry: bool = False) -> BackfillView:
        """Run every moment of a range, both ends included. Dates that have a run are left alone."""
        body = {"start": start, "end": end, "parallel": parallel, "retry": retry}
        return self._send(BackfillView, "POST", f"{_PATH}/{name}/backfill", body, again=not retry)

    def runs(self, name: str, *, state: str | None = None, limit: int = 20, after: str | None = None) -> RunList:
        """A page of a schedule's runs, the latest first."""
        return self._get(RunList, f"{_PATH}/{name}/runs", state=state, limit=limit, after=after)
