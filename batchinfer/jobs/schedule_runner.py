"""One look at the schedules: fire what is due, start what waits. Any number of workers may look at once."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from batchinfer.errors import ConflictError, InputError, UserError
from batchinfer.jobs.ids import new_job_id
from batchinfer.jobs.model_pins import ModelPins
from batchinfer.jobs.paths import check_output_is_free, resolve_paths
from batchinfer.jobs.schedule_records import RunState
from batchinfer.jobs.schedule_spec import MissingInput, Overlap, render_job
from batchinfer.jobs.schedule_template import variables

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.dataset.roots import Roots
    from batchinfer.jobs.dispatch import Dispatcher
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.schedule_firing import Claim, Firing
    from batchinfer.jobs.spec import JobSpec

LOOK_SECONDS = 15.0
"""How often a run looks for an input that is awaited."""
PATIENCE = timedelta(minutes=15)
"""How long a store that cannot be listed is asked again, before the run fails."""
MAX_ROUNDS = 16
"""Most runs of one queue that one look starts."""
_log = logging.getLogger(__name__)


class ScheduleRunner:
    """Turns due moments into runs and runs into jobs."""

    def __init__(
        self,
        firing: Firing,
        ledger: Ledger,
        dispatcher: Dispatcher,
        *,
        roots_of: Callable[[str], Roots] | None = None,
    ) -> None:
        """``roots_of`` says where a tenant may read and write; None: everywhere."""
        self._firing = firing
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._roots_of = roots_of

    def tick(self) -> None:
        """Look once."""
        if fired := self._firing.fire_due():
            _log.info("%s scheduled runs are due", fired)
        self._firing.settle()
        for _ in range(MAX_ROUNDS):
            claims = self._firing.claim_all()
            if not claims:
                return
            for claim in claims:
                self._start(claim)

    def _start(self, claim: Claim) -> None:
        """Give a claimed run its job, or say why it has none."""
        job_id = new_job_id()
        try:
            # at each run: a pin that was moved counts from the next run on
            spec = ModelPins(self._ledger.engine).resolve(self._render(claim))
            spec = resolve_paths(spec, base=None, job_id=job_id, must_exist=False)
            assert spec.output is not None
            self._check_roots(claim.schedule.tenant, spec)
            check_output_is_free(spec.output)
        except UserError as error:
            self._end(claim, RunState.FAILED, error.message)
            return
        if self._has_input(claim, spec):
            self._launch(claim, spec, job_id)

    def _check_roots(self, tenant: str, spec: JobSpec) -> None:
        """Before anything is looked at: whether a file of somebody else is there is no business of this tenant."""
        if self._roots_of is None:
            return
        # uploaded files lie side by side, and belong to jobs that name them
        roots = replace(self._roots_of(tenant), own=None)
        for path in spec.inputs:
            roots.check_input(path)
        assert spec.output is not None
        roots.check_output(spec.output)
        roots.check_model(spec.model)
        for folder in (spec.adapter, spec.adapter_folder):
            if folder is not None:
                roots.check_adapter(folder)

    def _render(self, claim: Claim) -> JobSpec:
        schedule, run = claim.schedule, claim.run
        values = variables(schedule.calendar, run.logical_date, run_id=run.run_id, schedule=schedule.name)
        spec = render_job(schedule.job, values)
        return spec.model_copy(
            update={"name": spec.name or schedule.name, "tags": {"schedule": schedule.name, **spec.tags}}
        )

    def _has_input(self, claim: Claim, spec: JobSpec) -> bool:
        """Whether the input is there; if not, the run is dealt with as its schedule says."""
        from batchinfer.dataset.listing import INPUT_MISSING, find_files  # noqa: PLC0415 -- pyarrow loads when it is used

        try:
            find_files(spec.inputs)
        except InputError as error:
            if error.code == INPUT_MISSING:
                self._miss(claim, error.message)
            else:
                self._be_patient(claim, error.message)
            return False
        except OSError as error:
            self._be_patient(claim, f"the input cannot be listed: {error}")
            return False
        return True

    def _miss(self, claim: Claim, message: str) -> None:
        schedule, run = claim.schedule, claim.run
        if schedule.missing_input is MissingInput.SKIP:
            self._end(claim, RunState.SKIPPED, message)
        elif schedule.missing_input is MissingInput.WAIT and claim.at < run.created_at + timedelta(
            seconds=schedule.wait_seconds
        ):
            self._firing.postpone(claim, LOOK_SECONDS, f"waits for its input: {message}")
        else:
            self._end(claim, RunState.FAILED, message)

    def _be_patient(self, claim: Claim, message: str) -> None:
        """A store that is away is no missing input."""
        if claim.at < claim.run.created_at + PATIENCE:
            self._firing.postpone(claim, LOOK_SECONDS, message)
        else:
            self._end(claim, RunState.FAILED, message)

    def _launch(self, claim: Claim, spec: JobSpec, job_id: str) -> None:
        launch = self._firing.launch(claim, spec, job_id)
        if launch.blocked_by:
            overlap = claim.schedule.overlap
            if claim.run.backfill_id is not None or overlap is Overlap.QUEUE:
                self._firing.postpone(claim, 0, "waits for earlier runs")
                return
            if overlap is Overlap.SKIP:
                self._end(claim, RunState.SKIPPED, f"job {launch.blocked_by[0]} of an earlier run is still at work")
                return
            self._cancel(launch.blocked_by[: len(launch.blocked_by) - claim.schedule.max_active + 1])
            launch = self._firing.launch(claim, spec, job_id)
            if launch.blocked_by:
                self._firing.postpone(claim, 1, "waits until earlier runs are cancelled")
        if launch.is_started:
            _log.info("schedule %s: job %s for %s", claim.schedule.name, job_id, claim.run.logical_date.isoformat())
            self._dispatcher.wake_planner(job_id)

    def _cancel(self, job_ids: tuple[str, ...]) -> None:
        for job_id in job_ids:
            try:
                self._ledger.cancel(job_id)
            except ConflictError as error:  # it has just ended by itself
                _log.info("%s", error)

    def _end(self, claim: Claim, state: RunState, message: str) -> None:
        _log.warning(
            "schedule %s: the run of %s is %s: %s",
            claim.schedule.name, claim.run.logical_date.isoformat(), state, message,
        )  # fmt: skip
        self._firing.end(claim, state, message)
