"""A tool that must be called is called, whatever the model says; arguments are judged by the jsonschema library."""

import json
from types import SimpleNamespace

import jsonschema
import pytest

from batchinfer.engine.chat import ChatRenderer
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import build_engine
from batchinfer.engine.forced_calls import call_guide
from batchinfer.engine.logit_rules import rules_of
from batchinfer.engine.tool_calls import parse_calls
from batchinfer.guided import first_fault
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode, FinishReason, Request, RowStatus
from tests.engine.chat_templates import CLOCK, HERMES, LLAMA3, MISTRAL
from tests.engine.test_guided import run
from tests.small_model import tokenizer as small_tokenizer

MISTRAL_NAMED = MISTRAL.replace(
    "{{ call.function | tojson }}", "{{ call.function.name }}[ARGS]{{ call.function.arguments }}"
)
BOOK = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {
                "seats": {"type": "integer", "minimum": 1, "maximum": 9},
                "class": {"$ref": "#/$defs/class"},
                "note": {"type": "string", "maxLength": 8},
            },
            "required": ["seats", "class", "note"],
            "additionalProperties": False,
            "$defs": {"class": {"enum": ["first", "</tool_call>[TOOL_CALLS]<|python_tag|>"]}},
        },
    },
}
BARE = {"type": "function", "function": {"name": "book.again"}}
CLOSED_CLOCK = {"function": CLOCK["function"] | {"parameters": {"additionalProperties": False}}}
TOOLS = [BOOK, BARE, CLOSED_CLOCK]
ASK = [{"role": "user", "content": "Hello"}]
TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "mistral named": MISTRAL_NAMED}


@pytest.fixture(scope="module")
def engine(loaded):
    return build_engine(loaded, EngineConfig(model="real", max_model_len=1024, num_kv_blocks=300, max_num_seqs=16))


def ask(name, **params):
    return Request(name, SamplingParams(**{"tools": TOOLS, "max_tokens": 160} | params), messages=ASK)


def check_calls(completion):
    assert completion.status is RowStatus.SUCCEEDED, completion.error
    assert (completion.text, completion.finish_reason, completion.warnings) == ("", FinishReason.TOOL_CALLS, ())
    calls = [call["function"] for call in completion.extra["tool_calls"]]
    for call in calls:
        arguments = json.loads(call["arguments"])
        if call["name"] == "book":
            jsonschema.validate(arguments, BOOK["function"]["parameters"])
        else:
            assert (call["name"] in ("book.again", "get_time"), arguments) == (True, {})
    return [call["name"] for call in calls]


@pytest.mark.real_model
def test_the_tool_of_choice_is_called_in_each_family_s_way(engine):
    """At temperature 3 the model alone would write noise."""
    hot = {"temperature": 3.0}
    requests = [
        ask(f"{family}/{choice}/{seed}", chat_template=template, tool_choice=choice, seed=seed, **hot)
        for family, template in TEMPLATES.items()
        for choice in ("book", "required")
        for seed in range(3)
    ]
    done = run(engine, requests)
    names = {name: check_calls(completion) for name, completion in done.items() if completion.error is None}
    assert all(found == ["book"] for name, found in names.items() if "/book/" in name)
    assert all(len(found) == 1 for name, found in names.items() if "llama3" in name)
    assert len({found[0] for found in names.values()}) > 1
    cut = {name: completion.error for name, completion in done.items() if completion.error is not None}
    assert all("/required/" in name and error.code is ErrorCode.TRUNCATED_JSON for name, error in cut.items()), cut
    assert len(cut) <= 3
    first = next(request for request in requests if request.request_id == "hermes/book/0")
    assert run(engine, [first])["hermes/book/0"].token_ids == done["hermes/book/0"].token_ids


@pytest.mark.real_model
def test_calls_beside_the_other_parameters(engine):
    common = {"chat_template": HERMES, "tool_choice": "book", "temperature": 2.0, "seed": 1}
    done = run(engine, [
        ask("n", n=3, **common),
        ask("scores", logprobs=1, repetition_penalty=1.3, **common),
        ask("cut", **common | {"max_tokens": 12}),
        ask("again", retry_truncated=True, **common | {"max_tokens": 40}),
        ask("stopped", stop='"class', **common),
        ask("parsed", tool_choice="auto", chat_template=HERMES, json_schema={"const": 1}),
        ask("reasoned", **common | {"chat_template_kwargs": {"enable_thinking": True}, "max_reasoning_tokens": 5}),
    ])  # fmt: skip
    assert check_calls(done["n"]) == ["book"]
    assert len({sample["tool_calls"][0]["function"]["arguments"] for sample in done["n"].extra["samples"]}) > 1
    assert check_calls(done["scores"]) == ["book"]
    assert len(done["scores"].extra["logprobs"]) == len(done["scores"].token_ids)
    assert done["cut"].error.code is ErrorCode.TRUNCATED_JSON
    assert done["cut"].error.message.startswith("max_tokens (12) cut the tool call off; it ends in ")
    assert done["again"].warnings == ("retried_truncated:80",)
    assert done["again"].extra["tool_calls"]
    assert done["stopped"].error.message.startswith("a stop string or stop token cut the tool call off")
    assert (done["parsed"].text, done["parsed"].extra["tool_calls"]) == ("1", None)
    assert check_calls(done["reasoned"]) == ["book"]
    assert done["reasoned"].extra["reasoning_tokens"] >= 5
    assert all("parsed" not in completion.extra for name, completion in done.items() if name != "parsed")


@pytest.mark.real_model
def test_parameters_that_cannot_be_kept_are_an_error_row_alone(engine):
    broken = {"type": "function", "function": {"name": "odd", "parameters": {"not": {}}}}
    done = run(engine, [
        ask("bad", tools=[BOOK, broken], tool_choice="required", chat_template=HERMES),
        ask("other", tools=[BOOK, broken], tool_choice="book", chat_template=HERMES),
        ask("unread", tool_choice="book", tool_parser="none", chat_template=HERMES),
        ask("unknown", tool_choice="book", chat_template="{{ tools }}{{ messages }}"),
    ])  # fmt: skip
    assert done["bad"].error.code is ErrorCode.INVALID_SCHEMA
    assert done["bad"].error.message == 'tools: the parameters of odd: Unimplemented keys: ["not"]'
    assert check_calls(done["other"]) == ["book"]
    assert done["unread"].text.startswith('<tool_call>\n{"name": "book", "arguments": {"seats": ')
    assert done["unread"].finish_reason == "stop"
    assert done["unknown"].error.code is ErrorCode.INVALID_PARAMS
    assert "choose a --tool-parser" in done["unknown"].error.message


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice required needs tools"),
        ({"tool_choice": "fly", "tools": [BOOK]}, "none of auto, none, required and the tools: book"),
        ({"tool_choice": "book", "tools": [BOOK], "json_schema": {}}, r"tool_choice book and json_schema \(response_format\) exclude each other"),
        ({"tool_choice": "required", "tools": [BOOK], "guided_choice": ["a"]}, "required and guided_choice exclude"),
        ({"tool_choice": "book", "tools": [BOOK], "beam_width": 2}, "goes without tool_choice"),
        ({"tool_choice": "f", "tools": [{"name": "f", "parameters": {"type": "string"}}]}, "the parameters of f have type"),
        ({"tool_choice": "f", "tools": [{"name": "f", "parameters": {"const": {"x": "y" * 300_000}}}]}, "at most 262144"),
    ],
)  # fmt: skip
def test_what_cannot_be_together_is_said(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


class Special(ChatRenderer):
    """A vocabulary in which the markers are special tokens, as Mistral's are."""

    ids = {"[TOOL_CALLS]": 5, "[ARGS]": 7, "<tool_call>": 3, "</tool_call>": 4}  # noqa: RUF012 -- a fake

    def special_token_id(self, text):
        return self.ids.get(text)

    token_id = special_token_id


@pytest.mark.parametrize("family", ["hermes", "mistral", "mistral named"])
def test_markers_that_are_special_tokens_are_taken_as_such(family):
    """Followed on the model's vocabulary, marker ids in place of markers; the text is what the parser reads."""
    from llguidance import LLMatcher, LLTokenizer

    smol, template = small_tokenizer(), TEMPLATES[family]
    params = SamplingParams(tools=TOOLS, tool_choice="required", chat_template=template)
    grammar = call_guide(params, Special(smol)).grammar()
    written = {
        "hermes": ["<tool_call>", '\n{"name": "get_time", "arguments": {}}\n', "</tool_call>"],
        "mistral": ["[TOOL_CALLS]", '[{"name": "get_time", "arguments": {}}, {"name": "book.again", "arguments": {}}]'],
        "mistral named": ["[TOOL_CALLS]", "get_time", "[ARGS]", "{}", "[TOOL_CALLS]", "book.again", "[ARGS]", "{}"],
    }[family]  # fmt: skip
    matcher = LLMatcher(LLTokenizer(smol.backend_tokenizer.to_str(), eos_token=[2]), grammar, log_level=0)
    assert first_fault(matcher) is None
    for part in written:
        known = Special.ids.get(part)
        ids = smol.encode(part, add_special_tokens=False) if known is None else [known]
        assert matcher.validate_tokens(ids) == len(ids), part
        matcher.consume_tokens(ids)
    assert matcher.is_accepting()
    assert parse_calls("".join(written), ChatRenderer(smol).call_format(params), frozenset())


def test_a_row_that_must_not_call_cannot_begin_to():
    params = SamplingParams(tools=TOOLS, tool_choice="none", chat_template=HERMES, bad_words=["x"])
    rules = rules_of(params, [1], Special(small_tokenizer()))
    assert 3 in rules.barred()
    assert 4 not in rules.barred()
    assert params.needs_logits
    assert "book" not in ChatRenderer(small_tokenizer()).render(ASK, params)


def test_a_search_does_not_hear_of_tools_either():
    params = SamplingParams(tools=TOOLS, tool_choice="none", beam_width=2)
    assert not params.changes_logits
    assert rules_of(params, [1], SimpleNamespace()) is None
