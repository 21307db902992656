"""Planning one job under a lease, so that two planners never plan it twice."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from batchinfer.dataset.batch_lines import BatchLinesError
from batchinfer.dataset.layout import OutputLayout
from batchinfer.errors import UserError
from batchinfer.jobs.forecast import Terms, forecast_plan
from batchinfer.jobs.paths import default_output
from batchinfer.jobs.planner import plan_job
from batchinfer.jobs.status import Action
from batchinfer_workers.heartbeat import LeaseKeeper

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from batchinfer.dataset.roots import Roots
    from batchinfer.jobs.leases import PlanLease, ShardPlan
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.records import JobRecord

_log = logging.getLogger(__name__)


def run_planning(
    ledger: Ledger, lease: PlanLease, *, worker_id: str, lease_seconds: float, roots: Roots | None = None
) -> JobRecord:
    """Plan the job, or fail it with a sentence that says why it cannot run.

    Raises:
        FencedError: the lease was lost: somebody else plans the job, or it was cancelled.
    """
    job = lease.job

    def renew() -> Action:
        ledger.heartbeat_planning(job.id, lease.token, lease_seconds=lease_seconds)
        return Action.CONTINUE

    with LeaseKeeper(renew, seconds=lease_seconds / 4):
        try:
            output = job.spec.output or default_output(job.spec.inputs[0], job.id)
            if roots is not None:
                roots.check_output(output)
            plan = plan_job(job.spec, ledger.batch_terms(job.id), roots)
            OutputLayout(output, job.id).prepare()
        except BatchLinesError as error:
            ledger.set_batch_faults(job.id, [fault.as_dict() for fault in error.faults])
            return ledger.fail_planning(job.id, lease.token, error.code, error.message)
        except UserError as error:
            return ledger.fail_planning(job.id, lease.token, error.code, error.message)
        except Exception as error:  # noqa: BLE001 -- whatever it is, planning again would meet it again
            _log.exception("job %s cannot be planned", job.id)
            return ledger.fail_planning(job.id, lease.token, "planning_failed", f"{type(error).__name__}: {error}")
        shards = _Counted(plan.shards)
        planned = ledger.commit_plan(
            job.id,
            lease.token,
            num_rows=plan.num_rows,
            fingerprint=plan.fingerprint,
            warnings=plan.warnings,
            output=output,
            shards=shards,
        )
    if not job.spec.stages:  # what later stages read is not known
        _forecast(ledger, planned, shards.est_tokens - plan.num_rows * job.spec.max_tokens, worker_id)
    return planned


class _Counted:
    """Shards as they pass, and their estimated tokens in sum."""

    def __init__(self, shards: Iterable[ShardPlan]) -> None:
        self._shards = shards
        self.est_tokens = 0

    def __iter__(self) -> Iterator[ShardPlan]:
        for shard in self._shards:
            self.est_tokens += shard.est_tokens
            yield shard


def _forecast(ledger: Ledger, job: JobRecord, est_prompt_tokens: int, worker_id: str) -> None:
    """Keep what is expected of the job, so that its report can say how far off that was."""
    try:
        past = ledger.past_of(job.tenant_id, job.spec)
        terms = Terms(ledger.worker_price(worker_id), price=ledger.price_at(job.model))
        ledger.note_forecast(job, forecast_plan(job, max(0, est_prompt_tokens), past, terms))
    except Exception:  # noqa: BLE001 -- a forecast is good to have; no job fails for want of one
        _log.warning("job %s has no forecast", job.id, exc_info=True)
