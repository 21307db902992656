"""Batches: jobs that came, and are seen, through the OpenAI door."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from batchinfer.errors import InputError, InvalidSpecError, NotFoundError
from batchinfer.jobs.batch_view import batch_id_of, batch_object, job_id_of
from batchinfer.jobs.files import BATCH, MAX_EXPIRY_S, MIN_EXPIRY_S
from batchinfer.jobs.ids import new_job_id
from batchinfer.jobs.ledger_files import BatchTerms, attach_batch
from batchinfer.jobs.openai_views import BatchList, BatchObject, page
from batchinfer.jobs.spec import JobSpec, RowColumn
from batchinfer.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection

    from batchinfer.jobs.files import FileStore
    from batchinfer.jobs.ledger_files import BatchRecord
    from batchinfer.jobs.service import JobService

MAX_METADATA = 16
MAX_WINDOW = timedelta(days=366)
NO_MODEL = "unnamed"
"""Stands for the model of a batch whose first lines name none; its check then fails it, line by line."""
_WINDOW = re.compile(r"([1-9]\d{0,4})(h|d)", re.ASCII)
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # what a request without these fields asks OpenAI for, except that an endless answer is not
    "/v1/chat/completions": {"temperature": 1.0, "max_tokens": 1024},
    "/v1/completions": {"temperature": 1.0, "max_tokens": 16},
    "/v1/embeddings": {"task": Task.EMBED, "embedding_lists": True, "include_columns": ()},
}
_FIXED = frozenset(
    {"inputs", "output", "model", "tags", "deadline", "prompt_column", "messages_column", "template", "system",
     "id_column", "on_null", "column_prefix", "limit", "task", "embedding_lists"}
)  # fmt: skip
"""Fields of a job that the batch itself decides."""


class BatchService:
    """Makes, finds and cancels batches. ``models`` maps names that clients use to models that the server loads."""

    def __init__(self, service: JobService, files: FileStore, models: Mapping[str, str]) -> None:
        self._service = service
        self._caller = service.caller
        self._ledger = service.ledger
        self._files = files
        self._models = models

    def create(
        self, *, input_file_id: str, endpoint: str, completion_window: str,
        metadata: Mapping[str, str] | None, output_expires_s: int | None, options: Mapping[str, Any],
        idempotency_key: str | None, body: Any,
    ) -> BatchObject:  # fmt: skip
        """Make a batch of an uploaded file: a job whose rows are the file's lines.

        ``options`` are fields of :class:`JobSpec` such as ``priority`` or ``budget_usd``.

        Raises:
            NotFoundError: no such file.
            InvalidSpecError: a field is wrong.
        """
        _check_endpoint(endpoint)
        window = parse_window(completion_window)
        _check_metadata(metadata or {})
        _check_expiry(output_expires_s)
        file = self._files.get(self._caller, input_file_id)
        if file.purpose != BATCH:
            raise InvalidSpecError(
                f"file {file.id} has the purpose {file.purpose!r}; a batch needs one of purpose 'batch'",
                param="input_file_id",
            )
        model = self._model_of(file.location)
        job_id = new_job_id()
        spec = _spec({
            "include_columns": tuple(RowColumn), **_DEFAULTS.get(endpoint, {}), **_checked(options), "inputs": (file.id,),
            "model": self._models.get(model, model), "tags": dict(metadata or {}), "deadline": datetime.now(UTC) + window,
        })  # fmt: skip
        spec, attach_inputs = self._files.use_inputs(self._caller, spec, job_id)
        terms = BatchTerms(
            self._caller.home, endpoint, file.id, completion_window, model, dict(metadata or {}), output_expires_s
        )

        def attach(connection: Connection, new_id: str) -> None:
            attach_inputs(connection, new_id)
            attach_batch(connection, new_id, terms)

        view, _ = self._service.submit(
            spec, base=None, idempotency_key=idempotency_key, body=body, job_id=job_id, attach=attach
        )
        return self.get(batch_id_of(view.id))

    @staticmethod
    def _model_of(location: str) -> str:
        from batchinfer.dataset.batch_lines import find_model  # noqa: PLC0415 -- pyarrow loads when a file is read

        try:
            return find_model(location) or NO_MODEL
        except OSError as error:
            raise InputError(f"the file cannot be read from this machine: {error}", param="input_file_id") from None

    def get(self, batch_id: str) -> BatchObject:
        """Raises NotFoundError."""
        return batch_object(self._find(batch_id))

    def list(self, *, limit: int, after: str | None) -> BatchList:
        """A page, newest first. Raises NotFoundError if ``after`` is no batch."""
        last = None if after is None else self._find(after).job.id
        found = self._ledger.list_batches(self._caller, limit=limit + 1, after=last)
        return BatchList(**page([batch_object(batch) for batch in found[:limit]], has_more=len(found) > limit))

    def cancel(self, batch_id: str) -> BatchObject:
        """Cancel; requests that ended are kept. Raises NotFoundError, ConflictError."""
        self._service.cancel(self._find(batch_id).job.id)
        return self.get(batch_id)

    def _find(self, batch_id: str) -> BatchRecord:
        job_id = job_id_of(batch_id)
        found = None if job_id is None else self._ledger.get_batch(self._caller, job_id)
        if found is None:
            raise NotFoundError(f"no batch {batch_id[:60]!r}; GET /v1/batches lists them", param="batch_id")
        return found


def parse_window(text: str) -> timedelta:
    """Read ``24h`` or ``7d``. Raises InvalidSpecError."""
    match = _WINDOW.fullmatch(text)
    window = timedelta() if match is None else timedelta(**{{"h": "hours", "d": "days"}[match[2]]: int(match[1])})
    if not timedelta() < window <= MAX_WINDOW:
        raise InvalidSpecError(
            f"completion_window {text[:40]!r} is not hours or days up to {MAX_WINDOW.days}d, such as 24h or 7d",
            param="completion_window",
        )
    return window


def _check_endpoint(endpoint: str) -> None:
    from batchinfer.dataset.openai_results import ENDPOINTS  # noqa: PLC0415 -- pyarrow loads when a batch is made

    if endpoint not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        raise InvalidSpecError(f"endpoint {endpoint[:60]!r} is not served; there are: {known}", param="endpoint")


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidSpecError(f"metadata has {len(metadata)} pairs; at most {MAX_METADATA}", param="metadata")


def _check_expiry(seconds: int | None) -> None:
    if seconds is not None and not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise InvalidSpecError(
            f"output_expires_after.seconds is {MIN_EXPIRY_S} to {MAX_EXPIRY_S}, got {seconds}",
            param="output_expires_after",
        )


def _checked(options: Mapping[str, Any]) -> Mapping[str, Any]:
    wrong = [name for name in options if name in _FIXED or name not in JobSpec.model_fields]
    if wrong:
        raise InvalidSpecError(f"a batch takes no option {wrong[0][:40]!r}", param=f"job.{wrong[0][:40]}")
    return options


def _spec(fields: Mapping[str, Any]) -> JobSpec:
    try:
        return JobSpec(**fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(str(part) for part in fault["loc"])
        param = name.replace("tags", "metadata") if name.startswith("tags") else f"job.{name}"
        raise InvalidSpecError(f"{param}: {fault['msg'].removeprefix('Value error, ')}", param=param) from None
