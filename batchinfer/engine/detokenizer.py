"""Text of a growing row of token ids, in linear time.

Two kinds of tokenizer need two ways:

- byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): a token is a run of bytes, and the text is their UTF-8;
- everything else (sentencepiece, WordPiece): a token's text depends on its neighbours, so the library decodes it
  together with the token before it. A run of byte-fallback tokens (``<0xE2>``) reads as one: either all of it is valid
  UTF-8, or each of its bytes becomes U+FFFD, also those that were good characters before the bad byte came.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class TextStream(Protocol):
    """Text of one row's output tokens."""

    def append(self, token_id: int) -> str:
        """Add a token; return the text that it completed ("" while a character is incomplete)."""

    @property
    def text(self) -> str:
        """All text: equal to ``tokenizer.decode`` of the tokens so far."""


class Detokenizer:
    """Starts the text streams of a tokenizer's rows (a fast tokenizer of transformers)."""

    def __init__(self, tokenizer: Any) -> None:
        backend = tokenizer.backend_tokenizer
        self._vocabulary = Vocabulary(backend)
        self._with_special = Vocabulary(backend, skip_special_tokens=False)
        decoder = backend.decoder
        self._texts: dict[int, str] = {}
        self._is_byte_level = decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"

    def start(self, *, skip_special_tokens: bool = True) -> TextStream:
        """The stream of a new row."""
        vocabulary = self._vocabulary if skip_special_tokens else self._with_special
        return ByteLevelStream(vocabulary) if self._is_byte_level else ContextStream(vocabulary)

    def token_text(self, token_id: int) -> str:
        """A token's text by itself, special ones by their name; bytes that are no character read as U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            stream = self.start(skip_special_tokens=False)
            stream.append(token_id)
            text = self._texts[token_id] = stream.text
        return text


class Vocabulary:
    """What a tokenizer (of the ``tokenizers`` library) says of single tokens.

    Bytes are remembered: asking the library costs microseconds a token.
    """

    def __init__(self, backend: Any, *, skip_special_tokens: bool = True) -> None:
        self._backend = backend
        self._skips_special = skip_special_tokens
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._pieces: dict[int, bytes] = {}
        self._byte_of_character = {character: byte for byte, character in _byte_level_alphabet().items()}

    def has_text(self, token_id: int) -> bool:
        """Whether the token is one of the vocabulary and not a special one that is left out."""
        return not (self._skips_special and token_id in self._special_ids) and self._token(token_id) is not None

    def piece(self, token_id: int) -> bytes:
        """Bytes of a byte-level token; empty for a token without text."""
        known = self._pieces.get(token_id)
        if known is None:
            known = self._pieces[token_id] = self._read_piece(token_id)
        return known

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte of a token like ``<0xE2>``; None for any other token."""
        match = _BYTE_TOKEN.match(self._token(token_id) or "")
        return int(match[1], 16) if match else None

    def decode(self, token_ids: list[int]) -> str:
        """The library's own text of the tokens."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skips_special)
        return text

    def _token(self, token_id: int) -> str | None:
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def _read_piece(self, token_id: int) -> bytes:
        if not self.has_text(token_id):
            return b""
        token = self._token(token_id) or ""
        try:
            return bytes(self._byte_of_character[character] for character in token)
        except KeyError:  # an added token, written as plain text
            return token.encode()


class ByteLevelStream:
    """Text of byte-level tokens: the UTF-8 of their bytes, a bad sequence read as U+FFFD."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []

    def append(self, token_id: int) -> str:
        """Add a token; return the characters that it completed."""
        part = self._decoder.decode(self._vocabulary.piece(token_id))
        self._parts.append(part)
        return part

    @property
    def text(self) -> str:
        """All text; an incomplete last character reads as U+FFFD."""
        incomplete, _ = self._decoder.getstate()
        return "".join(self._parts) + incomplete.decode(errors="replace")


class ContextStream:
    """Text of tokens whose spelling depends on the token before (word starts, prefix spaces)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._parts: list[str] = []
        self._context: list[int] = []
        self._bytes: ByteRun | None = None

    def append(self, token_id: int) -> str:
        """Add a token; return the text that it completed."""
        if not self._vocabulary.has_text(token_id):
            return ""
        byte = self._vocabulary.fallback_byte(token_id)
        if byte is None:
            self._end_byte_run()
            return self._settle(token_id)
        if self._bytes is None:
            # a first space is left out by most sentencepiece decoders, and by them only
            drop_space = not self._context and self._vocabulary.decode([token_id]) == ""
            self._bytes = ByteRun(drop_space=drop_space)
            # any token with text will do: it keeps the next one from being read as the first
            self._context = self._context or [token_id]
        return self._bytes.append(byte)

    @property
    def text(self) -> str:
        """All text; an incomplete last character reads as U+FFFD."""
        return "".join(self._parts) + (self._bytes.text if self._bytes else "")

    def _settle(self, token_id: int) -> str:
        """Decode a token after its context; the last tokens that have text are the next context."""
        before = self._vocabulary.decode(self._context)
        part = self._vocabulary.decode([*self._context, token_id])[len(before) :]
        self._parts.append(part)
        self._context = [token_id] if part else [*self._context, token_id]
        return part

    def _end_byte_run(self) -> None:
        if self._bytes is not None:
            self._parts.append(self._bytes.text)
            self._bytes = None


class ByteRun:
    """Byte-fallback tokens in a row: valid UTF-8 as a whole, or one U+FFFD a byte."""

    def __init__(self, *, drop_space: bool) -> None:
        self._drop_space = drop_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._parts: list[str] = []
        self._is_valid = True
        self._num_bytes = 0

    def append(self, byte: int) -> str:
        """Add a byte; return the text that it completed."""
        self._num_bytes += 1
        if not self._is_valid:
            return REPLACEMENT
        try:
            part = self._decoder.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self._is_valid = False
            return self.text
        if self._drop_space and self._num_bytes == 1:
            return ""
        self._parts.append(part)
        return part

    @property
    def text(self) -> str:
        """The run as the library would read it if it ended here."""
        is_complete = self._is_valid and not self._decoder.getstate()[0]
        return "".join(self._parts) if is_complete else REPLACEMENT * self._num_bytes


def _byte_level_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
