"""Submitting jobs and reading what the ledger knows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select

from batchinfer.db.tables import Attempt, Job, JobEventRow, JobTag, Part, RowErrorRow, Shard
from batchinfer.db.types import storable
from batchinfer.errors import ConflictError
from batchinfer.jobs.caller import DEFAULT_TENANT
from batchinfer.jobs.ids import new_job_id
from batchinfer.jobs.ledger_base import LedgerBase, T, insert_once
from batchinfer.jobs.ledger_rows import (
    attempt_record,
    error_sample,
    job_event,
    job_record,
    part_record,
    shard_record,
)
from batchinfer.jobs.status import AttemptState, JobState, ShardState
from batchinfer.money import usd_to_nanos
from batchinfer.tracing import span, traceparent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import datetime

    from sqlalchemy import Connection, Row, Select

    from batchinfer.jobs.caller import Caller
    from batchinfer.jobs.leases import RowErrorSample
    from batchinfer.jobs.records import AttemptRecord, JobEvent, JobRecord, PartRecord, ShardRecord
    from batchinfer.jobs.spec import JobSpec

_SEPARATOR = "\x1f"


class Jobs(LedgerBase):
    """Submission and queries."""

    def submit(
        self,
        spec: JobSpec,
        *,
        tenant: str = DEFAULT_TENANT,
        job_id: str | None = None,
        idempotency_key: str | None = None,
        body_hash: str | None = None,
        attach: Callable[[Connection, str], None] | None = None,
    ) -> tuple[JobRecord, bool]:
        """Write a new job in state ``validating``; True if it was created, False if the key had created it before.

        ``body_hash`` is what two submissions under one key must share; by default the spec's fingerprint (pass a hash
        of the raw request where the spec has moments derived from it, such as a deadline of ``6h``). Two tenants may use
        the same key; it then means two jobs.
        ``attach(connection, job_id)`` writes what belongs to the job into the same transaction, if the job is new.

        Raises:
            ConflictError: ``idempotency_conflict``: the key was used with another body; ``job_exists``: the id was.
        """
        job_id = job_id or new_job_id()
        values = _new_job(spec, job_id, stored_key(tenant, idempotency_key), body_hash or spec.fingerprint())
        values["tenant_id"] = tenant

        def work(connection: Connection, now: datetime) -> tuple[JobRecord, bool]:
            created = self._add_job(connection, values, now)
            if created:
                if attach is not None:
                    attach(connection, job_id)
                job = connection.execute(select(Job).where(Job.id == job_id)).one()
            else:
                job = _existing(connection, values)
            # a second run of this transaction after a lost commit message finds its own job: that is a creation
            return job_record(job), job.id == job_id

        with span("submit", job=job_id, model=spec.model):
            values["traceparent"] = traceparent()
            return self._write(work)

    @classmethod
    def _add_job(cls, connection: Connection, values: dict[str, Any], now: datetime) -> bool:
        """Insert a new job and tell its events; False if its id or its key is taken."""
        created = insert_once(connection, Job, values | {"created_at": now})
        if created:
            cls._tell(connection, values["id"], now, "submitted", model=values["model"])
            add_tags(connection, values["id"], values.get("tenant_id", DEFAULT_TENANT), values["tags"])
        return created

    def get_job(self, job_id: str, caller: Caller | None = None) -> JobRecord:
        """A job, if the caller may see it; workers ask without one. Raises NotFoundError."""
        return self.look_at_job(job_id, caller, lambda _, job: job)

    def look_at_job(self, job_id: str, caller: Caller | None, look: Callable[[Connection, JobRecord], T]) -> T:
        """What ``look(connection, job)`` makes of a job and of what it reads in the same transaction.

        Raises NotFoundError; after a transient failure it looks again.
        """

        def work(connection: Connection, _now: datetime) -> T:
            return look(connection, job_record(self._find_job(connection, job_id, caller=caller)))

        return self._read(work)

    def list_jobs(
        self,
        *,
        caller: Caller | None = None,
        state: JobState | None = None,
        model: str | None = None,
        name: str | None = None,
        tag: tuple[str, str] | None = None,
        tenant: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> list[JobRecord]:
        """Newest first, what the caller may see; ``after`` is the last id of the page before."""
        query = list_statement(
            caller=caller, state=state, model=model, name=name, tag=tag, tenant=tenant, limit=limit, after=after
        )
        return [job_record(row) for row in self._rows(query)]

    def events(self, job_id: str, *, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """In order, with ids above ``after``."""
        query = select(JobEventRow).where(JobEventRow.job_id == job_id, JobEventRow.id > after)
        return [job_event(row) for row in self._rows(query.order_by(JobEventRow.id).limit(limit))]

    def row_errors(
        self, job_id: str, *, limit: int = 100, offset: int = 0, code: str | None = None
    ) -> list[RowErrorSample]:
        """Rows that did not succeed, by row index: a bounded sample; the Parquet output has all."""
        query = select(RowErrorRow).where(RowErrorRow.job_id == job_id)
        if code is not None:
            query = query.where(RowErrorRow.code == code)
        query = query.order_by(RowErrorRow.row_index).limit(limit).offset(offset)
        return [error_sample(row) for row in self._rows(query)]

    def shards(self, job_id: str, *, page_size: int = 1000) -> Iterator[ShardRecord]:
        """All shards by index, read in pages."""
        last = -1
        while True:
            query = select(Shard).where(Shard.job_id == job_id, Shard.shard_index > last)
            page = self._rows(query.order_by(Shard.shard_index).limit(page_size))
            yield from map(shard_record, page)
            if len(page) < page_size:
                return
            last = page[-1].shard_index

    def parts(self, shard_id: int, *, generation: int | None = None) -> list[PartRecord]:
        """Committed parts of a shard in commit order; of one generation, or of all."""
        query = select(Part).where(Part.shard_id == shard_id).order_by(Part.id)
        if generation is not None:
            query = query.where(Part.generation == generation)
        return [part_record(row) for row in self._rows(query)]

    def attempts(self, job_id: str, *, running_only: bool = False) -> list[AttemptRecord]:
        """Attempts of a job, oldest first."""
        query = select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.id)
        if running_only:
            query = query.where(Attempt.state == AttemptState.RUNNING)
        return [attempt_record(row) for row in self._rows(query)]

    def live_paths(self, job_id: str) -> Iterator[str]:
        """Files that count: results of committed shards, bases of retried ones, parts still to be merged."""
        for shard in self.shards(job_id):
            if shard.result_path is not None:
                yield shard.result_path
            if shard.state is not ShardState.COMMITTED and shard.done_rows:
                yield from (part.path for part in self.parts(shard.id, generation=shard.generation))

    def _rows(self, query: Any) -> list[Row[Any]]:
        def work(connection: Connection, _now: datetime) -> list[Row[Any]]:
            return list(connection.execute(query))

        return self._read(work)


def add_tags(connection: Connection, job_id: str, tenant: str, tags: Mapping[str, str]) -> None:
    """Note a new job's tags, or those of a job that has none, where jobs are looked up by them."""
    kept = {storable(key): storable(value) for key, value in tags.items()}
    rows = [{"job_id": job_id, "key": key, "value": value, "tenant_id": tenant} for key, value in kept.items()]
    if rows:
        connection.execute(insert(JobTag), rows)


def list_statement(
    *,
    caller: Caller | None = None,
    state: JobState | None = None,
    model: str | None = None,
    name: str | None = None,
    tag: tuple[str, str] | None = None,
    tenant: str | None = None,
    limit: int = 50,
    after: str | None = None,
) -> Select[Any]:
    """A page of jobs, newest first. Each filter has an index that ends with the id: a page is read, not sorted."""
    # a tag's rows are walked in the order of their ids, which are the jobs'
    order = Job.id if tag is None else JobTag.job_id
    owner = Job.tenant_id if tag is None else JobTag.tenant_id
    query = select(Job).order_by(order.desc()).limit(limit)
    if tag is not None:
        query = query.join(JobTag, JobTag.job_id == Job.id).where(JobTag.key == tag[0], JobTag.value == tag[1])
    if caller is not None:
        query = caller.only(query, owner)
    if tenant is not None:
        query = query.where(owner == tenant)
    if state is not None:
        query = query.where(Job.state == state)
    if model is not None:
        query = query.where(Job.model == model)
    if name is not None:
        query = query.where(Job.name == name)
    return query if after is None else query.where(order < after)


def stored_key(tenant: str, key: str | None) -> str | None:
    """An idempotency key as the column has it, unique over all tenants.

    The default tenant's stand as they are. No header and no tenant's name holds the unit separator.
    """
    return key if key is None or tenant == DEFAULT_TENANT else f"{tenant}{_SEPARATOR}{key}"


def _new_job(spec: JobSpec, job_id: str, idempotency_key: str | None, body_hash: str) -> dict[str, Any]:
    return {
        "id": job_id,
        "name": spec.name,
        "tags": spec.tags,
        "spec": spec.model_dump(mode="json"),
        "spec_hash": spec.fingerprint(),
        "idempotency_key": idempotency_key,
        "body_hash": body_hash,
        "model": spec.model,
        "state": JobState.VALIDATING,
        "priority": spec.priority,
        "max_attempts": spec.max_attempts,
        "deadline_at": spec.deadline,
        "budget_nanos": None if spec.budget_usd is None else usd_to_nanos(spec.budget_usd),
        "output": spec.output,
    }


def _existing(connection: Connection, values: dict[str, Any]) -> Row[Any]:
    """The job that stood in a submission's way, if it came from the same body under the same key."""
    key = values["idempotency_key"]
    job = connection.execute(select(Job).where(Job.id == values["id"])).one_or_none()
    if job is None:
        job = connection.execute(select(Job).where(Job.idempotency_key == key)).one()
    if job.idempotency_key != key or (key is None and job.body_hash != values["body_hash"]):
        raise ConflictError(f"job {job.id} exists already", code="job_exists")
    if job.body_hash != values["body_hash"]:
        raise ConflictError(
            f"idempotency key {key.rpartition(_SEPARATOR)[2]!r} created job {job.id} from another body; use a new key for a new job",
            code="idempotency_conflict",
        )
    return job
