"""Use cases behind the doors: the CLI and the REST API call these and show what they return."""

from __future__ import annotations

import hashlib
import json
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from batchinfer.db.migrate import current, head, upgrade
from batchinfer.db.session import create_db_engine
from batchinfer.errors import ConflictError, InputError, InvalidSpecError, NotFoundError, UserError
from batchinfer.jobs import queries
from batchinfer.jobs.caller import Caller
from batchinfer.jobs.dispatch import connect_dispatcher
from batchinfer.jobs.download import write_download
from batchinfer.jobs.files import read_chunks
from batchinfer.jobs.forecast_report import forecast_report
from batchinfer.jobs.foresight import Foresight
from batchinfer.jobs.ids import new_job_id
from batchinfer.jobs.installed_roots import InstalledRoots
from batchinfer.jobs.keys import Keys
from batchinfer.jobs.ledger import RETRIED, Ledger
from batchinfer.jobs.ledger_jobs import stored_key
from batchinfer.jobs.model_pins import ModelPins
from batchinfer.jobs.model_use import model_use
from batchinfer.jobs.models import known_models
from batchinfer.jobs.money_service import MoneyService
from batchinfer.jobs.paths import check_output_is_free, resolve_paths
from batchinfer.jobs.planner import check_stage_templates
from batchinfer.jobs.present import cost_view, error_page, event_view, job_view, output_of, worker_view
from batchinfer.jobs.queue_lanes import WORKER_SILENCE, queue_lanes, why_it_waits
from batchinfer.jobs.result_files import first_rows, results_view
from batchinfer.jobs.row_pages import read_rows
from batchinfer.jobs.spec import parse_spec
from batchinfer.jobs.speed import measure_speed
from batchinfer.jobs.status import JobState
from batchinfer.jobs.tenants import Tenants
from batchinfer.jobs.views import EventList, JobList, QueueView, RowPage, WorkerList
from batchinfer.jobs.webhooks import Webhooks
from batchinfer.money import usd_to_nanos

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from decimal import Decimal
    from pathlib import Path

    from sqlalchemy import Connection, Engine

    from batchinfer.dataset.verify import VerifyReport
    from batchinfer.jobs.changes import JobChanges
    from batchinfer.jobs.dispatch import Dispatcher
    from batchinfer.jobs.money_views import ForecastReport
    from batchinfer.jobs.openai_views import ModelList
    from batchinfer.jobs.records import JobRecord
    from batchinfer.jobs.spec import JobSpec
    from batchinfer.jobs.views import CostView, ErrorPage, JobView, PreviewRow, ResultFile, ResultsView
    from batchinfer.sampling_params import SamplingParams
    from batchinfer.types import RowStatus

UseInputs: TypeAlias = "Callable[[JobSpec, str], tuple[JobSpec, Callable[[Connection, str], None]]]"
MAX_KEY_LENGTH = 255
"""Longest idempotency key; PostgreSQL could not index a much longer one."""
MAX_PAGE = 100
"""Most items of one page."""


def _utc_now() -> datetime:
    return datetime.now(UTC)


class JobService:
    """What people do with jobs.

    ``shares_disk``: workers see the same local files as this process, so that a missing input is refused at submit.
    It acts for its ``caller``: other tenants' jobs are not there.
    """

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        dispatcher: Dispatcher,
        *,
        shares_disk: bool,
        caller: Caller | None = None,
        roots: InstalledRoots | None = None,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self.engine = engine
        self.ledger = ledger
        self._dispatcher = dispatcher
        self.shares_disk = shares_disk
        self.caller = caller or Caller.operator()
        self.roots = roots or InstalledRoots()
        self._now = now

    @classmethod
    def connect(
        cls,
        database_url: str,
        broker_url: str,
        *,
        shares_disk: bool | None = None,
        roots: InstalledRoots | None = None,
    ) -> Self:
        """Open the database and a way to wake workers. SQLite is created and upgraded; PostgreSQL must be already.

        ``shares_disk`` None: workers on the same SQLite file are on this machine, others may be anywhere.

        Raises:
            UserError: ``database_not_migrated``.
        """
        engine = create_db_engine(database_url)
        is_embedded = engine.dialect.name == "sqlite"
        try:
            _bring_up_to_date(engine, is_embedded=is_embedded)
        except BaseException:
            engine.dispose()
            raise
        is_here = is_embedded if shares_disk is None else shares_disk
        return cls(engine, Ledger(engine), connect_dispatcher(broker_url), shares_disk=is_here, roots=roots)

    def acting_for(self, caller: Caller) -> Self:
        """The same service for another caller."""
        other = copy(self)
        other.caller = caller
        return other

    @property
    def keys(self) -> Keys:
        """The API keys."""
        return Keys(self.engine)

    @property
    def tenants(self) -> Tenants:
        """The tenants."""
        return Tenants(self.engine)

    @property
    def money(self) -> MoneyService:
        """Prices, usage and budgets."""
        return MoneyService(self.ledger, self.tenants, self.caller)

    @property
    def webhooks(self) -> Webhooks:
        """The webhooks."""
        return Webhooks(self.engine)

    @property
    def pins(self) -> ModelPins:
        """The pinned models."""
        return ModelPins(self.engine)

    def close(self) -> None:
        """Give the database connections back."""
        self.engine.dispose()

    # -- submitting ---------------------------------------------------------------------------------------------------
    def submit(
        self,
        spec: JobSpec,
        *,
        base: Path | None,
        idempotency_key: str | None = None,
        body: Any = None,
        job_id: str | None = None,
        attach: Callable[[Connection, str], None] | None = None,
    ) -> tuple[JobView, bool]:
        """Write a new job; True if it is new, False if the key had made it before.

        ``base`` is where relative paths start, see :func:`~batchinfer.jobs.paths.resolve_paths`. ``body`` is what was
        asked for, JSON-able and before defaults were filled in: what two submissions under one key must share.
        ``attach(connection, job_id)`` writes into the transaction that makes the job, see :meth:`Ledger.submit`.

        Raises:
            UserError: what :func:`resolve_paths` raises; a deadline in the past; an output that is taken.
            ConflictError: the key was used with another body, or the output exists.
        """
        _check_key(idempotency_key)
        job_id = job_id or new_job_id()
        stored = stored_key(self.caller.home, idempotency_key)
        is_replay = stored is not None and queries.has_key(self.engine, stored)
        pinned = self.pins.resolve(spec)
        resolved = resolve_paths(pinned, base=base, job_id=job_id, must_exist=self.shares_disk and not is_replay)
        if not is_replay:
            self._check_roots(resolved, job_id)
            self._check_new(resolved)
        job, is_new = self.ledger.submit(
            resolved,
            tenant=self.caller.home,
            job_id=job_id,
            idempotency_key=idempotency_key,
            body_hash=_body_hash(spec if body is None else body),
            attach=attach,
        )
        if is_new:
            self._dispatcher.wake_planner(job.id)
        return self.view(job), is_new

    def foresee(self, spec: JobSpec, *, base: Path | None) -> tuple[JobSpec, Foresight]:
        """What looks at a job before it runs, and the spec with its paths resolved.

        Raises:
            UserError: what :func:`resolve_paths` raises; a path that the tenant may not use.
        """
        resolved = resolve_paths(self.pins.resolve(spec), base=base, job_id="estimate", must_exist=True)
        self._check_roots(resolved, "estimate")
        tenant = self.tenants.get(self.caller, self.caller.home)
        roots = self.roots.of(tenant, has_key=self.caller.key_id is not None)
        return resolved, Foresight(self.ledger, self.caller.home, roots=roots)

    def _check_roots(self, spec: JobSpec, job_id: str) -> None:
        """Refuse paths that the caller's tenant may not use. Raises InputError: ``path_not_allowed``."""
        tenant = self.tenants.get(self.caller, self.caller.home)
        roots = self.roots.of(tenant, has_key=self.caller.key_id is not None)
        own = self.roots.own
        for path in spec.inputs:
            # uploaded files lie side by side: only those that this tenant has may be named
            if own is None or not queries.has_file(self.engine, self.caller, path):
                replace(roots, own=None).check_input(path)
        assert spec.output is not None
        if own is None or spec.output != f"{own}/results/{job_id}":
            replace(roots, own=None).check_output(spec.output)
        roots.check_model(spec.model)
        for folder in (spec.adapter, spec.adapter_folder):
            if folder is not None:
                roots.check_adapter(folder)

    def _check_new(self, spec: JobSpec) -> None:
        if spec.deadline is not None and spec.deadline <= self._now():
            raise InvalidSpecError(f"the deadline {spec.deadline.isoformat()} has passed already", param="deadline")
        _check_guides(spec.sampling_params())
        if spec.stages:
            _check_stages(spec)
        assert spec.output is not None
        check_output_is_free(spec.output)

    # -- looking ------------------------------------------------------------------------------------------------------
    def job(self, job_id: str) -> JobRecord:
        """A job that the caller may see: what each method that names a job begins with. Raises NotFoundError."""
        return self.ledger.get_job(job_id, self.caller)

    def view(self, job: JobRecord) -> JobView:
        """How a job stands, out of its record."""
        now = self._now()
        speed = measure_speed(self.engine, job, now)
        return job_view(job, speed, self.ledger.deadline_chance(job, speed, now))

    def get(self, job_id: str) -> JobView:
        """How a job stands, and why it waits. Raises NotFoundError."""
        return self.get_with_record(job_id)[1]

    def get_with_record(self, job_id: str) -> tuple[JobRecord, JobView]:
        """A job's record, how it stands and why it waits, read in one transaction. Raises NotFoundError."""

        def look(connection: Connection, job: JobRecord) -> tuple[JobRecord, JobView]:
            now = self._now()
            speed = measure_speed(connection, job, now)
            view = job_view(job, speed, self.ledger.deadline_chance(job, speed, now, connection=connection))
            return job, view.model_copy(update={"waits_for": why_it_waits(connection, job, now)})

        return self.ledger.look_at_job(job_id, self.caller, look)

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
        """A page of jobs, newest first. Raises NotFoundError if ``after`` is no job."""
        if after is not None:
            self.job(after)
        found = self.ledger.list_jobs(
            caller=self.caller,
            state=state,
            model=model,
            name=name,
            tag=tag,
            tenant=tenant,
            limit=limit + 1,
            after=after,
        )
        views = [self.view(job) for job in found[:limit]]
        return JobList(
            data=views,
            first_id=views[0].id if views else None,
            last_id=views[-1].id if views else None,
            has_more=len(found) > limit,
        )

    def errors(self, job_id: str, *, limit: int = 20, offset: int = 0, code: str | None = None) -> ErrorPage:
        """Rows that did not succeed: kinds with advice, and a page of samples. Raises NotFoundError."""
        job = self.job(job_id)
        samples = self.ledger.row_errors(job_id, limit=limit + 1, offset=offset, code=code)
        return error_page(
            job, queries.error_counts(self.engine, job_id), samples[:limit], has_more=len(samples) > limit
        )

    def results(self, job_id: str) -> ResultsView:
        """Where the results are: the finished output, or what can be read so far. Raises NotFoundError."""
        job = self.job(job_id)
        return results_view(job, self.ledger.shards(job_id))

    def preview(self, job_id: str, limit: int) -> list[PreviewRow]:
        """The first result rows.

        Raises:
            NotFoundError: no such job.
            InputError: a file cannot be read from this machine.
        """
        job, files = self.job(job_id), self.results(job_id).files
        try:
            return first_rows(job.spec, files, limit)
        except OSError as error:
            raise InputError(f"the results cannot be read from this machine: {error}") from None

    def rows(self, job_id: str, *, after: int = -1, status: RowStatus | None = None, limit: int = 20) -> RowPage:
        """A page of result rows, in input order, of those that are published.

        Raises:
            NotFoundError: no such job.
            InputError: a file cannot be read from this machine.
        """
        job = self.job(job_id)
        try:
            page = read_rows(job, self.ledger.shards(job_id), after=after, status=status, limit=limit)
        except OSError as error:
            raise InputError(f"the results cannot be read from this machine: {error}") from None
        has_more = page.next_after is not None
        return RowPage(job_id=job.id, data=page.rows, has_more=has_more, next_after=page.next_after)

    def events(self, job_id: str, *, after: int = 0, limit: int = 100) -> EventList:
        """What happened to a job since an event. Raises NotFoundError."""
        job = self.job(job_id)
        found = self.ledger.events(job.id, after=after, limit=limit + 1)
        return EventList(data=[event_view(event) for event in found[:limit]], has_more=len(found) > limit)

    def workers(self) -> WorkerList:
        """All workers. Raises ForbiddenError: they are the platform's, and tell of every tenant's models."""
        self.caller.check_platform()
        alive_since = self._now() - WORKER_SILENCE
        views = [worker_view(w, is_alive=w.last_seen_at >= alive_since) for w in self.ledger.list_workers()]
        return WorkerList(data=views, has_more=False)

    def queue(self, *, target_seconds: float = 600.0) -> QueueView:
        """What waits, by model, pool and kind of hardware. Raises ForbiddenError, as :meth:`workers` does."""
        self.caller.check_platform()
        lanes = queue_lanes(self.engine, self._now(), target_seconds=target_seconds)
        return QueueView(
            target_seconds=target_seconds,
            data=lanes,
            waiting_rows=sum(lane.waiting_rows for lane in lanes),
            device_seconds=round(sum(lane.device_seconds for lane in lanes), 3),
            workers_wanted=sum(lane.workers_wanted for lane in lanes),
        )

    def read_result(self, job_id: str, name: str) -> tuple[ResultFile, Iterator[bytes]]:
        """One result file by the last part of its path, and its bytes in chunks.

        Raises:
            NotFoundError: no such job or file.
            InputError: it cannot be read from this machine.
        """
        for file in self.results(job_id).files:
            if file.path.rpartition("/")[2] == name:
                return file, read_chunks(file.path)
        raise NotFoundError(f"job {job_id} has no result file {name[:100]!r}", param="name")

    def download(self, job_id: str, folder: Path) -> list[Path]:
        """Copy the result files that there are into ``folder``. Raises what :meth:`read_result` raises."""
        folder.mkdir(parents=True, exist_ok=True)
        files = self.results(job_id).files
        return [
            write_download(folder, file, self.read_result(job_id, file.path.rpartition("/")[2])[1]) for file in files
        ]

    def cost(self, job_id: str) -> CostView:
        """What a job has cost. Raises NotFoundError."""
        job = self.job(job_id)
        return cost_view(job, self.ledger.cost_report(job_id), in_flight_nanos=self.ledger.in_flight_nanos(job_id))

    def forecast(self, job_id: str) -> ForecastReport:
        """What was expected of a job, beside how it came out. Raises NotFoundError."""
        job = self.job(job_id)
        found = self.ledger.forecast_of(job.id)
        if found is None:
            raise NotFoundError(f"job {job.id} has no forecast: it was not planned yet, or by an older version")
        return forecast_report(job.id, *found)

    def verify(self, job_id: str, *, check_input: bool = True) -> VerifyReport:
        """Prove from the files that every input row has exactly one outcome.

        Raises:
            NotFoundError: no such job, or its output is gone.
            ConflictError: the job has not ended.
        """
        from batchinfer.dataset.verify import verify  # noqa: PLC0415 -- pyarrow loads when it is used

        job = self.job(job_id)
        if not job.state.is_terminal:
            raise ConflictError(f"job {job.id} is {job.state}; verify it when it has ended", code="job_not_ended")
        return verify(output_of(job), check_input=check_input)

    def num_workers(self) -> int:
        """Workers that gave a sign of life lately."""
        return queries.workers_seen_since(self.engine, self._now() - WORKER_SILENCE)

    def num_unhealthy_workers(self) -> int:
        """Of these, those that say that their device is not well."""
        return queries.unhealthy_workers_since(self.engine, self._now() - WORKER_SILENCE)

    def models(self, names: Mapping[str, str]) -> ModelList:
        """Models that requests may name; ``names`` are the settings' aliases."""
        return known_models(self.engine, names, caller=self.caller, workers_since=self._now() - WORKER_SILENCE)

    def model_use(self) -> tuple[Counter[str], Counter[str]]:
        """Of each model, how many of the newest jobs name it, and how many workers alive have it loaded."""
        return model_use(self.engine, workers_since=self._now() - WORKER_SILENCE)

    # -- steering -----------------------------------------------------------------------------------------------------
    def change(self, job_id: str, changes: JobChanges, *, version: str | None = None) -> JobView:
        """Change what is set in ``changes``, if the job is still at ``version``.

        Raises:
            NotFoundError: no such job.
            ConflictError: the job has ended; PreconditionError: it was changed since.
            InvalidSpecError: a deadline that has passed.
        """
        return self.view(self.ledger.change(self.job(job_id).id, changes.columns(), version=version))

    def clone(
        self,
        job_id: str,
        changes: Mapping[str, Any],
        *,
        base: Path | None,
        idempotency_key: str | None = None,
        use_inputs: UseInputs | None = None,
    ) -> tuple[JobView, bool]:
        """Submit a job like this one, with some fields of the spec changed; see :meth:`submit`.

        Output and deadline are not taken over: the one is taken, the other was for that time. ``use_inputs`` is
        :meth:`~batchinfer.jobs.files.FileStore.use_inputs` for the caller, where inputs may name stored files.
        """
        old = self.job(job_id)
        kept = old.spec.model_dump(mode="json", exclude={"output", "deadline"}, exclude_unset=True)
        spec = parse_spec(kept | dict(changes))
        body = {"clone": old.id, "changes": dict(changes)}
        new_id, attach = new_job_id(), None
        if use_inputs is not None:
            spec, attach = use_inputs(spec, new_id)
        return self.submit(spec, base=base, idempotency_key=idempotency_key, body=body, job_id=new_id, attach=attach)

    def cancel(self, job_id: str) -> JobView:
        """Stop a job; rows that ended are kept. Raises ConflictError, NotFoundError."""
        return self.view(self.ledger.cancel(self.job(job_id).id))

    def pause(self, job_id: str) -> JobView:
        """Hold a job. Raises ConflictError, NotFoundError."""
        return self.view(self.ledger.pause(self.job(job_id).id))

    def resume(self, job_id: str, *, budget_usd: Decimal | None = None) -> JobView:
        """Go on with a held or failed job, with a new budget if one is given. Raises ConflictError, NotFoundError."""
        job = self.ledger.resume(
            self.job(job_id).id, budget_nanos=None if budget_usd is None else usd_to_nanos(budget_usd)
        )
        self._wake(job)
        return self.view(job)

    def retry(self, job_id: str, statuses: Iterable[RowStatus] = RETRIED) -> tuple[JobView, int]:
        """Run rows of these statuses again; also says how many. Raises ConflictError, NotFoundError."""
        num_rows = self.ledger.retry(self.job(job_id).id, statuses)
        job = self.job(job_id)
        if num_rows:
            self._wake(job)
        return self.view(job), num_rows

    def _wake(self, job: JobRecord) -> None:
        if job.state is JobState.VALIDATING:
            self._dispatcher.wake_planner(job.id)
        elif job.state is JobState.FINALIZING:
            self._dispatcher.wake_finalizer(job.id)
        elif job.num_shards:
            self._dispatcher.wake_shards(job.model, job.num_shards)


def _bring_up_to_date(engine: Engine, *, is_embedded: bool) -> None:
    """Upgrade an embedded database; refuse another one that is not at this program's revision."""
    if is_embedded:
        upgrade(engine)
    elif (found := current(engine)) != head():
        raise UserError(
            f"the database is at revision {found or 'none'}, this program needs {head()}; run `batchinfer db upgrade`",
            code="database_not_migrated",
        )


def _check_guides(params: SamplingParams) -> None:
    """Refuse a job whose schema, expression or grammar no answer can follow. Raises InvalidSpecError."""
    guide = params.guide
    if guide is not None and (fault := guide.fault()):
        raise InvalidSpecError(f"{guide.kind}: {fault}", param=guide.kind, code="invalid_schema")
    if fault := params.tools_fault():
        raise InvalidSpecError(fault, param="tools", code="invalid_schema")


def _check_stages(spec: JobSpec) -> None:
    """Refuse stages that no input could make work. Raises InvalidSpecError, with the stage at fault."""
    check_stage_templates(spec)
    for stage in spec.stages:
        if not stage.generates:
            continue
        try:
            _check_guides(spec.stage_params(stage))
        except InvalidSpecError as error:
            raise InvalidSpecError(f"stage {stage.name!r}: {error}", param="stages", code=error.code) from None


def _check_key(key: str | None) -> None:
    if key is None:
        return
    if not 1 <= len(key) <= MAX_KEY_LENGTH or not key.isprintable():
        raise InvalidSpecError(
            f"an idempotency key has 1 to {MAX_KEY_LENGTH} printable characters", param="idempotency_key"
        )


def _body_hash(body: Any) -> str:
    """SHA-256 of the canonical JSON of what was asked for."""
    plain = body.model_dump(mode="json") if hasattr(body, "model_dump") else body
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
