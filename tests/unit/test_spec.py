"""JobSpec and SamplingParams refuse what cannot run, and survive storage unchanged."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from batchinfer.jobs.spec import JobSpec, parse_deadline
from batchinfer.sampling_params import SamplingParams

NOW = datetime(2026, 3, 29, 0, 30, tzinfo=UTC)


def spec(**fields):
    return JobSpec(**{"inputs": "prompts.parquet", "model": "m", **fields})


@given(
    max_tokens=st.integers(0, 10**6),
    temperature=st.floats(0, 100),
    stop=st.lists(st.text(min_size=1, max_size=20), max_size=4),
    seed=st.none() | st.integers(0, 2**63 - 1),
    tags=st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=3),
    logit_bias=st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=4),
)
def test_a_stored_spec_reads_back_equal(max_tokens, temperature, stop, seed, tags, logit_bias):
    """A resume uses the stored spec, so storing must lose nothing, and the fingerprint must not move."""
    before = spec(
        max_tokens=max_tokens, temperature=temperature, stop=tuple(stop), seed=seed, tags=tags, logit_bias=logit_bias
    )
    after = JobSpec.model_validate_json(before.model_dump_json())
    assert after == before
    assert after.fingerprint() == before.fingerprint()


def test_any_other_field_changes_the_fingerprint():
    assert spec(max_tokens=5).fingerprint() != spec(max_tokens=6).fingerprint()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens (9) is above max_tokens (3)"),
        ({"stop": ["", "x"]}, "stop string"),
        ({"prompt_column": "a", "template": "{{ b }}"}, "prompt_column and template exclude each other"),
        ({"inputs": []}, "inputs"),
        ({"deadline": "tomorrow"}, "neither a duration such as 6h nor an ISO 8601 time"),
        ({"deadline": "2026-01-01T00:00:00"}, "no time zone"),
        ({"budget_usd": "-3"}, "budget_usd"),
        ({"temperatur": 1}, "temperatur"),
        ({"temperature": float("nan")}, "temperature"),
        ({"logit_bias": {3: 101}}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"bad_words": ["x", " "]}, "bad_words must be at most 1024 words, none of them empty"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields, names):
    with pytest.raises(ValidationError) as failure:
        spec(**fields)
    assert names in str(failure.value)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90s", NOW + timedelta(seconds=90)),
        ("6h", NOW + timedelta(hours=6)),
        ("2d", NOW + timedelta(days=2)),
        # a day in UTC is 24 hours, also on the night when Europe's clocks go forward
        ("1d", datetime(2026, 3, 30, 0, 30, tzinfo=UTC)),
        ("2026-04-01T06:00:00+03:00", datetime(2026, 4, 1, 3, 0, tzinfo=UTC)),
    ],
)
def test_a_deadline_is_a_duration_or_a_moment(text, moment):
    assert parse_deadline(text, NOW) == moment


def test_one_stop_string_may_stand_without_a_list():
    assert SamplingParams(stop="END").stop == ("END",)
    assert spec(stop="END").sampling_params().stop == ("END",)


@pytest.mark.parametrize(
    ("params", "greedy"), [({}, True), ({"temperature": 1}, False), ({"temperature": 1, "top_k": 1}, True)]
)
def test_greedy_is_temperature_zero_or_one_candidate(params, greedy):
    assert SamplingParams(**params).is_greedy is greedy


def test_result_columns_are_those_that_the_parameters_fill():
    assert spec().result_columns() == ()
    assert spec(logprobs=0).result_columns() == ("logprobs", "cumulative_logprob")
    assert spec(prompt_logprobs=3, n=2, temperature=1).result_columns() == ("prompt_logprobs", "samples")
    assert spec(best_of=2, temperature=1).result_columns() == ("cumulative_logprob", "samples")


def test_response_format_is_json_schema_by_another_name():
    schema = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"const": None}}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    for job in (spec(response_format=asked), spec(json_schema=schema), spec(json_schema=asked)):
        assert job.json_schema == '{"type":"object","properties":{"z":{"type":"integer"},"a":{"const":null}}}'
        assert JobSpec.model_validate_json(job.model_dump_json()) == job
    assert spec(response_format={"type": "text"}).json_schema is None
    with pytest.raises(ValidationError, match="json_schema and response_format exclude each other"):
        spec(response_format=asked, json_schema=schema)
    with pytest.raises(ValidationError, match=r"beam search \(beam_width 2\) goes without json_schema"):
        spec(json_schema=schema, beam_width=2)
