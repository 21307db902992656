"""Sketches against counting by hand: exact while things are few, bounded and honest when they are many."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.jobs.sketches import (
    BLOCK_TOKENS,
    CacheModel,
    DistinctCounter,
    Histogram,
    PrefixTree,
    SharedPrefix,
    chain,
    common_suffix,
)

PROMPTS = st.lists(
    st.lists(st.sampled_from([0, 1]), min_size=0, max_size=4).map(lambda bits: [b for b in bits for _ in range(16)]),
    max_size=12,
)


def shared_by_hand(prompts):
    """Tokens of blocks that an earlier prompt has with all before them, the last token left out."""
    seen, shared = set(), 0
    for tokens in prompts:
        for end in range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
            shared += BLOCK_TOKENS * (tuple(tokens[:end]) in seen)
            seen.add(tuple(tokens[:end]))
    return shared


@given(PROMPTS)
def test_sharing_is_counted_as_by_hand(prompts):
    tree = PrefixTree()
    for row, tokens in enumerate(prompts):
        tree.add(chain(tokens), row)
    assert tree.shared_tokens == shared_by_hand(prompts)
    assert tree.is_exact


@given(PROMPTS, st.integers(1, 12))
def test_a_cache_that_is_large_enough_hits_all_that_is_shared(prompts, window):
    cache = CacheModel(1000, window)
    for tokens in prompts:
        cache.add(chain(tokens))
    cache.flush()
    assert cache.hit_tokens == shared_by_hand(prompts)


def test_a_small_cache_hits_what_comes_close_together():
    """Two documents in turn: a cache of one document's blocks needs a window to sort them."""
    one, other = [1] * 33, [2] * 33
    prompts = [one, other] * 4
    unsorted, sorted_ = CacheModel(2, window_rows=1), CacheModel(2, window_rows=8)
    for tokens in prompts:
        unsorted.add(chain(tokens))
        sorted_.add(chain(tokens))
    unsorted.flush()
    sorted_.flush()
    assert unsorted.hit_tokens == 0
    assert sorted_.hit_tokens == 6 * 32


def test_the_last_token_is_never_cached():
    assert len(chain([1] * 16)) == 0
    assert len(chain([1] * 17)) == 1
    assert len(chain([])) == 0


def test_the_best_groups_are_named_once():
    """A long prefix of few and a short one of many; what lies inside a group is not named again."""
    tree = PrefixTree()
    for row in range(10):
        tail = [7] * 32 if row < 4 else [100 + row] * 32
        tree.add(chain([1] * 32 + tail + [row]), row)
    assert tree.top() == [SharedPrefix(32, 10, 0), SharedPrefix(64, 4, 0)]


def test_a_full_tree_keeps_what_many_share_and_says_that_it_forgot():
    tree, popular = PrefixTree(max_nodes=100), chain([1] * 33)
    random = Random(3)
    for row in range(3000):
        tree.add(popular if row % 3 == 0 else chain([random.randrange(10**9) for _ in range(33)]), row)
    assert not tree.is_exact
    assert len(tree._nodes) <= 100 + 2
    # 1,000 prompts of two blocks, of which the first had nothing to share
    assert tree.shared_tokens == 999 * 32


@pytest.mark.parametrize(("number", "tolerance"), [(50, 0), (1000, 0), (20_000, 0.06), (100_000, 0.06)])
def test_distinct_keys(number, tolerance):
    """1,024 kept hashes: exact below, and about 3 % standard error beyond."""
    counter = DistinctCounter(1024)
    for _ in range(2):
        for key in range(number):
            counter.add(str(key).encode())
    assert abs(counter.number - number) <= tolerance * number * 2
    assert counter.is_exact == (number < 1024)
    assert len(counter._kept) <= 1024


@given(st.lists(st.integers(0, 10**6)))
def test_histogram_has_each_value_in_its_bucket(values):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    buckets = histogram.buckets()
    expected = Counter(next(i for i, (low, high, _) in enumerate(buckets) if low <= v <= high) for v in values)
    assert [count for _, _, count in buckets] == [expected[i] for i in range(len(buckets))]
    assert histogram.largest == max(values, default=0)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_suffix(one, other):
    found = common_suffix(one, other)
    n = len(found)
    assert one[len(one) - n :] == other[len(other) - n :] == found
    assert n in (len(one), len(other)) or one[-n - 1] != other[-n - 1]
