"""From prompts and messages to token ids."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2

from batchinfer.chat_params import ToolParser
from batchinfer.chat_template import compiled
from batchinfer.engine.messages import fit_roles, normalize_messages
from batchinfer.engine.tool_calls import call_format_of
from batchinfer.errors import RowFailure
from batchinfer.sampling_params import SamplingParams
from batchinfer.template_budget import TooMuch, budget
from batchinfer.types import ErrorCode, RowError

if TYPE_CHECKING:
    from batchinfer.types import Message, Request

_PLAIN = SamplingParams()
_TOOLS = re.compile(r"\btools\b")
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

    def token_id(self, text: str) -> int | None:
        """The token that stands for exactly this text, such as ``</think>``; None if there is none."""
        token_id: int | None = self._tokenizer.backend_tokenizer.token_to_id(text)
        return token_id

    def special_token_id(self, text: str) -> int | None:
        """The special token that stands for exactly this text; None if there is none, or only one that text spells."""
        token_id = self.token_id(text)
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return token_id if token_id in added and added[token_id].special else None

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special ones by their names."""
        text: str = self._tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def num_leading(self, token_ids: list[int]) -> int:
        """How many of the first tokens are no part of the text: BOS."""
        return int(bool(token_ids) and token_ids[0] == self._tokenizer.bos_token_id)

    @property
    def start_token_id(self) -> int | None:
        """What a text without a beginning follows: BOS, or EOS where there is none."""
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        found: int | None = eos if bos is None else bos
        return found

    @property
    def has_chat_template(self) -> bool:
        """Whether the model knows how to read a conversation."""
        return bool(self._tokenizer.chat_template)

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
            return self.encode_messages(request.messages, request.params)
        if request.params.shown_tools:
            _fail(ErrorCode.INVALID_PARAMS, "tools need a conversation: use a messages column, or --system")
        return self.encode_prompt(request.prompt or "")

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of plain text, with the special tokens (BOS) that the tokenizer adds, once."""
        if not prompt.strip():
            _fail(ErrorCode.EMPTY_PROMPT, "the prompt is empty or only white space")
        bos = self._tokenizer.bos_token
        starts_with_bos = bool(bos) and prompt.startswith(bos)
        return self._tokenize(prompt, add_special_tokens=not starts_with_bos)

    def encode_messages(self, messages: list[Message], params: SamplingParams = _PLAIN) -> list[int]:
        """Token ids of a conversation: the chat template applied once, nothing added."""
        text = self.render(messages, params)
        if not text:
            _fail(ErrorCode.EMPTY_PROMPT, "the chat template made no text of these messages")
        return self._tokenize(text, add_special_tokens=False)

    def template_of(self, params: SamplingParams) -> str:
        """The chat template of a row: its own, else the model's (the one for tools, where there are several).

        Raises:
            RowFailure: ``template_error``: there is none.
        """
        if params.chat_template is not None:
            return self._named_template(params) or params.chat_template
        if not self._tokenizer.chat_template:
            _fail(
                ErrorCode.TEMPLATE_ERROR,
                "the model has no chat template: give one with --chat-template, use a prompt column or another model",
            )
        try:
            template: str = self._tokenizer.get_chat_template(tools=list(params.shown_tools) or None)
        except ValueError as error:
            _fail(ErrorCode.TEMPLATE_ERROR, f"the model's chat template cannot be chosen: {error}")
        return template

    def _named_template(self, params: SamplingParams) -> str | None:
        """The model's template whose name the row gives in place of one."""
        templates = self._tokenizer.chat_template
        return templates.get(params.chat_template) if isinstance(templates, dict) else None

    def call_format(self, params: SamplingParams) -> ToolParser:
        """How the row's tool calls are written: as asked for, else as the template shows."""
        if params.tool_parser is not ToolParser.AUTO:
            return params.tool_parser
        has_template = params.chat_template or self._tokenizer.chat_template
        return call_format_of(self.template_of(params)) if has_template else ToolParser.NONE

    def call_format_to_force(self, params: SamplingParams) -> ToolParser:
        """How the row's tool calls are written, where it must make one: also where they are not to be read.

        Raises:
            RowFailure: ``invalid_params``: nobody knows.
        """
        call_format = params.tool_parser
        if call_format in (ToolParser.AUTO, ToolParser.NONE):
            call_format = call_format_of(self.template_of(params))
        if call_format is ToolParser.NONE:
            _fail(
                ErrorCode.INVALID_PARAMS,
                "tool_choice: the chat template writes tool calls in no known way; choose a --tool-parser",
            )
        return call_format

    def render(self, messages: list[Message], params: SamplingParams = _PLAIN) -> str:
        """The text that the chat template makes of a conversation, up to where the answer begins.

        With ``continue_final_message`` that is the end of the last message, which is the assistant's and not closed.
        """
        template = self.template_of(params)
        if params.shown_tools and not _TOOLS.search(template):
            _fail(
                ErrorCode.INVALID_PARAMS,
                "tools: the chat template has no place for them; use a model made for tools, or a --chat-template",
            )
        conversation = fit_roles(normalize_messages(messages), template)
        if params.continue_final_message and conversation[-1]["role"] != "assistant":
            _fail(
                ErrorCode.INVALID_MESSAGES,
                f"messages[{len(conversation) - 1}]: continue_final_message needs a last message of the assistant's",
            )
        whose = "the model's" if params.chat_template is None else "the"
        with budget.of_a_row():
            try:
                return self._apply(conversation, params, continues=params.continue_final_message)
            except jinja2.TemplateSyntaxError as error:
                _fail(ErrorCode.TEMPLATE_ERROR, f"{whose} chat template, line {error.lineno}: {error.message}")
            except (TooMuch, RecursionError, MemoryError) as error:
                _fail(ErrorCode.TEMPLATE_ERROR, f"{whose} chat template: {error or type(error).__name__}"[:500])
            except Exception as error:  # noqa: BLE001 -- a template is a program of its maker's: it may raise anything
                where = self._refused_at(conversation, params, str(error))
                _fail(ErrorCode.INVALID_MESSAGES, f"{where}{whose} chat template refused the messages: {error}")

    def _apply(self, conversation: list[Message], params: SamplingParams, *, continues: bool = False) -> str:
        if (
            params.chat_template is not None and self._named_template(params) is None
        ):  # a stranger's: it may cost a row what any template may
            values = {**self._tokenizer.special_tokens_map, "tools": list(params.shown_tools) or None,
                      "add_generation_prompt": not continues, **params.chat_template_kwargs}  # fmt: skip
            return compiled(params.chat_template).render(conversation, values, continues=continues)
        text: str = self._tokenizer.apply_chat_template(
            conversation,
            tools=list(params.shown_tools) or None,
            chat_template=params.chat_template,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **params.chat_template_kwargs,
        )
        return text

    def _refused_at(self, conversation: list[Message], params: SamplingParams, reason: str) -> str:
        """``"messages[2]: "`` if the first two messages pass and the third brings the same refusal, else nothing."""
        for end in range(1, min(len(conversation), MAX_PREFIXES) + 1):
            try:
                self._apply(conversation[:end], params)
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
