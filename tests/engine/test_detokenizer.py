"""Text of growing token lists: at every length the library's own text, in linear time."""

import random
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, WordPiece

from batchinfer.engine.detokenizer import Detokenizer
from tests.small_model import tokenizer as small_tokenizer

TEXTS = [
    "Hello, world! It's 2024.\n\n\tNew line",
    "naïve café — “quotes” 日本語 नमस्ते 한국어",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 👍🏽 and \u0000 NUL",
    "<|im_start|>user\nspecial<|im_end|>",
    "   leading and trailing   ",
]


@pytest.fixture(scope="module")
def smol():
    return small_tokenizer()


def wrap(backend: Tokenizer) -> SimpleNamespace:
    """As much of a transformers tokenizer as detokenising needs."""
    return SimpleNamespace(backend_tokenizer=backend)


def sentencepiece(decoder) -> Tokenizer:
    """A vocabulary with byte fallback, as Llama 2, Mistral and Gemma have."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁▁", "▁a", "b", "▁the", "é", "日", "'", "s", "x▁", "<think>"]
    backend = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    backend.decoder = decoder
    return backend


LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
METASPACE = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])


def wordpiece() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "un", "##able", "the", ",", "##s", "a", "'"]
    backend = Tokenizer(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.add_special_tokens(["[UNK]", "[CLS]"])
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


def assert_follows(tokenizer, token_ids: list[int]) -> None:
    """At every length the stream's text is the library's."""
    stream = Detokenizer(tokenizer).start()
    for end, token_id in enumerate(token_ids, start=1):
        stream.append(token_id)
        expected = tokenizer.backend_tokenizer.decode(token_ids[:end], skip_special_tokens=True)
        assert stream.text == expected, token_ids[:end]


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_the_real_tokenizer_at_every_length(smol, text):
    """Also in the middle of a character: an emoji is several tokens here."""
    token_ids = smol.encode(text)
    assert_follows(smol, token_ids)
    stream = Detokenizer(smol).start()
    for token_id in token_ids:
        stream.append(token_id)
    assert stream.text == smol.decode(token_ids, skip_special_tokens=True)


def test_random_tokens_of_the_real_tokenizer(smol):
    """Random ids cut UTF-8 everywhere; ids that are no tokens have no text."""
    chance = random.Random(3)
    for _ in range(150):
        assert_follows(smol, [chance.randrange(len(smol) + 5) for _ in range(chance.randrange(1, 25))])


def test_broken_utf8_of_the_real_tokenizer(smol):
    """Lone lead and continuation bytes, overlong forms and surrogates, in every order of three."""
    alphabet = {token: i for token, i in smol.get_vocab().items() if len(token) == 1}
    from batchinfer.engine.detokenizer import _byte_level_alphabet

    characters = _byte_level_alphabet()
    parts = [0x41, 0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xED, 0xA0, 0xC0, 0xFF]
    ids = [alphabet[characters[byte]] for byte in parts if characters[byte] in alphabet]
    assert len(ids) > 8
    for a in ids:
        for b in ids:
            for c in ids:
                assert_follows(smol, [a, b, c])


@pytest.mark.parametrize("decoder", [LLAMA, GEMMA, METASPACE], ids=["llama", "gemma", "metaspace"])
def test_random_tokens_with_byte_fallback(decoder):
    """Runs of bytes are one character, several, or none: the library judges a run as a whole."""
    backend = sentencepiece(decoder)
    size = backend.get_vocab_size()
    bytes_of = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    likely = [bytes_of[byte] for byte in "é€😀 a".encode()] + list(range(259, size + 1)) + [0, 1, 2]
    chance = random.Random(7)
    for _ in range(400):
        assert_follows(wrap(backend), [chance.choice(likely) for _ in range(chance.randrange(1, 16))])
    for text in ("€😀", " é", "日€b"):
        assert_follows(wrap(backend), [bytes_of[byte] for byte in text.encode()])


def test_random_word_pieces():
    backend = wordpiece()
    chance = random.Random(5)
    for _ in range(100):
        assert_follows(wrap(backend), [chance.randrange(backend.get_vocab_size()) for _ in range(8)])


def test_completed_text_is_handed_out_once(smol):
    """The pieces that append returns add up to the text, when no character is left incomplete."""
    for text in TEXTS:
        stream = Detokenizer(smol).start()
        pieces = [stream.append(token_id) for token_id in smol.encode(text)]
        assert "".join(pieces) == stream.text


def test_an_incomplete_character_is_held_back(smol):
    """No U+FFFD is handed out for a character that the next token completes."""
    token_ids = smol.encode("🦜")
    assert len(token_ids) > 1
    stream = Detokenizer(smol).start()
    assert [stream.append(token_id) for token_id in token_ids] == [""] * (len(token_ids) - 1) + ["🦜"]


class CountingTokenizer:
    """Counts the tokens that the library is asked to decode."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.num_decoded = 0

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def decode(self, token_ids, **options):
        self.num_decoded += len(token_ids)
        return self._backend.decode(token_ids, **options)


@pytest.mark.parametrize("kind", ["continuation bytes", "spaces", "words", "bytes of characters"])
def test_work_grows_with_the_length_only(kind):
    """Hundreds of replacement characters, or of anything else: no token is decoded more than a few times."""
    backend = sentencepiece(LLAMA)
    counting = CountingTokenizer(backend)
    unit = {
        "continuation bytes": [backend.token_to_id("<0x80>")],
        "spaces": [backend.token_to_id("▁")],
        "words": [backend.token_to_id("▁the")],
        "bytes of characters": [backend.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()],
    }[kind]
    token_ids = unit * (2000 // len(unit))
    stream = Detokenizer(wrap(counting)).start()
    for token_id in token_ids:
        stream.append(token_id)
    assert stream.text == backend.decode(token_ids)
    assert counting.num_decoded <= 4 * len(token_ids) + 8


def test_hundreds_of_replacement_characters_of_the_real_tokenizer(smol):
    """Byte-level text never asks the library to decode at all."""
    counting = CountingTokenizer(smol.backend_tokenizer)
    lead_byte = smol.encode("🦜")[0]
    stream = Detokenizer(wrap(counting)).start()
    for _ in range(3000):
        stream.append(lead_byte)
    assert counting.num_decoded == 0
    assert stream.text == smol.decode([lead_byte] * 3000)
    assert "\ufffd" in stream.text
