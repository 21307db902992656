"""Cutting shards: they tile the input, and are about equal in estimated tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.jobs.planner import (
    BYTES_PER_TOKEN,
    MAX_SHARD_ROWS,
    MAX_SHARD_TOKENS,
    MAX_SHARDS_IN_ROW_GROUP,
    MIN_SHARD_TOKENS,
    cut_shards,
    prompt_config,
)
from batchinfer.jobs.spec import JobSpec

row_groups = st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 200_000)), max_size=12)


def as_weights(groups):
    """[(rows, bytes)] as the iterator that the source gives."""

    def weights():
        start = 0
        for rows, size in groups:
            yield start, start + rows, size
            start += rows

    return weights


@given(row_groups, st.integers(0, 4_000), st.one_of(st.none(), st.integers(1, 3_000)))
def test_shards_tile_the_input(groups, max_tokens, shard_rows):
    """Whatever the row groups: no gap, no overlap, no empty shard, indexes from 0, no more rows than asked for."""
    shards = list(cut_shards(as_weights(groups), max_tokens=max_tokens, shard_rows=shard_rows))
    covered = [row for shard in shards for row in range(shard.row_start, shard.row_end)]
    assert covered == list(range(sum(rows for rows, _ in groups)))
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert all(shard.row_end > shard.row_start for shard in shards)
    assert all(shard.row_end - shard.row_start <= (shard_rows or MAX_SHARD_ROWS) for shard in shards)


@given(row_groups, st.integers(1, 4_000))
def test_shards_hold_about_equal_work(groups, max_tokens):
    """No shard of several rows is above what was aimed at, and none but the last is far below it."""
    shards = list(cut_shards(as_weights(groups), max_tokens=max_tokens))
    total = sum(size // BYTES_PER_TOKEN + rows * max_tokens for rows, size in groups)
    target = min(max(total // 16, MIN_SHARD_TOKENS), MAX_SHARD_TOKENS)
    dearest_row = max((size // BYTES_PER_TOKEN // rows + max_tokens for rows, size in groups if rows), default=0)
    floor = max((rows for rows, _ in groups), default=0) // MAX_SHARDS_IN_ROW_GROUP
    for shard in shards:
        num_rows = shard.row_end - shard.row_start
        assert shard.est_tokens <= target or num_rows <= max(1, floor)
    for shard in shards[:-1]:
        assert shard.est_tokens > target - 2 * dearest_row or shard.row_end - shard.row_start == MAX_SHARD_ROWS


def test_a_huge_row_group_is_cut_into_few_shards():
    """Each shard decodes the row group up to its rows, so a group of 10 million rows gets no thousands of shards."""
    shards = list(cut_shards(as_weights([(10_000_000, 10**9)]), max_tokens=256))
    assert MAX_SHARDS_IN_ROW_GROUP <= len(shards) <= MAX_SHARDS_IN_ROW_GROUP + 1
    many = list(cut_shards(as_weights([(10_000, 10**6)] * 1000), max_tokens=256))
    assert len(many) > 2000, "many small row groups do not hinder small shards"


def test_a_given_number_of_rows_is_kept_to():
    """--shard-rows 4 over 10 rows: 4, 4, 2, whatever the tokens are."""
    shards = cut_shards(as_weights([(3, 10**9), (7, 0)]), max_tokens=256, shard_rows=4)
    assert [(shard.row_start, shard.row_end) for shard in shards] == [(0, 4), (4, 8), (8, 10)]


def test_a_million_rows_make_hundreds_of_shards_and_a_small_job_one():
    """Shards stay at minutes for large jobs, and a job of a few rows is not torn up."""
    large = list(cut_shards(as_weights([(10_000, 10**6)] * 100), max_tokens=256))
    assert 200 < len(large) < 400
    assert len(list(cut_shards(as_weights([(20, 2_000)]), max_tokens=256))) == 1
    assert list(cut_shards(as_weights([]), max_tokens=256)) == []


def test_the_jobs_seed_does_not_become_every_rows_seed():
    """Equal prompts with one job seed must not all get the same sample: the worker derives a seed for each row."""
    spec = JobSpec(inputs="a.parquet", model="m", seed=7, temperature=1.0, template="{{ x }}", on_null="skip")
    config = prompt_config(spec)
    assert config.params.seed is None
    assert config.params.temperature == 1.0
    assert (config.template, config.on_null) == ("{{ x }}", "skip")
