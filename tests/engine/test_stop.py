"""Where an answer ends: stop strings wherever the tokens cut them, stop ids, EOS, and min_tokens."""

import random

import pytest

from batchinfer.engine.detokenizer import Detokenizer
from batchinfer.engine.stop import StopChecker
from batchinfer.sampling_params import SamplingParams
from tests.small_model import tokenizer as small_tokenizer

EOS = 2


@pytest.fixture(scope="module")
def smol():
    return small_tokenizer()


@pytest.fixture(scope="module")
def detokenizer(smol):
    return Detokenizer(smol)


@pytest.fixture
def run(detokenizer):
    """Feed tokens until the checker stops; give the number of tokens it took (None: never) and the text."""

    def run(token_ids, **params):
        checker = StopChecker(SamplingParams(**params), {EOS}, detokenizer.start())
        for count, token_id in enumerate(token_ids, start=1):
            if checker.append(token_id):
                return count, checker.text
        return None, checker.text

    return run


def in_characters(smol, text: str) -> list[int]:
    """One token a character: the finest cut that the vocabulary has."""
    return [token for character in text for token in smol.encode(character)]


def test_a_stop_string_across_three_tokens_is_cut_exactly(smol, run):
    tokens = [*smol.encode("One two"), *in_characters(smol, "END"), *smol.encode(" more")]
    count, text = run(tokens, stop=["END"])
    assert text == "One two"
    assert count == len(smol.encode("One two")) + 3


def test_a_stop_string_inside_one_token_cuts_the_token(smol, run):
    """What follows the stop string in the same token is cut as well."""
    (token,) = smol.encode(" something")
    assert run([token], stop=["met"]) == (1, " so")


def test_the_stop_string_that_begins_first_cuts(smol, run):
    tokens = smol.encode("alpha beta gamma")
    _, text = run(tokens, stop=["eta", " bet", "gamma"])
    assert text == "alpha"


def test_repeated_beginnings_do_not_hide_a_stop_string(smol, run):
    """``aab`` in ``aaab``: a matcher that restarts after a failed match misses it."""
    assert run(in_characters(smol, "xaaab!"), stop=["aab"])[1] == "xa"


def test_stop_strings_against_a_plain_search(smol, run):
    """For random texts, cuts and stops the text is what ``str.find`` on the whole says: up to the first stop completed."""
    chance = random.Random(11)
    for _ in range(300):
        text = "".join(chance.choice("ab c\n") for _ in range(chance.randrange(1, 30)))
        stops = ["".join(chance.choice("ab c\n") for _ in range(chance.randrange(1, 5))) for _ in range(3)]
        _, found = run(in_characters(smol, text), stop=stops)
        # tokens are characters here, so the stop that ends first stops; of those that end there, the longest begins first
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
        expected = text if not ends else text[: min(ends)[0] + min(ends)[1]]
        assert found == expected, (text, stops)


def test_the_prompt_is_not_searched(smol, run):
    """A prompt that ends like the stop string, or in the middle of it, does not count: the checker sees answers only."""
    assert run(smol.encode("stop is a word"), stop=["please stop"]) == (None, "stop is a word")


def test_a_stop_string_with_an_emoji_cut_into_bytes(smol, run):
    tokens = smol.encode("party 🎉 time")
    assert run(tokens, stop=["🎉"])[1] == "party "


def test_an_incomplete_character_after_a_stop_string_does_not_shift_the_cut():
    """A token that completes the stop string and begins a character: the cut is still exact."""
    from batchinfer.engine.detokenizer import ByteLevelStream

    class Pieces:
        def piece(self, token_id):
            return [b"ab ", b"c STO", b"P\xf0\x9f", b"\xa6\x9c"][token_id]

    checker = StopChecker(SamplingParams(stop=["STOP"]), (), ByteLevelStream(Pieces()))
    assert [checker.append(i) for i in range(3)] == [False, False, True]
    assert checker.text == "ab c "


def test_eos_ends_the_answer_and_is_not_in_it(smol, run):
    tokens = smol.encode("Paris.")
    assert run([*tokens, EOS, *tokens]) == (len(tokens) + 1, "Paris.")


def test_ignore_eos_goes_on(smol, run):
    tokens = smol.encode("Paris.")
    assert run([*tokens, EOS, *tokens], ignore_eos=True) == (None, "Paris.Paris.")


def test_a_stop_id_ends_the_answer_and_its_text_is_cut(smol, run):
    tokens = smol.encode("one two three")
    assert run(tokens, stop_token_ids=[tokens[-1]]) == (len(tokens), "one two")
    assert run(tokens, stop_token_ids=[-1, 10**9])[0] is None
    assert run(tokens, stop_token_ids=[tokens[1]], ignore_eos=True)[0] == 2


def test_a_stop_string_before_min_tokens_stays_and_a_later_one_stops(smol, run):
    text = "a.b.c.d"
    tokens = in_characters(smol, text)
    assert run(tokens, stop=["."]) == (2, "a")
    assert run(tokens, stop=["."], min_tokens=2) == (2, "a")
    assert run(tokens, stop=["."], min_tokens=3) == (4, "a.b")
    assert run(tokens, stop=["."], min_tokens=7) == (None, text)


def test_a_stop_string_that_began_before_min_tokens_counts(smol, run):
    tokens = in_characters(smol, "xyzSTOP")
    assert run(tokens, stop=["STOP"], min_tokens=6) == (7, "xyz")


def test_a_stop_id_needs_min_tokens_before_it(smol, run):
    """The sampler bars such tokens; should one come all the same, it is text."""
    assert run([19556, EOS, EOS], min_tokens=2)[0] == 3


def test_nothing_to_stop_at_is_no_stop(smol, run):
    tokens = smol.encode("plain text, no end")
    assert run(tokens) == (None, "plain text, no end")


def test_the_stop_string_is_kept_on_request(run, smol):
    """Cut right after it, also where its last token has more text."""
    tokens = smol.encode("one two three. four", add_special_tokens=False)
    assert run(tokens, stop=["e. f"], include_stop_str_in_output=True)[1] == "one two three. f"
    assert run(tokens, stop=["wo th"], include_stop_str_in_output=True)[1] == "one two th"
    assert run(tokens, stop=["wo th"])[1] == "one t"


def test_the_text_of_a_stop_token_is_kept_on_request(run, smol):
    tokens = smol.encode("one two three", add_special_tokens=False)
    assert run(tokens, stop_token_ids=[tokens[1]], include_stop_str_in_output=True) == (2, "one two")
    assert run(tokens, stop_token_ids=[tokens[1]]) == (2, "one")
