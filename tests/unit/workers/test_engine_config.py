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
