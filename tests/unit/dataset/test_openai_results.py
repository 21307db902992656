"""Result rows as OpenAI's documents, read by OpenAI's own types: choices, log-probabilities, tool calls, reasoning."""

import json

from openai.types import Completion
from openai.types.chat import ChatCompletion

from batchinfer.dataset.openai_results import LineContext, result_line

CHAT = LineContext("k", "/v1/chat/completions", "tiny", 1_700_000_000)
TEXT = LineContext("k", "/v1/completions", "tiny", 1_700_000_000)


def token(text, logprob, top=()):
    return {"token_id": 1, "token": text, "logprob": logprob, "rank": 1, "top": list(top)}


LOGPROBS = [token("Hé", -0.5, [token("Hé", -0.5), token("\ufffd", -1.5)]), token("!", -0.25)]


def row(**fields):
    usage = {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 7}
    return {"custom_id": "a", "row_index": 4, "status": "succeeded", "output": "Hé!", "finish_reason": "stop",
            "error": None, "usage": usage} | fields  # fmt: skip


def chat(**fields):
    body = json.loads(json.dumps(result_line(row(**fields), CHAT)["response"]["body"]))
    return ChatCompletion.model_validate(body, strict=True)


def test_a_plain_row_has_nulls_where_nothing_was_asked_for():
    plain = chat(logprobs=None, tool_calls=None, reasoning=None, reasoning_tokens=None, samples=None)
    assert plain == chat()
    (choice,) = plain.choices
    assert (choice.message.content, choice.message.refusal, choice.message.tool_calls) == ("Hé!", None, None)
    assert (choice.logprobs, choice.finish_reason) == (None, "stop")
    assert plain.usage.completion_tokens_details is None
    assert not hasattr(choice.message, "reasoning_content")


def test_log_probabilities():
    first, second = chat(logprobs=LOGPROBS).choices[0].logprobs.content
    assert (first.token, first.logprob, bytes(first.bytes)) == ("Hé", -0.5, "Hé".encode())
    assert [(top.token, top.logprob, top.bytes) for top in first.top_logprobs] == [
        ("Hé", -0.5, list("Hé".encode())), ("\ufffd", -1.5, None),
    ]  # fmt: skip
    assert second.top_logprobs == []


def test_log_probabilities_of_text_completions():
    body = result_line(row(logprobs=LOGPROBS), TEXT)["response"]["body"]
    found = Completion.model_validate(body, strict=True).choices[0].logprobs
    assert (found.tokens, found.token_logprobs, found.text_offset) == (["Hé", "!"], [-0.5, -0.25], [0, 2])
    assert found.top_logprobs == [{"Hé": -0.5, "\ufffd": -1.5}, {}]


CALLS = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]


def test_tool_calls():
    (choice,) = chat(output="", finish_reason="tool_calls", tool_calls=CALLS).choices
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert [call.model_dump() for call in choice.message.tool_calls] == CALLS


def test_reasoning_is_where_vllm_has_it():
    found = chat(reasoning="since", reasoning_tokens=5)
    assert found.choices[0].message.reasoning_content == "since"
    assert found.usage.completion_tokens_details.reasoning_tokens == 5


def test_samples_are_choices():
    samples = [
        {"sample_index": i, "output": f"s{i}", "finish_reason": reason, "reasoning": f"r{i}", "reasoning_tokens": i + 1,
         "tool_calls": CALLS if i else None, "logprobs": LOGPROBS}
        for i, reason in enumerate(("stop", "tool_calls", "length"))
    ]  # fmt: skip
    found = chat(samples=samples)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in found.choices] == ["stop", "tool_calls", "length"]
    assert [choice.message.content for choice in found.choices] == ["s0", "s1", "s2"]
    assert [choice.message.reasoning_content for choice in found.choices] == ["r0", "r1", "r2"]
    assert [len(choice.message.tool_calls or []) for choice in found.choices] == [0, 1, 1]
    assert all(len(choice.logprobs.content) == 2 for choice in found.choices)
    assert found.usage.completion_tokens_details.reasoning_tokens == 6
