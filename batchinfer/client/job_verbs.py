"""What the client asks of jobs besides submitting, polling and fetching."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from batchinfer.client.event_stream import follow
from batchinfer.client.noun import Noun, given
from batchinfer.client.uploads import upload_inputs
from batchinfer.jobs.foresight_views import EstimateView, ExplainView
from batchinfer.jobs.money_views import ForecastReport
from batchinfer.jobs.views import EventList, EventView, JobView, RowPage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from decimal import Decimal

    from batchinfer.jobs.changes import JobChanges
    from batchinfer.jobs.spec import JobSpec
    from batchinfer.types import RowStatus

_FORESIGHT_TIMEOUT_S = 600.0


class Submitted(NamedTuple):
    """What a submit gave."""

    job: JobView
    is_new: bool
    """False if the idempotency key had made the job before."""


class JobVerbs(Noun):
    """Verbs of ``/v1/jobs`` that look ahead, look closer, or make a job out of another one."""

    # -- before a job runs --------------------------------------------------------------------------------------------
    def estimate(
        self, spec: JobSpec, *, workers: int = 1, device: str | None = None, sample: int = 512, base: Path | None = None
    ) -> EstimateView:
        """Rows, tokens, time and cost with intervals, from ``sample`` rows. Local inputs are uploaded as in a submit."""
        params = given(workers=workers, device=device, sample=sample)
        return EstimateView.model_validate_json(self._foresee("estimate", spec, base, params))

    def explain(
        self,
        spec: JobSpec,
        *,
        workers: int = 1,
        device: str | Sequence[str] | None = None,
        usd_per_hour: Decimal | float | str | None = None,
        rows: int | None = None,
        kv_blocks: int | None = None,
        base: Path | None = None,
    ) -> ExplainView:
        """The first ``rows`` of the input as the engine will see them, and what would make the job cheaper.

        ``device``: one or several; ``usd_per_hour``: what one GPU of the server's table costs, in place of its price book.
        """
        params = given(
            workers=workers, device=device or None, rows=rows, kv_blocks=kv_blocks,
            usd_per_hour=None if usd_per_hour is None else str(usd_per_hour),
        )  # fmt: skip
        return ExplainView.model_validate_json(self._foresee("explain", spec, base, params))

    def _foresee(self, verb: str, spec: JobSpec, base: Path | None, params: Mapping[str, Any]) -> bytes:
        body = spec.model_dump(mode="json", exclude_unset=True)
        body["inputs"] = upload_inputs(self._transport, spec.inputs, base or Path.cwd())
        answer = self._transport.ask(
            "POST", f"/v1/jobs:{verb}", json=body, params=params, is_repeatable=True, timeout=_FORESIGHT_TIMEOUT_S
        )
        return answer.content

    def forecast(self, job_id: str) -> ForecastReport:
        """What was expected of a job when it was planned, beside how it came out."""
        return self._get(ForecastReport, f"/v1/jobs/{job_id}/forecast")

    # -- a submitted job anew -----------------------------------------------------------------------------------------
    def version(self, job_id: str) -> str:
        """The version of what :meth:`change` can change: the first part of the job's ETag."""
        etag = str(self._transport.ask("GET", f"/v1/jobs/{job_id}").headers["ETag"])
        return etag.removeprefix("W/").strip('"').partition(".")[0]

    def change(self, job_id: str, changes: JobChanges, *, version: str | None = None) -> JobView:
        """Change name, tags, priority, deadline or budget; with ``version`` only if the job is still at it.

        Raises:
            PreconditionError: somebody changed it meanwhile; ConflictError: it has ended.
        """
        answer = self._transport.ask(
            "PATCH",
            f"/v1/jobs/{job_id}",
            json=changes.model_dump(mode="json", exclude_unset=True),
            headers={} if version is None else {"If-Match": f'"{version}"'},
            # a second one would find the version that the first one made
            is_repeatable=version is None,
        )
        return JobView.model_validate_json(answer.content)

    def clone(
        self,
        job_id: str,
        changes: Mapping[str, Any] | None = None,
        *,
        base: Path | None = None,
        idempotency_key: str | None = None,
    ) -> Submitted:
        """Submit a job like this one with some fields of its spec changed; local inputs are uploaded."""
        body = dict(changes or {})
        if "inputs" in body:
            inputs = body["inputs"]
            paths = (inputs,) if isinstance(inputs, str) else tuple(inputs)
            body["inputs"] = upload_inputs(self._transport, paths, base or Path.cwd())
        key = idempotency_key or f"client-{uuid4().hex}"
        answer = self._transport.ask(
            "POST", f"/v1/jobs/{job_id}/clone", json=body, headers={"Idempotency-Key": key}, is_repeatable=True
        )
        is_new = "Idempotent-Replayed" not in answer.headers
        return Submitted(JobView.model_validate_json(answer.content), is_new or idempotency_key is None)

    # -- a closer look ------------------------------------------------------------------------------------------------
    def rows(self, job_id: str, *, after: int = -1, status: RowStatus | str | None = None, limit: int = 20) -> RowPage:
        """A page of result rows in input order, also while the job runs."""
        return self._get(RowPage, f"/v1/jobs/{job_id}/rows", after=after, status=status, limit=limit)

    def events(self, job_id: str, *, after: int = 0, limit: int = 100) -> EventList:
        """A page of what happened to a job, oldest first."""
        return self._get(EventList, f"/v1/jobs/{job_id}/events", after=after, limit=limit)

    def follow(self, job_id: str, *, after: int = 0) -> Iterator[EventView]:
        """What happened to a job and what happens, as it happens, until it ends or is held.

        A lost connection is taken up again behind the last event; see :func:`batchinfer.client.event_stream.follow`.
        """
        return follow(self._transport, f"/v1/jobs/{job_id}/events", after=after)
