"""Reasoning is told from the answer, counted and ended; the truth is transformers' own generation of the same prompt."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from batchinfer.engine.answer_parts import AnswerReader
from batchinfer.engine.chat import ChatRenderer
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.detokenizer import Detokenizer
from batchinfer.engine.engine import build_engine
from batchinfer.engine.marked_text import MarkedStream
from batchinfer.engine.reasoning import ReasoningLimit, ReasoningStream, ReasoningTags, tags_of
from batchinfer.engine.stop import StopChecker
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import FinishReason, Request
from tests.engine.chat_templates import HERMES
from tests.engine.conftest import EOS
from tests.engine.fakes import drain
from tests.engine.reference import generate_alone
from tests.small_model import tokenizer as small_tokenizer

BEGIN, END = 0, 1
"""Tokens of the model below that stand for the tags; every other token is a character."""


class Letters:
    """A stream in which a token is the character of its number."""

    def __init__(self):
        self.text = ""

    def append(self, token_id):
        self.text += chr(token_id)
        return chr(token_id)


def read(text, *, is_open=False, as_tokens=True, params=None):
    """What becomes of a text, a token a character; tags are one token each, or spelled out. Also what stopped it."""
    tags = ReasoningTags("<think>", "</think>", (END,), {BEGIN: "<think>", END: "</think>"} if as_tokens else {})
    stream = ReasoningStream(MarkedStream(Letters, tags.markers), tags, is_open=is_open)
    if as_tokens:
        text = text.replace("</think>", chr(END)).replace("<think>", chr(BEGIN))
    checker = StopChecker(params or SamplingParams(), (), stream)
    stopped = any([checker.append(ord(character)) for character in text])  # noqa: C419 -- all of them
    return stream, checker.text, stopped


CASES = [
    # text, the prompt has begun it, reasoning, answer, tokens
    ("<think>so</think>yes", False, "so", "yes", 2),
    ("\n<think>\nso\n</think>\n\nyes\n", False, "so", "yes\n", 4),
    ("so</think>yes", True, "so", "yes", 2),
    ("so</think>yes", False, "so", "yes", 2),
    ("<think></think>yes", False, "", "yes", 0),
    ("yes", False, None, "yes", 0),
    (" <b>yes", False, None, " <b>yes", 0),
    ("so on", True, "so on", "", 5),
    ("<think>so", False, "so", "", 2),
    ("<think>a<think>b</think>yes</think>no", False, "a<think>b", "yes</think>no", None),
    ("", False, None, "", 0),
    ("", True, "", "", 0),
]


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize(("text", "is_open", "reasoning", "answer", "count"), CASES)
def test_reasoning_is_told_from_the_answer(text, is_open, reasoning, answer, count, as_tokens):
    stream, found, _ = read(text, is_open=is_open, as_tokens=as_tokens)
    assert (stream.reasoning, found) == (reasoning, answer)
    if count is not None:
        assert stream.num_reasoning_tokens == count


@settings(max_examples=200, deadline=None)
@given(st.text("ab <>/think\n", max_size=20), st.text("ab <>/think\n", max_size=20), st.booleans())
def test_any_text_is_split_where_python_would(before, after, as_tokens):
    assume("think>" not in before)
    text = f"<think>{before}</think>{after}"
    reasoning, _, answer = text.removeprefix("<think>").partition("</think>")
    stream, found, _ = read(text, as_tokens=as_tokens)
    assert (stream.reasoning, found) == (reasoning.strip(), answer.lstrip())
    assert stream.num_reasoning_tokens == len(reasoning)


def test_stop_strings_look_at_the_answer_alone():
    stop = SamplingParams(stop=["b"])
    stream, answer, stopped = read("<think>abc</think>xbz", params=stop)
    assert (stream.reasoning, answer, stopped) == ("abc", "x", True)
    assert read("<think>abc</think>xyz", params=stop)[2] is False
    assert read("<think>a</think>\n\nx", params=SamplingParams(stop=["\n\n"]))[1:] == ("x", False)


class Counting:
    """A constraint that remembers what it was told."""

    fault, is_complete, is_json, all_or_nothing = None, False, True, True

    def __init__(self):
        self.told = []

    def mask(self):
        return None

    def accept(self, token_id):
        self.told.append(token_id)
        return False

    def text(self, token_ids):
        return "".join(map(chr, token_ids))


def test_another_constraint_holds_for_the_answer_alone():
    tags = ReasoningTags("<think>", "</think>", (END,), {BEGIN: "<think>", END: "</think>"})
    for text, expected in (("\0ab\1xy", "xy"), ("xy", "xy"), ("ab\1xy", "abxy")):
        stream = ReasoningStream(MarkedStream(Letters, tags.markers), tags, is_open=False)
        inner = Counting()
        limit = ReasoningLimit(stream, tags, None, inner)
        for character in text:
            assert limit.mask() is None
            limit.accept(ord(character))
            stream.append(ord(character))
        assert "".join(map(chr, inner.told)).replace("\1", "") == expected
        assert limit.text(()).replace("\1", "") == expected
        assert (limit.is_json, limit.is_complete) == (True, False)


@pytest.fixture(scope="module")
def smol():
    return small_tokenizer()


@pytest.mark.parametrize(("thinking", "is_open"), [(True, True), (False, False)])
def test_the_prompt_tells_whether_the_reasoning_has_begun(smol, thinking, is_open):
    params = SamplingParams(reasoning=True, chat_template=HERMES, chat_template_kwargs={"enable_thinking": thinking})
    renderer = ChatRenderer(smol)
    turns = [{"role": "user", "content": "Why?"}]
    expected = smol.apply_chat_template(
        turns, chat_template=HERMES, add_generation_prompt=True, tokenize=False, enable_thinking=thinking
    )
    assert renderer.render(turns, params) == expected
    request = Request("0", params, messages=turns)
    stream = AnswerReader(renderer, Detokenizer(smol)).start(request, renderer.encode(request))
    assert stream.is_reasoning is is_open


@pytest.mark.real_model
def test_a_cap_ends_the_reasoning_and_the_answer_follows(loaded, reference_model):
    """Up to the cap the model's own tokens, then the tag, then what transformers generates after all of that."""
    tokenizer = loaded.tokenizer
    prompt = tokenizer.encode("Q: What is the capital of France?\nA: <think>\n", add_special_tokens=False)
    close = list(tags_of(ChatRenderer(tokenizer)).end_ids)
    assert tokenizer.decode(close) == "</think>"
    thought = generate_alone(reference_model, prompt, 6, EOS).tokens
    assert len(thought) == 6
    answer = generate_alone(reference_model, prompt + thought + close, 6, EOS).tokens
    engine = build_engine(loaded, EngineConfig(model="real", max_model_len=512, num_kv_blocks=100))
    params = SamplingParams(max_tokens=6 + len(close) + len(answer), max_reasoning_tokens=6, ignore_eos=True)
    engine.add_request(Request("capped", params, prompt_token_ids=prompt))
    engine.add_request(Request("plain", SamplingParams(max_tokens=8), prompt_token_ids=prompt))
    done = {completion.request_id: completion for completion in drain(engine)}
    assert list(done["capped"].token_ids[: 6 + len(close)]) == thought + close
    assert list(done["capped"].token_ids[6 + len(close) :]) == answer
    assert done["capped"].extra == {"reasoning": tokenizer.decode(thought).strip(), "reasoning_tokens": 6}
    assert done["capped"].text == tokenizer.decode(answer, skip_special_tokens=True).lstrip()
    assert done["plain"].extra == {}
    assert done["capped"].finish_reason is FinishReason.LENGTH
