"""The sentinel: a share of a shard's answers, held against the reference precision before the shard is committed."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.errors import BatchInferError
from batchinfer.jobs.drift import Drift
from batchinfer.jobs.leases import SentinelFound
from batchinfer.jobs.stored_row import rows_of_file
from batchinfer.types import Request, RowStatus, SampleProgress
from batchinfer_workers.engine_config import engine_config
from batchinfer_workers.remaining import RemainingRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from batchinfer.jobs.leases import Lease, ShardResult
    from batchinfer.settings import Settings
    from batchinfer_workers.reference_host import ReferenceHost
    from batchinfer_workers.shard_files import ShardFiles

_log = logging.getLogger(__name__)


def is_chosen(row_index: int, share: float) -> bool:
    """Whether a row is among the share that is compared: always the same rows, spread like random ones."""
    digest = hashlib.blake2b(str(row_index).encode(), digest_size=8, person=b"sentinel").digest()
    return int.from_bytes(digest) < share * 2**64


def comparison(request: Request, stored: Mapping[str, Any]) -> Request | None:
    """What the reference engine is to compare of a stored result row; None where there is no answer, or an adapter's."""
    if request.params.adapter is not None:  # the reference is the model alone
        return None
    if stored["status"] != RowStatus.SUCCEEDED or not stored["output"]:
        return None
    request_id, prompt, messages = request.request_id, request.prompt, request.messages
    if token_ids := stored.get("token_ids"):
        return Request(request_id, prompt=prompt, messages=messages, progress=(SampleProgress(tuple(token_ids)),))
    answer = stored["output"].removeprefix(prompt) if request.params.echo and prompt else stored["output"]
    return Request(request_id, prompt=prompt, messages=messages, answer=answer)


@dataclass(slots=True)
class Sentinel:
    """Looks at finished shards of one attempt. ``device_ns`` is what that took, in nanoseconds, loading included."""

    host: ReferenceHost
    settings: Settings
    lease: Lease
    device_ns: int = 0

    def check(self, files: ShardFiles, result: ShardResult, check_stop: Callable[[], None]) -> SentinelFound | None:
        """Compare the chosen rows of a merged shard; None if the job does not want it, or this is a retry.

        Trouble with the reference engine is told, not raised: the job's answers are there all the same.
        """
        spec, shard = self.lease.job.spec, self.lease.shard
        if not spec.sentinel or self.lease.generation:
            return None
        chosen = [row for row in range(shard.row_start, shard.row_end) if is_chosen(row, spec.sentinel)]
        drift = Drift()
        try:
            requests = self._requests(files, result, chosen)
            config = engine_config(spec, self.settings)
            for completion in self.host.compare(config, requests, check_stop=check_stop) if chosen else ():
                self.device_ns += completion.device_ns
                if completion.status is RowStatus.SUCCEEDED:
                    drift.add_row(int(completion.request_id), completion.extra["drift"])
        except BatchInferError as error:
            check_stop()
            _log.warning("the sentinel of job %s could not compare: %s", self.lease.job.id, error)
            return SentinelFound(drift.to_dict(), f"the sentinel could not compare all of its rows: {error}")
        finally:
            self.device_ns += self.host.unbilled_ns
            self.host.unbilled_ns = 0
        return SentinelFound(drift.to_dict())

    def _requests(self, files: ShardFiles, result: ShardResult, chosen: list[int]) -> Iterator[Request]:
        shard = self.lease.shard
        stored = rows_of_file(result.path, self.lease.job.spec.column_prefix, shard.row_start, chosen)
        inputs = files.read(RemainingRows(shard.row_start, shard.row_end, chosen))
        for row, outcome in zip(inputs, stored, strict=True):
            request = None if row.request is None else comparison(row.request, outcome)
            if request is not None:
                yield request
