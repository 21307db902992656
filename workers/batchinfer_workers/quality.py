"""A sample of people's own rows, held against the reference precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchinfer.dataset.prompt import RowReader
from batchinfer.dataset.source import InputSource
from batchinfer.engine.process import EngineProcess
from batchinfer.errors import InputError
from batchinfer.jobs.drift import Drift
from batchinfer.jobs.planner import prompt_config
from batchinfer.jobs.stored_row import stored_rows
from batchinfer.types import Request, RowStatus
from batchinfer_workers.engine_config import engine_config
from batchinfer_workers.reference_host import ReferenceHost
from batchinfer_workers.sentinel import comparison

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.records import JobRecord
    from batchinfer.jobs.spec import JobSpec
    from batchinfer.settings import Settings

ANSWER_COLUMN = "output"


def sample_of(num_rows: int, count: int) -> list[int]:
    """``count`` rows, or all, at equal distances."""
    count = min(count, num_rows)
    return [index * num_rows // count for index in range(count)]


def check_job(
    ledger: Ledger, job: JobRecord, spec: JobSpec, settings: Settings, *, count: int, tell: Callable[[int], None]
) -> Drift:
    """Compare answers of a job with the reference, in the precision of ``spec``. ``tell`` hears of each row that is done.

    Raises:
        InputError: the input or the results cannot be read, or there is no answer to compare.
        ModelError, EngineError: the models cannot be loaded, or the engine died.
    """
    if job.spec.stages:
        raise InputError(
            f"job {job.id} has stages; one answer a row is compared: look at a file with that answer instead"
        )
    source = InputSource.reopen(job.fingerprint)
    chosen = sample_of(job.num_rows or 0, count)

    def requests() -> Iterator[Request]:
        for stored in stored_rows(job, ledger.shards(job.id), chosen):
            request = _read(job.spec, source, stored["row_index"])
            found = None if request is None else comparison(request, stored)
            if found is not None:
                yield found

    return _compare(requests(), spec, settings, tell)


def check_file(spec: JobSpec, settings: Settings, *, count: int, tell: Callable[[int], None]) -> Drift:
    """Compare rows of ``spec.inputs``: answers in a column ``output`` where there is one, else the prompts' own text.

    Raises:
        InputError: the files cannot be read as asked, or no row can be compared.
        ModelError, EngineError: the models cannot be loaded, or the engine died.
    """
    source = InputSource.open(spec.inputs, spec.limit)
    has_answers = ANSWER_COLUMN in source.schema.names

    def requests() -> Iterator[Request]:
        for index in sample_of(source.num_rows, count):
            request = _read(spec, source, index)
            if request is None or request.params.adapter is not None:  # the reference is the model alone
                continue
            if not has_answers:
                yield Request(request.request_id, prompt=request.prompt, messages=request.messages)
                continue
            _, batch = next(iter(source.iter_batches(index, index + 1, [ANSWER_COLUMN], 1)))
            answer = batch.column(0)[0].as_py()
            found = comparison(request, {"status": RowStatus.SUCCEEDED, "output": answer})
            if found is not None:
                yield found

    return _compare(requests(), spec, settings, tell)


def _read(spec: JobSpec, source: InputSource, row_index: int) -> Request | None:
    reader = RowReader(prompt_config(spec), source.schema)
    first, batch = next(iter(source.iter_batches(row_index, row_index + 1, reader.columns, 1)))
    return reader.read(batch, first)[0].request


def _compare(requests: Iterator[Request], spec: JobSpec, settings: Settings, tell: Callable[[int], None]) -> Drift:
    def start(config: Any) -> EngineProcess:
        return EngineProcess(
            settings.reference_factory,
            config,
            stall_seconds=settings.stall_seconds,
            load_timeout_seconds=settings.load_seconds,
        )

    host, drift = ReferenceHost(start), Drift()
    try:
        for completion in host.compare(engine_config(spec, settings), requests):
            if completion.status is RowStatus.SUCCEEDED:
                drift.add_row(int(completion.request_id), completion.extra["drift"])
            tell(1)
    finally:
        host.close()
    if not drift.num_tokens:
        raise InputError("no row has an answer or a prompt that could be compared")
    return drift
