"""Tool calls as the families' public templates document them; what is none stays text."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.chat_params import ToolParser
from batchinfer.engine.answer_parts import AnswerReader
from batchinfer.engine.answers import AnswerWriter
from batchinfer.engine.chat import ChatRenderer
from batchinfer.engine.detokenizer import Detokenizer
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.stop import StopChecker
from batchinfer.engine.tool_calls import Call, MalformedCallError, ParsedAnswer, call_format_of, parse_calls
from batchinfer.errors import RowFailure
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode, FinishReason, Request, Usage
from tests.engine.chat_templates import CLOCK, HERMES, LLAMA3, MISTRAL, WEATHER
from tests.small_model import tokenizer as small_tokenizer

H, L, M = ToolParser.HERMES, ToolParser.LLAMA3, ToolParser.MISTRAL
NAMES = frozenset({"get_weather", "get_time"})
PARIS = Call("get_weather", '{"city": "Paris"}')
TAGS = "<tool_call></tool_call>[TOOL_CALLS]x[ARGS]<|python_tag|>"
OSLO = Call("get_weather", '{"city": "Oslo"}')
ASK = [{"role": "user", "content": "Weather in Paris?"}]

GOOD = [
    (H, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    (
        H,
        """Let me look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>""",
        "Let me look.",
        [PARIS, OSLO],
    ),
    (H, '<tool_call>{"name": "get_time"}', "", [Call("get_time", "{}")]),
    (H, '<tool_call>{"name": "é", "arguments": {"é": [1.0, 12345678901234567890, null]}}</tool_call>', "",
     [Call("é", '{"é": [1.0, 12345678901234567890, null]}')]),
    (L, '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    (L, ' {"name": "get_weather", "arguments": {"city": "Paris"}}; {"name": "get_weather", "parameters": {"city": "Oslo"}}',
     "", [PARIS, OSLO]),
    (L, '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    (L, 'Hm.<|python_tag|>brave_search.call(query="Paris weather", n=3)', "Hm.",
     [Call("brave_search", '{"query": "Paris weather", "n": 3}')]),
    (M, '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]', "",
     [Call("get_weather", '{"city": "Paris"}', "a1b2c3d4e")]),
    (M, '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]',
     "", [PARIS, Call("get_time", "{}")]),
    (M, 'So:[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}', "So:",
     [PARIS, OSLO]),
    (M, '[TOOL_CALLS]get_weather[ARGS]{"city": "[TOOL_CALLS]"} [TOOL_CALLS] get_weather[ARGS]{"city": "Oslo"}', "",
     [Call("get_weather", '{"city": "[TOOL_CALLS]"}'), OSLO]),
    (M, '[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"city": "Paris"}', "",
     [Call("get_weather", '{"city": "Paris"}', "123456789")]),
]  # fmt: skip
NONE = [
    (H, "It is sunny in Paris."),
    (H, '{"name": "get_weather", "arguments": {}}'),
    (L, '{"answer": 42}'),
    (L, '{"name": "Ada", "parameters": {"age": 36}}'),
    (L, "{ not JSON at all"),
    (L, "Call get_weather."),
    (M, '[{"name": "get_weather", "arguments": {}}]'),
]
BAD = [
    (H, '<tool_call>{"name": "get_weather", "arguments": {"city": "Par'),
    (H, "<tool_call>get_weather(Paris)</tool_call>"),
    (H, '<tool_call>{"arguments": {}}</tool_call>'),
    (H, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (H, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
    (H, '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>'),
    (H, '<tool_call>{"name": "f"} and more</tool_call>'),
    (H, f"<tool_call>{'[' * 100_000}</tool_call>"),
    (L, '{"name": "get_weather", "parameters": {"city": "Par'),
    (M, "[TOOL_CALLS]get_weather[ARGS]{} and more"),
    (L, "<|python_tag|>import os; os.remove('x')"),
    (L, "<|python_tag|>search.call(open('x'))"),
    (L, "<|python_tag|>search.call(q=open('x'))"),
    (M, "[TOOL_CALLS]"),
    (M, "[TOOL_CALLS][]"),
    (M, '[TOOL_CALLS]{"city": "Paris"}'),
]


@pytest.mark.parametrize(("call_format", "text", "before", "calls"), GOOD)
def test_calls_of_the_families(call_format, text, before, calls):
    assert parse_calls(text, call_format, NAMES) == ParsedAnswer(before, tuple(calls))


@pytest.mark.parametrize(("call_format", "text"), NONE)
def test_text_without_calls(call_format, text):
    assert parse_calls(text, call_format, NAMES) is None


@pytest.mark.parametrize(("call_format", "text"), BAD, ids=range(len(BAD)))
def test_malformed_calls(call_format, text):
    with pytest.raises(MalformedCallError):
        parse_calls(text, call_format, NAMES)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([H, L, M]), st.text(st.sampled_from('{}[]"\\:, <>/tool_call|pythg;name1eARGSTOLC.()=\n')))
def test_no_text_breaks_a_parser(call_format, text):
    start = {H: "<tool_call>", L: "<|python_tag|>", M: "[TOOL_CALLS]"}[call_format]
    for whole in (text, start + text):
        with contextlib.suppress(MalformedCallError):
            parse_calls(whole, call_format, NAMES)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([H, L, M]), st.dictionaries(st.text(max_size=5), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=5)))  # fmt: skip
def test_arguments_come_back_whole(call_format, arguments):
    """Tags may stand inside of strings."""
    call = json.dumps({"name": "get_weather", "arguments": arguments | {"tags": TAGS}})
    arguments |= {"tags": TAGS}
    text = {H: f"<tool_call>\n{call}\n</tool_call>", L: call, M: f"[TOOL_CALLS][{call}]"}[call_format]
    found = parse_calls(text, call_format, NAMES)
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("get_weather", arguments)]


def test_the_format_is_read_off_the_template():
    assert [call_format_of(template) for template in (HERMES, LLAMA3, MISTRAL, "{{ messages }}")] == [
        H, L, M, ToolParser.NONE,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def smol():
    return small_tokenizer()


@pytest.mark.parametrize("template", [HERMES, LLAMA3, MISTRAL])
def test_tools_and_earlier_calls_render_as_transformers_does(smol, template):
    """OpenAI's arguments are JSON text, the templates want objects."""
    call = {"id": "123456789", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    turns = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]},
             {"role": "tool", "content": "sunny", "tool_call_id": "123456789"}]  # fmt: skip
    expected = smol.apply_chat_template(
        turns, tools=[WEATHER, CLOCK], chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert "get_time" in expected
    assert "Paris" in expected.split("get_time")[1]
    as_text = {**call, "function": {**call["function"], "arguments": '{"city": "Paris"}'}}
    given_turns = [ASK[0], {"role": "assistant", "content": None, "tool_calls": [as_text]}, turns[2]]
    params = SamplingParams(tools=[WEATHER, CLOCK], chat_template=template)
    assert ChatRenderer(smol).render(given_turns, params) == expected


def test_tools_in_other_clothes_are_the_same_tools():
    bare = WEATHER["function"]
    arrow = {"type": "function", "function": {**bare, "parameters": json.dumps(bare["parameters"]), "strict": None}}
    for tools in ([WEATHER], json.dumps([WEATHER]), [bare], [arrow]):
        assert SamplingParams(tools=tools).tools == (WEATHER,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": "nonsense"}, "tools is not JSON"),
        ({"tools": [{"type": "retrieval"}]}, r"tools\[0\] is not"),
        ({"tools": [WEATHER, {"name": "a b"}]}, r"tools\[1\] has no name"),
        ({"tools": [WEATHER, WEATHER]}, "'get_weather' twice"),
        ({"tools": [{"name": "f", "parameters": 3}]}, "not a JSON schema"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [WEATHER], "tool_choice": "get_time"}, "the tools: get_weather"),
        ({"chat_template_kwargs": {"tools": []}}, "tools is no variable"),
    ],
)
def test_wrong_definitions_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def refused(smol, messages, **params):
    with pytest.raises(RowFailure) as caught:
        ChatRenderer(smol).encode(Request("0", SamplingParams(**params), messages=messages))
    return caught.value.error


def test_a_template_without_a_place_for_tools_is_an_error_row(smol):
    error = refused(smol, ASK, tools=[WEATHER])
    assert error.code is ErrorCode.INVALID_PARAMS
    assert "no place for them" in error.message


def test_arguments_that_are_no_object_are_named(smol):
    call = {"type": "function", "function": {"name": "f", "arguments": "{"}}
    error = refused(smol, [*ASK, {"role": "assistant", "tool_calls": [call]}])
    assert error.message == "messages[1].tool_calls[0].function.arguments is not JSON"


def finish(smol, text, reason=FinishReason.STOP, **params):
    """The completion of a row whose model wrote ``text``."""
    params = SamplingParams(**{"tools": [WEATHER], "chat_template": HERMES, "max_tokens": 500} | params)
    renderer, detokenizer = ChatRenderer(smol), Detokenizer(smol)
    reader = AnswerReader(renderer, detokenizer)
    request = Request("7", params, messages=ASK)
    prompt = renderer.encode(request)
    stop = StopChecker(params, (), reader.start(request, prompt))
    sequence = Sequence("7", params, list(prompt), len(prompt), 500, 0, 0, b"", stop)
    for token_id in smol.encode(text, add_special_tokens=False):
        sequence.append(token_id)
    return AnswerWriter(detokenizer, reader).completion([(sequence, reason)], Usage(), 0, None)


def test_an_answer_with_calls(smol):
    text = 'Look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    done = finish(smol, text)
    (call,) = done.extra["tool_calls"]
    assert (done.text, done.finish_reason, done.warnings) == ("Look.", FinishReason.TOOL_CALLS, ())
    assert (call["type"], call["function"]) == ("function", {"name": "get_weather", "arguments": '{"city": "Paris"}'})
    assert call == finish(smol, text).extra["tool_calls"][0], "ids are reproducible"
    assert finish(smol, text, FinishReason.LENGTH).finish_reason is FinishReason.LENGTH


def test_malformed_calls_stay_text_with_a_warning(smol):
    done = finish(smol, '<tool_call>{"name": "get_w')
    assert (done.text, done.extra["tool_calls"]) == ('<tool_call>{"name": "get_w', None)
    assert done.finish_reason is FinishReason.STOP
    assert done.warnings[0].startswith("malformed_tool_call:")


def test_a_call_of_a_tool_that_there_is_not_is_kept_and_said(smol):
    done = finish(smol, '<tool_call>{"name": "fly", "arguments": {}}</tool_call>')
    assert done.extra["tool_calls"][0]["function"]["name"] == "fly"
    assert done.warnings == ("unknown_tool:fly",)


def test_without_a_choice_there_are_no_tools(smol):
    params = SamplingParams(tools=[WEATHER], tool_choice="none", chat_template=HERMES)
    assert "get_weather" not in ChatRenderer(smol).render(ASK, params)


def test_markers_that_are_special_tokens_are_read(smol):
    """The vocabulary here has one under another name: it stands for ``[TOOL_CALLS]`` of Mistral's."""

    class Renamed(ChatRenderer):
        def token_id(self, text):
            return super().token_id("<|im_start|>") if text == "[TOOL_CALLS]" else super().token_id(text)

    params = SamplingParams(tools=[WEATHER], chat_template=MISTRAL)
    renderer, detokenizer = Renamed(smol), Detokenizer(smol)
    stream = AnswerReader(renderer, detokenizer).start(Request("0", params, messages=ASK), [1])
    parts = [stream.append(token_id) for token_id in smol.encode("é<|im_start|>[]<|im_end|>", add_special_tokens=False)]
    assert stream.text == "".join(parts) == "é[TOOL_CALLS][]"
