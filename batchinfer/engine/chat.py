"""From prompts and messages to token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from batchinfer.engine.messages import normalize_messages
from batchinfer.errors import RowFailure
from batchinfer.types import ErrorCode, RowError

if TYPE_CHECKING:
    from batchinfer.types import Message, Request

MAX_PREFIXES = 64
"""Most prefixes of a refused conversation that are rendered to find the message at fault."""


class ChatRenderer:
    """Turns a request into prompt token ids with the model's own tokenizer and chat template.

    ``vocab_size`` is the number of rows of the model's embedding table, where it is not the tokenizer's length: an id
    beyond it would be read out of bounds.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size or len(tokenizer)

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows: 0 to one less."""
        return self._vocab_size

    def encode_fragment(self, text: str) -> list[int]:
        """Token ids of text that stands in the middle of something: nothing added."""
        token_ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    def encode(self, request: Request) -> list[int]:
        """Prompt token ids of a request, whichever of its three forms it has.

        Raises:
            RowFailure: ``empty_prompt``, ``invalid_messages``, ``template_error`` or ``invalid_encoding``.
        """
        if request.prompt_token_ids is not None:
            return self._check_token_ids(request.prompt_token_ids)
        if request.messages is not None:
            return self.encode_messages(request.messages, continues=request.params.continue_final_message)
        return self.encode_prompt(request.prompt or "")

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of plain text, with the special tokens (BOS) that the tokenizer adds, once."""
        if not prompt.strip():
            _fail(ErrorCode.EMPTY_PROMPT, "the prompt is empty or only white space")
        bos = self._tokenizer.bos_token
        starts_with_bos = bool(bos) and prompt.startswith(bos)
        return self._tokenize(prompt, add_special_tokens=not starts_with_bos)

    def encode_messages(self, messages: list[Message], *, continues: bool = False) -> list[int]:
        """Token ids of a conversation: the chat template applied once, nothing added after it."""
        text = self.render(messages, continues=continues)
        if not text:
            _fail(ErrorCode.EMPTY_PROMPT, "the chat template made no text of these messages")
        return self._tokenize(text, add_special_tokens=False)

    def render(self, messages: list[Message], *, continues: bool = False) -> str:
        """The text that the chat template makes of a conversation, up to where the answer begins.

        With ``continues`` that is the end of the last message, which is the assistant's and not closed.
        """
        if not self._tokenizer.chat_template:
            _fail(ErrorCode.TEMPLATE_ERROR, "the model has no chat template: use a prompt column or another model")
        conversation = normalize_messages(messages)
        if continues and conversation[-1]["role"] != "assistant":
            _fail(
                ErrorCode.INVALID_MESSAGES,
                f"messages[{len(conversation) - 1}]: continue_final_message needs a last message of the assistant's",
            )
        try:
            return self._apply(conversation, continues=continues)
        except Exception as error:  # noqa: BLE001 -- a template is a program of the model's maker: it may raise anything
            where = self._refused_at(conversation, str(error))
            _fail(ErrorCode.INVALID_MESSAGES, f"{where}the model's chat template refused the messages: {error}")

    def _apply(self, conversation: list[Message], *, continues: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=not continues, continue_final_message=continues
        )
        return text

    def _refused_at(self, conversation: list[Message], reason: str) -> str:
        """``"messages[2]: "`` if the first two messages pass and the third brings the same refusal, else nothing."""
        for end in range(1, min(len(conversation), MAX_PREFIXES) + 1):
            try:
                self._apply(conversation[:end])
            except Exception as error:  # noqa: BLE001 -- see render
                return f"messages[{end - 1}]: " if str(error) == reason else ""
        return ""

    def _tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            _fail(
                ErrorCode.INVALID_ENCODING,
                f"the prompt has a lone surrogate at character {error.start}, which is not text that UTF-8 can hold",
            )
        token_ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if not token_ids:
            _fail(ErrorCode.EMPTY_PROMPT, "the tokenizer made no tokens of the prompt")
        if (largest := max(token_ids)) >= self._vocab_size:
            token = self._tokenizer.convert_ids_to_tokens(largest)
            _fail(ErrorCode.INVALID_PARAMS, f"the prompt holds {token!r}, a token that the model has no embedding of")
        return token_ids

    def _check_token_ids(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            _fail(ErrorCode.EMPTY_PROMPT, "prompt_token_ids is empty")
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._vocab_size:
                _fail(
                    ErrorCode.INVALID_PARAMS,
                    f"prompt_token_ids[{index}] is {token_id}; the vocabulary has {self._vocab_size}",
                )
        return list(token_ids)


def _fail(code: ErrorCode, message: str) -> NoReturn:
    raise RowFailure(RowError(code, message))
