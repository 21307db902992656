"""Structured output: grammars over a model's vocabulary, compiled once a schema, followed once a row."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import torch

from batchinfer.errors import RowFailure
from batchinfer.guided import first_fault, plain_message
from batchinfer.types import ErrorCode, RowError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from batchinfer.guided import Guide

MAX_CACHE_BYTES = 64 * 1024**2
"""Compiled grammars kept, by :func:`cost_of`; the one unused for longest goes first."""
MAX_LEXER_STATES = 50_000
"""States of one grammar's lexer, of 1 to 2 kB; what needs more fails its row."""
_BASE_COST = 128 * 1024
_COST_PER_CHARACTER = 32


def cost_of(guide: Guide) -> int:
    """About the bytes of a compiled grammar: it grows with its text, and with the answers that it has seen."""
    return _BASE_COST + _COST_PER_CHARACTER * len(guide.text)


class GrammarCompiler:
    """Compiles guides for one model. ``tokenizer`` is a fast tokenizer of transformers; it is read at the first guide.

    ``eos_token_ids`` may end an answer wherever its grammar is satisfied.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int], *, max_bytes: int = MAX_CACHE_BYTES
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_bytes = max_bytes
        self._vocabulary: Any = None
        self._compiled: OrderedDict[Guide, Any | str] = OrderedDict()
        self._bytes = 0

    def start(self, guide: Guide, *, jumps: bool) -> GuidedAnswer:
        """A new answer's constraint; without ``jumps`` forced tokens are sampled one by one all the same.

        Raises:
            RowFailure: ``invalid_schema``: no answer can follow the guide, or the model's tokenizer cannot spell it.
        """
        matcher = self._matcher(guide)
        if isinstance(matcher, str):
            raise RowFailure(RowError(ErrorCode.INVALID_SCHEMA, f"{guide.kind}: {matcher}"))
        return GuidedAnswer(
            matcher.deep_copy(),
            self._vocabulary,
            self._eos_token_ids,
            is_json=guide.is_json,
            all_or_nothing=guide.all_or_nothing,
            jumps=jumps,
        )

    def _matcher(self, guide: Guide) -> Any | str:
        """The compiled grammar, or what is wrong with it."""
        found = self._compiled.get(guide)
        if found is not None:
            self._compiled.move_to_end(guide)
            return found
        made = self._compiled[guide] = self._compile(guide)
        self._bytes += cost_of(guide)
        while self._bytes > self._max_bytes and len(self._compiled) > 1:
            self._bytes -= cost_of(self._compiled.popitem(last=False)[0])
        return made

    def _compile(self, guide: Guide) -> Any | str:
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 -- for rows that use it

        try:
            vocabulary = self._read_vocabulary()
            limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
            matcher = LLMatcher(vocabulary, guide.grammar(), log_level=0, limits=limits)
        except Exception as error:  # noqa: BLE001 -- a tokenizer or grammar that the library cannot read is the row's affair
            return plain_message(str(error))
        return first_fault(matcher) or matcher

    def _read_vocabulary(self) -> Any:
        from llguidance import LLTokenizer  # noqa: PLC0415 -- as above

        if self._vocabulary is None:
            num_tokens = max(self._vocab_size, len(self._tokenizer))
            text = self._tokenizer.backend_tokenizer.to_str()
            self._vocabulary = LLTokenizer(text, n_vocab=num_tokens, eos_token=sorted(self._eos_token_ids))
        return self._vocabulary


class GuidedAnswer:
    """Follows one answer along its grammar; a :class:`~batchinfer.engine.constraint.TokenConstraint`.

    Where the grammar leaves no choice of text, the tokens are those that the tokenizer itself makes of it, whether they
    are sampled or not: so an answer has the same tokens with and without log-probabilities.
    """

    def __init__(
        self,
        matcher: Any,
        vocabulary: Any,
        eos_token_ids: Collection[int],
        *,
        is_json: bool,
        all_or_nothing: bool,
        jumps: bool,
    ) -> None:
        self.is_json = is_json
        self.all_or_nothing = all_or_nothing
        self.fault: str | None = None
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids
        self._jumps = jumps
        self._mask: torch.Tensor | None = None
        self._has_ended = False
        self._forced: deque[int] = deque(matcher.compute_ff_tokens())

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end where it is."""
        return self._has_ended or bool(self._matcher.is_accepting())

    def prepare(self) -> None:
        """Compute the mask; the library lets other threads run meanwhile."""
        if self._mask is not None:
            return
        words = torch.zeros((self._vocabulary.vocab_size + 31) // 32, dtype=torch.int32)
        if self._forced:
            token = self._forced[0]
            words.view(torch.uint8)[token // 8] = 1 << (token % 8)
        else:
            self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * 4)
            self._note_fault()
        self._mask = words

    def mask(self) -> torch.Tensor:
        """See :meth:`TokenConstraint.mask`; after a fault nothing may come."""
        self.prepare()
        assert self._mask is not None
        return self._mask

    def accept(self, token_id: int) -> bool:
        """Follow a token.

        Raises:
            ValueError: it is not one that may come.
        """
        self._mask = None
        if not self._matcher.consume_token(token_id):
            self._note_fault()
            raise ValueError(self.fault or "the grammar does not go on like this")
        if self._forced:
            self._forced.popleft()
        self._has_ended = token_id in self._eos_token_ids or bool(self._matcher.is_stopped())
        if not self._forced and not self._has_ended:
            self._forced.extend(self._matcher.compute_ff_tokens())
        return self._has_ended

    def forced(self) -> Sequence[int]:
        """Tokens that come next in any case."""
        return list(self._forced) if self._jumps else ()

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of the answer's tokens, without the one that ended it."""
        spelled = [token for token in token_ids if token not in self._eos_token_ids]
        text: str = self._vocabulary.decode_str(spelled)
        return text

    def _note_fault(self) -> None:
        if self._matcher.is_error():
            self.fault = f"the grammar library gave up: {plain_message(self._matcher.get_error())}"
