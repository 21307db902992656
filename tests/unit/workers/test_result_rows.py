"""Rows' outcomes: seeds, costs, error rows."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.money import NS_PER_HOUR, Price
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Completion, ErrorCode, FinishReason, RowError, RowStatus, Usage
from batchinfer_workers.result_rows import ResultRows, row_seed, with_seed


def make_rows(price=None, nanos_per_hour=123_456_789, token_ids=False):
    spec = SimpleNamespace(result_columns=lambda: ("token_ids",) if token_ids else ())
    job = SimpleNamespace(model="m", spec=spec)
    return ResultRows(SimpleNamespace(job=job, attempt_number=2, nanos_per_hour=nanos_per_hour), price)


def completion(row, device_ns=0, **values):
    return Completion(f"1:{row}", RowStatus.SUCCEEDED, device_ns=device_ns, **values)


@given(st.lists(st.integers(0, 10**10), max_size=30), st.integers(0, 10**12))
def test_costs_of_rows_sum_exactly(times, nanos_per_hour):
    """However device time is cut into rows, their costs are the cost of the whole, to the nano-dollar."""
    rows = make_rows(nanos_per_hour=nanos_per_hour)
    total = sum(rows.completed(completion(row, time)).cost_nanos for row, time in enumerate(times))
    assert total == sum(times) * nanos_per_hour // NS_PER_HOUR == rows.metered_nanos


def test_an_answer_carries_its_usage_list_price_and_warnings():
    """3 prompt tokens of which 1 cached, 2 generated, at 1, 0.5 and 4 dollars a million."""
    rows = make_rows(Price(10**9, 5 * 10**8, 4 * 10**9), token_ids=True)
    usage = Usage(3, 1, 2)
    row = rows.completed(
        completion(7, text="hi", token_ids=(4, 5), usage=usage, finish_reason=FinishReason.STOP, clamped_max_tokens=9),
        ("text_replaced",),
    )
    assert (row.row_index, row.status, row.output, row.model, row.attempt) == (7, RowStatus.SUCCEEDED, "hi", "m", 2)
    assert row.list_cost_nanos == 2 * 1000 + 1 * 500 + 2 * 4000
    assert (row.extra, row.clamped_max_tokens, row.warnings) == ({"token_ids": (4, 5)}, 9, ("text_replaced",))


def test_without_a_price_there_is_no_list_cost_and_token_ids_only_on_request():
    row = make_rows().completed(completion(1, token_ids=(1,)))
    assert row.list_cost_nanos is None
    assert "token_ids" not in row.extra


def test_rows_that_never_reach_the_engine_cost_nothing():
    rows = make_rows(Price(1, 1, 1))
    error = RowError(ErrorCode.EMPTY_PROMPT, "empty")
    made = [
        rows.errored(1, error),
        rows.skipped(2),
        rows.lost(3),
        rows.closed(4, RowStatus.CANCELLED),
        rows.closed(5, RowStatus.EXPIRED),
    ]
    assert [row.status for row in made] == ["errored", "skipped", "errored", "cancelled", "expired"]
    codes = [row.error.code if row.error else None for row in made]
    assert codes == ["empty_prompt", None, "worker_lost", "job_cancelled", "deadline_exceeded"]
    assert {(row.cost_nanos, row.list_cost_nanos, row.output) for row in made} == {(0, 0, None)}


def test_a_failed_row_has_no_output_but_its_cost():
    error = RowError(ErrorCode.ENGINE_ERROR, "no")
    failed = Completion("1:3", RowStatus.ERRORED, text="half", error=error, device_ns=NS_PER_HOUR)
    row = make_rows(nanos_per_hour=50).completed(failed)
    assert (row.output, row.error, row.cost_nanos) == (None, error, 50)


def test_seeds_are_the_rows_own():
    """An unseeded row gets a seed from the job's seed and its index: stable, distinct, in range; a greedy one needs none."""
    sampled = SamplingParams(temperature=1.0)
    assert with_seed(sampled, 1, 5) == with_seed(sampled, 1, 5)
    seeds = {with_seed(sampled, job_seed, row).seed for job_seed in (0, 1, 2) for row in range(1000)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(None, 3) == row_seed(0, 3)
    own = SamplingParams(temperature=1.0, seed=42)
    greedy = SamplingParams()
    assert with_seed(own, 1, 5) is own
    assert with_seed(greedy, 1, 5) is greedy
