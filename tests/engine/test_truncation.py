"""Prompts that are too long lose what the row names, keep their frame, and say what was cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.chat import ChatRenderer
from batchinfer.engine.truncation import encode_within
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request
from tests.small_model import tokenizer as small_tokenizer

SIDES = ["left", "right", "middle"]


@pytest.fixture(scope="module")
def smol():
    return small_tokenizer()


@pytest.fixture(scope="module")
def renderer(smol):
    return ChatRenderer(smol)


def within(renderer, room, side, **what):
    return encode_within(renderer, Request("0", SamplingParams(truncate=side), **what), room)


@pytest.mark.parametrize(
    ("side", "left"), [("left", [16, 17, 18, 19]), ("right", [10, 11, 12, 13]), ("middle", [10, 11, 18, 19])]
)
def test_token_ids_are_cut_at_the_side_named(renderer, side, left):
    found = within(renderer, 4, side, prompt_token_ids=list(range(10, 20)))
    assert found == (left, (f"truncated:{side}:6 tokens",))
    assert within(renderer, 10, side, prompt_token_ids=list(range(10, 20))) == (list(range(10, 20)), ())


def test_bos_stays(renderer, smol):
    bos = smol.bos_token_id
    ids = [bos, *range(10, 20)]
    assert within(renderer, 3, "left", prompt_token_ids=ids)[0] == [bos, 18, 19]


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one " * 30},
    {"role": "assistant", "content": "two " * 30},
    {"role": "user", "content": "three " * 30},
    {"role": "assistant", "content": "four " * 30},
    {"role": "user", "content": "five " * 20},
]


def rendered(smol, turns):
    return smol.apply_chat_template(turns, add_generation_prompt=True, tokenize=True)["input_ids"]


@pytest.mark.parametrize("side", SIDES)
def test_the_oldest_turns_go_first(renderer, smol, side):
    """Whole turns, as few as do; the system message and the last turn stay."""
    whole, two, one = (rendered(smol, [TURNS[0], *TURNS[start:]]) for start in (1, 3, 5))
    for room in (len(whole) - 1, len(two)):
        found, notes = within(renderer, room, side, messages=TURNS)
        assert found == two
        assert notes == (f"truncated:{side}:{len(whole) - len(two)} tokens", "messages_dropped:2")
    assert within(renderer, len(two) - 1, side, messages=TURNS)[0] == one


@pytest.mark.parametrize(("side", "kept"), [("left", "w39"), ("right", "w0 "), ("middle", "w0 ")])
def test_then_the_longest_message_loses_text(renderer, smol, side, kept):
    words = " ".join(f"w{i}" for i in range(40))
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": words}]
    whole = rendered(smol, turns)
    found, notes = within(renderer, len(whole) - 50, side, messages=turns)
    text = smol.decode(found)
    frame = smol.decode(rendered(smol, [turns[0], {"role": "user", "content": "§"}])).split("§")
    assert text.startswith(frame[0])
    assert text.endswith(frame[1])
    content = text.removeprefix(frame[0]).removesuffix(frame[1])
    assert kept in content
    assert ("w39" in content) is (side != "right")
    assert ("w0 " in content) is (side != "left")
    assert len(whole) - 50 - 4 <= len(found) <= len(whole) - 50
    assert notes == (f"truncated:{side}:{len(whole) - len(found)} tokens",)


def test_a_frame_that_is_too_long_is_left_to_the_context_check(renderer, smol):
    turns = [{"role": "user", "content": "hello"}]
    assert within(renderer, 3, "left", messages=turns) == (rendered(smol, turns), ())


@settings(max_examples=40, deadline=None)
@given(st.text(st.sampled_from("aé🦜 \n中<|>"), min_size=1, max_size=200), st.integers(20, 90), st.sampled_from(SIDES))
def test_any_text_fits_and_has_no_halved_characters(text, room, side):
    smol = small_tokenizer()
    turns = [{"role": "user", "content": "x" + text}]
    whole = rendered(smol, turns)
    found, notes = within(ChatRenderer(smol), room, side, messages=turns)
    empty = rendered(smol, [{"role": "user", "content": ""}])
    if len(whole) <= room:
        assert (found, notes) == (whole, ())
    elif len(empty) <= room:
        assert len(found) <= room
        assert "\ufffd" not in smol.decode(found)
        assert notes == (f"truncated:{side}:{len(whole) - len(found)} tokens",)
