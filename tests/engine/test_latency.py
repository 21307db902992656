"""How long rows wait, by a clock that is moved by hand."""

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.latency import Latency
from batchinfer.engine.sequence import Sequence
from batchinfer.sampling_params import SamplingParams


class Clock:
    """Stands still until it is moved; a clock never reads 0."""

    now = 1_000

    def __call__(self):
        return self.now


def sequence(num_prompt_tokens=3):
    params = SamplingParams(max_tokens=100)
    return Sequence("r", params, [1] * num_prompt_tokens, num_prompt_tokens, 100, 0, 0, b"", None)


def run(latency, clock, row, waits):
    """The row comes, waits for its first token, then for each further one; the last wait is for its end."""
    latency.arrived(row)
    for wait in waits:
        clock.now += wait
        row.token_ids.append(7)
        latency.first(row)
    latency.ended(row)


def test_the_first_token_and_the_later_ones_are_kept_apart():
    clock = Clock()
    latency = Latency(clock)
    run(latency, clock, sequence(), [50, 3, 4, 5])
    assert latency.figures() == {"first_tokens": 1, "first_token_ns": 50, "later_tokens": 3, "later_token_ns": 12}


def test_rows_that_overlap_each_have_their_own_time():
    clock = Clock()
    latency = Latency(clock)
    old, young = sequence(), sequence()
    latency.arrived(old)
    clock.now += 10
    latency.arrived(young)
    clock.now += 5
    for row in (old, young):
        row.token_ids.append(7)
        latency.first(row)
    clock.now += 20
    old.token_ids.append(7)
    latency.ended(old)
    latency.ended(young)  # one token: there is no later one to wait for
    assert latency.figures() == {"first_tokens": 2, "first_token_ns": 20, "later_tokens": 1, "later_token_ns": 20}


def test_a_preempted_row_has_had_its_first_token():
    """It computes its tokens again, and is told of a token once more: that is none of the first ones."""
    clock = Clock()
    latency = Latency(clock)
    row = sequence()
    run(latency, clock, row, [50])
    row.num_computed_tokens = 0
    clock.now += 1_000
    latency.first(row)
    assert latency.figures()["first_token_ns"] == 50
    assert latency.figures()["first_tokens"] == 1


def test_a_row_that_never_got_a_token_or_never_waited_counts_for_nothing():
    latency = Latency(Clock())
    waited, unseen = sequence(), sequence()
    latency.arrived(waited)
    latency.ended(waited)
    latency.first(unseen)
    latency.ended(unseen)
    assert set(latency.figures().values()) == {0}


@given(st.lists(st.lists(st.integers(0, 10**9), min_size=1, max_size=5), max_size=8))
def test_sums_over_rows_one_after_another(rows):
    clock = Clock()
    latency = Latency(clock)
    for waits in rows:
        run(latency, clock, sequence(), waits)
    assert latency.figures() == {
        "first_tokens": len(rows),
        "first_token_ns": sum(waits[0] for waits in rows),
        "later_tokens": sum(len(waits) - 1 for waits in rows),
        "later_token_ns": sum(sum(waits[1:]) for waits in rows),
    }
