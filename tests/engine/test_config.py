"""Settings cross a process border and come back equal; a bad one is named."""

import dataclasses

import pytest

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.stats import EngineStats
from batchinfer.errors import InvalidSpecError


def test_a_config_survives_json():
    config = EngineConfig("model", dtype="bfloat16", max_model_len=100, num_kv_blocks=7, cache_dir="/tmp/x", seed=5)
    assert EngineConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("settings", "on_cpu", "on_gpu"),
    [({}, 64, 256), ({"kv_cache_dtype": "int8"}, 128, 256), ({"kv_cache_dtype": "int8", "max_num_seqs": 7}, 7, 7)],
)
def test_how_many_sequences_run_where_nobody_said(settings, on_cpu, on_gpu):
    config = EngineConfig("model", **settings)
    assert (config.max_num_seqs_on("cpu"), config.max_num_seqs_on("cuda")) == (on_cpu, on_gpu)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("dtype", "int3"),
        ("quantization", "magic"),
        ("max_model_len", 1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("block_size", 0),
        ("num_kv_blocks", 0),
        ("kv_cache_bytes", 0),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("attention_backend", "flash"),
        ("seed", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidSpecError, match=field) as caught:
        EngineConfig(**{"model": "m", field: value})
    assert caught.value.param == field


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(InvalidSpecError, match="speed"):
        EngineConfig.from_json('{"model": "m", "speed": 11}')


def test_stats_survive_a_dictionary_and_drop_what_they_do_not_know():
    stats = EngineStats(steps=4, sequence_steps=10, prompt_tokens=8, cached_tokens=2)
    assert EngineStats.from_dict(stats.to_dict() | {"newer": 1}) == stats
    assert (stats.mean_batch_size, stats.prefix_hit_rate) == (2.5, 0.25)
    assert all(field.name in stats.to_dict() for field in dataclasses.fields(stats))
