"""Which states may follow which."""

from __future__ import annotations

from itertools import product

import pytest

from batchinfer.errors import ConflictError
from batchinfer.jobs.status import JOB_TRANSITIONS, TERMINAL, JobState, check_job_transition


@pytest.mark.parametrize(("old", "new"), list(product(JobState, JobState)))
def test_illegal_transitions_are_refused_naming_both_states(old, new):
    if new in JOB_TRANSITIONS[old]:
        check_job_transition("job_1", old, new)
    else:
        with pytest.raises(ConflictError, match=f"job_1 is {old} and cannot become {new}"):
            check_job_transition("job_1", old, new)


def test_every_state_can_be_reached_and_every_job_can_end():
    """Searched over the graph: from ``validating`` to everywhere, from everywhere to an end."""

    def reachable(start: JobState) -> set[JobState]:
        seen, todo = set(), [start]
        while todo:
            for state in JOB_TRANSITIONS[todo.pop()] - seen:
                seen.add(state)
                todo.append(state)
        return seen

    assert reachable(JobState.VALIDATING) | {JobState.VALIDATING} == set(JobState)
    for state in JobState:
        assert reachable(state) & TERMINAL


def test_completed_comes_only_from_finalizing():
    """A job is done only once its manifest is out."""
    for final in (JobState.COMPLETED, JobState.EXPIRED):
        assert [old for old in JobState if final in JOB_TRANSITIONS[old]] == [JobState.FINALIZING]
