"""What the command line asks of jobs, whether they are in a database of its own or behind a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from decimal import Decimal
    from pathlib import Path

    from batchinfer.dataset.verify import VerifyReport
    from batchinfer.jobs.changes import JobChanges
    from batchinfer.jobs.money_views import ForecastReport
    from batchinfer.jobs.spec import JobSpec
    from batchinfer.jobs.status import JobState
    from batchinfer.jobs.views import CostView, ErrorPage, EventList, JobList, JobView, PreviewRow, ResultsView, RowPage
    from batchinfer.types import RowStatus


class JobDoor(Protocol):
    """Both :class:`batchinfer.jobs.service.JobService` and :class:`batchinfer.client.Client` satisfy it.

    Methods are described there; errors are those of :mod:`batchinfer.errors` on both sides.
    """

    def submit(
        self, spec: JobSpec, *, base: Path | None, idempotency_key: str | None = None, body: Any = None
    ) -> tuple[JobView, bool]:
        """Submit a job; True if it is new."""
        ...

    def get(self, job_id: str) -> JobView:
        """How a job stands."""
        ...

    def list_jobs(
        self,
        *,
        state: JobState | None = None,
        model: str | None = None,
        name: str | None = None,
        tag: tuple[str, str] | None = None,
        tenant: str | None = None,
        limit: int = 20,
        after: str | None = None,
    ) -> JobList:
        """A page of jobs, newest first."""
        ...

    def errors(self, job_id: str, *, limit: int = 20, offset: int = 0, code: str | None = None) -> ErrorPage:
        """Rows that did not succeed."""
        ...

    def results(self, job_id: str) -> ResultsView:
        """Where the results are."""
        ...

    def preview(self, job_id: str, limit: int) -> list[PreviewRow]:
        """The first result rows."""
        ...

    def rows(self, job_id: str, *, after: int = -1, status: RowStatus | None = None, limit: int = 20) -> RowPage:
        """A page of result rows in input order."""
        ...

    def events(self, job_id: str, *, after: int = 0, limit: int = 100) -> EventList:
        """A page of what happened, oldest first."""
        ...

    def forecast(self, job_id: str) -> ForecastReport:
        """What was expected, beside how it came out."""
        ...

    def change(self, job_id: str, changes: JobChanges, *, version: str | None = None) -> JobView:
        """Change name, tags, priority, deadline or budget."""
        ...

    def clone(
        self, job_id: str, changes: Mapping[str, Any], *, base: Path | None, idempotency_key: str | None = None
    ) -> tuple[JobView, bool]:
        """Submit a job like this one; True if it is new."""
        ...

    def download(self, job_id: str, folder: Path) -> list[Path]:
        """Copy the result files into a folder."""
        ...

    def cost(self, job_id: str) -> CostView:
        """What a job has cost."""
        ...

    def verify(self, job_id: str, *, check_input: bool = True) -> VerifyReport:
        """Prove that every input row has exactly one outcome."""
        ...

    def num_workers(self) -> int | None:
        """Workers alive; None if that is not told."""
        ...

    def cancel(self, job_id: str) -> JobView:
        """Stop a job."""
        ...

    def pause(self, job_id: str) -> JobView:
        """Hold a job."""
        ...

    def resume(self, job_id: str, *, budget_usd: Decimal | None = None) -> JobView:
        """Go on with a job."""
        ...

    def retry(self, job_id: str, statuses: Iterable[RowStatus] = ...) -> tuple[JobView, int]:
        """Run rows again that did not succeed; also says how many."""
        ...
