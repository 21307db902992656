"""The bound of the admission rule against a simulation that steps through time."""

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.admission import Demand, peak_blocks

DEMANDS = st.lists(st.builds(Demand, st.integers(1, 40), st.integers(1, 30), st.just(0), st.just(0)), min_size=1)


def simulated_peak(demands, block_size):
    """All sequences get one token a step until they end; the most blocks held after any step."""
    peak = 0
    for step in range(1, max(d.remaining for d in demands) + 1):
        alive = [d for d in demands if d.remaining >= step]
        # after a step the token just sampled has no KV yet
        peak = max(peak, sum(-(-(d.num_tokens + step - 1) // block_size) for d in alive))
    return peak


@given(demands=DEMANDS, block_size=st.integers(1, 20))
def test_the_bound_is_exact_for_sequences_that_decode(demands, block_size):
    assert peak_blocks(demands, block_size) == simulated_peak(demands, block_size)


@given(demands=DEMANDS, delays=st.lists(st.integers(0, 10)), block_size=st.integers(1, 20))
def test_a_delayed_sequence_never_lowers_the_bound(demands, delays, block_size):
    """Its prompt is still to be computed: it lives longer, beside sequences that would have come after it."""
    delayed = [
        Demand(d.num_tokens, d.remaining, delay, 0)
        for d, delay in zip(demands, delays + [0] * len(demands), strict=False)
    ]
    assert peak_blocks(delayed, block_size) >= peak_blocks(demands, block_size)


def test_lightllms_formula_in_blocks_of_one_token():
    """Sorted by what remains: max_i(rem_i * i + sum of used_1..i), here with used = 9, 3, 4 and rem = 10, 5, 1."""
    demands = [Demand(10, 10, 0, 0), Demand(4, 5, 0, 0), Demand(5, 1, 0, 0)]
    assert peak_blocks(demands, 1) == max(10 * 1 + 9, 5 * 2 + 9 + 3, 1 * 3 + 9 + 3 + 4)


def test_a_shared_block_counts_once():
    both = [Demand(9, 4, 0, 0), Demand(9, 4, 0, 2)]
    assert peak_blocks(both, 4) == 3 + 3 - 2
