"""What a job asks for and what the machine has become one engine's configuration."""

import pytest

from batchinfer.jobs.spec import JobSpec
from batchinfer.settings import Settings
from batchinfer_workers.engine_config import engine_config


@pytest.mark.parametrize(("asked", "made"), [({}, "off"), ({"speculation": "ngram"}, "auto")])
def test_guessing_is_the_jobs_to_ask_for_and_on_only_where_it_pays(asked, made):
    assert engine_config(JobSpec(inputs="i", model="m", **asked), Settings()).speculation == made


def test_the_token_budget_is_the_machines():
    spec = JobSpec(inputs="i", model="m")
    assert engine_config(spec, Settings()).max_num_batched_tokens is None
    assert engine_config(spec, Settings(max_num_batched_tokens=96)).max_num_batched_tokens == 96
    assert not engine_config(spec, Settings(calibrate=False)).calibrate


def test_what_a_gpu_is_told_is_the_machines():
    spec = JobSpec(inputs="i", model="m", max_model_len=4096)
    made = engine_config(
        spec,
        Settings(gpu_memory_utilization=0.5, enforce_eager=True, enable_prefix_caching=False, max_num_seqs=256),
    )
    assert (made.gpu_memory_utilization, made.enforce_eager, made.enable_prefix_caching) == (0.5, True, False)
    assert (made.max_num_seqs, made.max_model_len) == (256, 4096)
    plain = engine_config(spec, Settings())
    assert (plain.gpu_memory_utilization, plain.enforce_eager, plain.enable_prefix_caching) == (0.9, False, True)


def test_how_many_devices_a_model_is_divided_over_is_the_machines():
    spec = JobSpec(inputs="i", model="m")
    assert engine_config(spec, Settings()).tensor_parallel_size == 1
    assert engine_config(spec, Settings(tensor_parallel_size=4)).tensor_parallel_size == 4
