"""Rows with random mixes of features, in one tight engine: each gives the bytes that it gives alone in a roomy one."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import build_engine
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request, RowStatus
from tests.engine.chat_templates import HERMES
from tests.engine.fakes import drain
from tests.engine.test_core import by_id

TOOL = {
    "name": "f",
    "parameters": {"properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False},
}
GUIDES = [
    {"guided_regex": "[a-c]{2,4}( the [0-9]+)?"},
    {"guided_choice": ["yes", "yes indeed", "no"]},
    {"guided_grammar": 'start: "(" start ")" | /[0-9]/'},
    {"json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    {"json_schema": {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
     "retry_truncated": True},
    {"tools": [TOOL], "tool_choice": "f", "chat_template": HERMES, "max_tokens": 40},
]  # fmt: skip


def some(**values):
    """A part of the values, each at one of its choices."""
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(choices) for name, choices in values.items()})


LENGTHS = some(max_tokens=[1, 5, 8], ignore_eos=[True], echo=[True], include_stop_str_in_output=[True],
               stop=[" the", "e", ["\n", ","]], stop_token_ids=[[28], [30, 198]], prompt_logprobs=[1])  # fmt: skip
CHOICE = some(min_tokens=[1, 3], logprobs=[0, 2], top_k=[0, 3, 40], top_p=[0.5, 0.95], min_p=[0.05], typical_p=[0.7],
              seed=[0, 7, 2**62], repetition_penalty=[0.8, 1.3], presence_penalty=[1.5, -1], frequency_penalty=[0.7],
              logit_bias=[{28: 5.0}, {30: -100, 253: 2.5}], bad_words=["the", ["and", "of the"]],
              allowed_token_ids=[range(30, 3000)])  # fmt: skip
DRAWN = some(n=[2], best_of=[2, 3]).filter(lambda drawn: drawn.get("best_of", 9) >= drawn.get("n", 1))


@st.composite
def fields(draw):
    """Parameters that go together."""
    common = {"max_tokens": 6} | draw(LENGTHS)
    kind = draw(st.sampled_from(["plain", "plain", "guided", "guided", "beams"]))
    if kind == "beams":
        return {name: value for name, value in common.items() if name != "stop"} | {"beam_width": 2, "max_tokens": 4}
    common |= {
        name: value for name, value in draw(CHOICE).items() if name != "min_tokens" or value <= common["max_tokens"]
    }
    if kind == "guided":
        common |= draw(st.sampled_from(GUIDES))
        common.pop("allowed_token_ids", None)
    if temperature := draw(st.sampled_from([0, 0, 0.8, 2.5])):
        common |= {"temperature": temperature, "top_k": 0} | (draw(DRAWN) if common["max_tokens"] < 9 else {})
    return common


@pytest.fixture(scope="module")
def engines(loaded):
    roomy = EngineConfig(model="real", max_model_len=512, num_kv_blocks=300)
    tight = EngineConfig(
        model="real",
        max_model_len=512,
        num_kv_blocks=24,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        speculation="ngram",
    )
    return build_engine(loaded, roomy), build_engine(loaded, tight)


def bytes_of(engine, requests):
    """All that a reader sees of the answers but what they cost."""
    for request in requests:
        engine.add_request(request)
    done = by_id(drain(engine))
    engine.check_integrity()
    assert engine.stats().used_blocks == 0
    return {
        name: (c.status, c.error, c.text, c.token_ids, c.finish_reason, c.extra, c.warnings, c.usage.completion_tokens)
        for name, c in done.items()
    }


@pytest.mark.real_model
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(st.tuples(fields(), st.integers(0, 3), st.sampled_from([0, 17, 40])), min_size=5, max_size=7))
def test_a_row_gives_the_same_bytes_in_a_mixed_batch_as_alone(engines, prompts, rows):
    """Prompts begin alike for so many tokens, so that rows with and without features share blocks."""
    roomy, tight = engines
    long = next(prompt for prompt in prompts if len(prompt) > 60)
    requests = []
    for number, (given_fields, ending, shared) in enumerate(rows):
        params = SamplingParams(**given_fields)
        if params.tools:
            request = Request(str(number), params, messages=[{"role": "user", "content": "Hi" * ending}])
        else:
            request = Request(str(number), params, prompt_token_ids=[*long[:shared], *prompts[ending][:9]])
        requests.append(request)
    together = bytes_of(tight, requests)
    assert any(status is RowStatus.SUCCEEDED for status, *_ in together.values())
    for request in requests:
        assert together[request.request_id] == bytes_of(roomy, [request])[request.request_id], request.params
