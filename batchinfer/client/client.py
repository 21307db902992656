"""The client: the command line's verbs, on a server elsewhere."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import httpx

from batchinfer.client.fleet import Models, Workers
from batchinfer.client.job_verbs import JobVerbs, Submitted
from batchinfer.client.keys import Keys, Tenants
from batchinfer.client.money import Budgets, Prices, Usage
from batchinfer.client.noun import given
from batchinfer.client.schedules import Schedules
from batchinfer.client.transport import RetryPolicy, Transport
from batchinfer.client.uploads import upload, upload_inputs
from batchinfer.client.webhooks import Webhooks
from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.download import write_download
from batchinfer.jobs.status import HELD, JobState
from batchinfer.jobs.views import CostView, ErrorPage, JobList, JobView, PreviewRow, ResultsView
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from decimal import Decimal
    from types import TracebackType

    from batchinfer.dataset.verify import VerifyReport
    from batchinfer.jobs.spec import JobSpec

DEFAULT_SERVER = "http://127.0.0.1:8000"
MAX_PAGE = 100
"""Most rows that a server gives at once."""
RETRIED = (RowStatus.ERRORED, RowStatus.EXPIRED, RowStatus.CANCELLED)
_CHUNK_BYTES = 1 << 20
_VERIFY_TIMEOUT_S = 3600.0


class Client(JobVerbs):
    """Jobs on a batchinfer server, and what else there is. A context manager; thread-safe.

    Verbs of jobs are methods: ``client.submit(...)``. Other nouns are attributes: ``client.schedules.add(...)``.

    ``server`` and ``api_key`` default to BATCHINFER_SERVER and BATCHINFER_API_KEY. Every method raises the errors of
    :mod:`batchinfer.errors`: NotFoundError, ConflictError, UnauthorizedError and so on, and ServerError if the server
    cannot be reached. Requests that do no harm twice are sent again by ``retries``; a submit always has a key.
    """

    def __init__(
        self,
        server: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = 30.0,
        retries: RetryPolicy | None = None,
        transport: Transport | None = None,
    ) -> None:
        url = (server or os.environ.get("BATCHINFER_SERVER") or DEFAULT_SERVER).rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise InvalidSpecError(f"server {url!r} is no URL such as https://batch.example.org", param="server")
        key = api_key or os.environ.get("BATCHINFER_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.server = url
        super().__init__(
            transport
            or Transport(
                httpx.Client(base_url=url.removesuffix("/v1"), headers=headers, timeout=timeout_s),
                retries or RetryPolicy(),
            )
        )
        self.schedules = Schedules(self._transport)
        self.webhooks = Webhooks(self._transport)
        self.keys = Keys(self._transport)
        self.tenants = Tenants(self._transport)
        self.budgets = Budgets(self._transport)
        self.prices = Prices(self._transport)
        self.usage = Usage(self._transport)
        self.workers = Workers(self._transport)
        self.models = Models(self._transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._transport.close()

    # -- submitting ---------------------------------------------------------------------------------------------------
    def submit(
        self, spec: JobSpec, *, base: Path | None = None, idempotency_key: str | None = None, body: Any = None
    ) -> Submitted:
        """Submit a job. Local inputs are uploaded, each file once; URIs and ids of uploaded files stay as they are.

        ``base`` is where relative paths start (default: the current folder). Without ``idempotency_key`` one is made,
        so that a request that is sent again makes no second job. ``body`` is what was asked for before defaults were
        filled in, such as a deadline of ``6h``; by default the fields of ``spec`` that were set.
        """
        if spec.output is not None and not spec.output.startswith("/") and "://" not in spec.output:
            raise InvalidSpecError(
                f"--output {spec.output!r} is a path of this machine; leave it out and fetch the results with "
                "`batchinfer results JOB --download FOLDER`, or give a URI",
                param="output",
            )
        asked = dict(body) if body is not None else spec.model_dump(mode="json", exclude_unset=True)
        asked["inputs"] = upload_inputs(self._transport, spec.inputs, base or Path.cwd())
        key = idempotency_key or f"client-{uuid4().hex}"
        answer = self._transport.ask(
            "POST", "/v1/jobs", json=asked, headers={"Idempotency-Key": key}, is_repeatable=True
        )
        is_new = "Idempotent-Replayed" not in answer.headers
        return Submitted(JobView.model_validate_json(answer.content), is_new or idempotency_key is None)

    def upload(self, path: Path | str, purpose: str = "input") -> str:
        """Upload a file, unless the server has it already; return its id, which ``inputs`` may name."""
        return upload(self._transport, Path(path), purpose)

    # -- looking ------------------------------------------------------------------------------------------------------
    def get(self, job_id: str) -> JobView:
        """How a job stands."""
        return self._get(JobView, f"/v1/jobs/{job_id}")

    def list_jobs(
        self,
        *,
        state: JobState | str | None = None,
        model: str | None = None,
        name: str | None = None,
        tag: tuple[str, str] | None = None,
        tenant: str | None = None,
        limit: int = 20,
        after: str | None = None,
    ) -> JobList:
        """A page of jobs, newest first; ``tag`` is a key and its value."""
        pair = None if tag is None else "=".join(tag)
        return self._get(
            JobList, "/v1/jobs", state=state, model=model, name=name, tag=pair, tenant=tenant, limit=limit, after=after
        )

    def jobs(self, *, state: JobState | str | None = None) -> Iterator[JobView]:
        """All jobs, newest first, page by page."""
        after: str | None = None
        while True:
            page = self.list_jobs(state=state, limit=100, after=after)
            yield from page.data
            if not page.has_more:
                return
            after = page.last_id

    def wait(
        self,
        job_id: str,
        *,
        poll_s: float = 1.0,
        timeout_s: float | None = None,
        on_change: Callable[[JobView], None] | None = None,
    ) -> JobView:
        """Poll a job until it ends or is held; ``on_change`` sees every view that differs from the one before.

        Raises:
            TimeoutError: it did not within ``timeout_s``.
        """
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        last: JobView | None = None
        while True:
            view = self.get(job_id)
            if on_change is not None and view != last:
                on_change(view)
            last = view
            state = JobState(view.state)
            if state.is_terminal or state in HELD:
                return view
            if ends_at is not None and time.monotonic() + poll_s > ends_at:
                raise TimeoutError(f"job {job_id} is still {view.state} after {timeout_s:g} s")
            time.sleep(poll_s)

    def errors(self, job_id: str, *, limit: int = 20, offset: int = 0, code: str | None = None) -> ErrorPage:
        """Rows that did not succeed: kinds with advice, and a page of samples."""
        return self._get(ErrorPage, f"/v1/jobs/{job_id}/errors", limit=limit, offset=offset, code=code)

    def results(self, job_id: str) -> ResultsView:
        """Where the results are on the server."""
        return self._get(ResultsView, f"/v1/jobs/{job_id}/results")

    def preview(self, job_id: str, limit: int = 5) -> list[PreviewRow]:
        """The first result rows."""
        rows: list[PreviewRow] = []
        after: int | None = -1
        while after is not None and len(rows) < limit:
            page = self.rows(job_id, after=after, limit=min(MAX_PAGE, limit - len(rows)))
            rows += page.data
            after = page.next_after
        return rows

    def download(self, job_id: str, folder: Path | str) -> list[Path]:
        """Fetch the result files that there are into ``folder``; each is checked against its hash."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        copies = []
        for file in self.results(job_id).files:
            path = f"/v1/jobs/{job_id}/results/{file.path.rpartition('/')[2]}"
            with self._transport.open("GET", path) as answer:
                copies.append(write_download(target, file, answer.iter_bytes(_CHUNK_BYTES)))
        return copies

    def cost(self, job_id: str) -> CostView:
        """What a job has cost."""
        return self._get(CostView, f"/v1/jobs/{job_id}/cost")

    def verify(self, job_id: str, *, check_input: bool = True) -> VerifyReport:
        """Let the server prove from the files that every input row has exactly one outcome."""
        from batchinfer.dataset.verify import VerifyReport  # noqa: PLC0415 -- pyarrow loads when it is used

        params = {"check_input": str(check_input).lower()}
        path = f"/v1/jobs/{job_id}/verify"
        report = self._transport.ask("GET", path, params=params, timeout=_VERIFY_TIMEOUT_S).json()
        del report["ok"]
        return VerifyReport(**report | {"problems": tuple(report["problems"])})

    def num_workers(self) -> int | None:
        """None: a tenant does not hear of workers."""
        return None

    # -- steering -----------------------------------------------------------------------------------------------------
    def cancel(self, job_id: str) -> JobView:
        """Stop a job; rows that ended are kept."""
        return self._send(JobView, "POST", f"/v1/jobs/{job_id}/cancel", again=True)

    def pause(self, job_id: str) -> JobView:
        """Hold a job."""
        return self._send(JobView, "POST", f"/v1/jobs/{job_id}/pause", again=True)

    def resume(self, job_id: str, *, budget_usd: Decimal | None = None) -> JobView:
        """Go on with a held or failed job, with a new budget if one is given."""
        body = given(budget_usd=None if budget_usd is None else str(budget_usd))
        return self._send(JobView, "POST", f"/v1/jobs/{job_id}/resume", body)

    def retry(self, job_id: str, statuses: Iterable[RowStatus] = RETRIED) -> tuple[JobView, int]:
        """Run rows of these statuses again; also says how many."""
        body = {"statuses": [RowStatus(status).value for status in statuses]}
        answer = self._transport.ask("POST", f"/v1/jobs/{job_id}/retry", json=body).json()
        return JobView.model_validate(answer["job"]), int(answer["retried_rows"])
