"""From a request to a sequence that can run, or to the error that says why it cannot."""

from __future__ import annotations

import sys
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

from batchinfer.adapter_config import invalid
from batchinfer.engine.answer_parts import AnswerReader
from batchinfer.engine.answers import AnswerWriter
from batchinfer.engine.beam import Beam, BeamRow, BeamSearch, num_candidates
from batchinfer.engine.block_pool import root_hash
from batchinfer.engine.forced_calls import call_guide
from batchinfer.engine.logit_rules import rules_of
from batchinfer.engine.logprobs import AnswerScores, PromptScores
from batchinfer.engine.progress import go_on
from batchinfer.engine.reasoning import ReasoningLimit, ReasoningStream
from batchinfer.engine.row import Row, sample_seed
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.stop import StopChecker
from batchinfer.engine.tasks.ingest import TaskIngest
from batchinfer.engine.truncation import encode_within
from batchinfer.errors import RowFailure
from batchinfer.tasks import Pooling
from batchinfer.types import ErrorCode, RowError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from batchinfer.engine.chat import ChatRenderer
    from batchinfer.engine.constraint import TokenConstraint
    from batchinfer.engine.detokenizer import Detokenizer, TextStream
    from batchinfer.engine.guided import GrammarCompiler, GuidedAnswer
    from batchinfer.engine.tasks.row import TaskRow
    from batchinfer.models.lora_file import LoraFile
    from batchinfer.models.lora_store import LoraStore
    from batchinfer.sampling_params import SamplingParams
    from batchinfer.types import Request

T = TypeVar("T")


def row_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a row that brings none: always the same for the same engine seed and request id."""
    digest = blake2b(f"{engine_seed}:{request_id}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class Ingest:
    """Makes sequences of requests. ``max_model_len`` and ``max_kv_tokens`` (the whole pool) are in tokens."""

    def __init__(
        self,
        renderer: ChatRenderer,
        detokenizer: Detokenizer,
        eos_token_ids: Collection[int],
        *,
        max_model_len: int,
        max_kv_tokens: int,
        seed: int = 0,
        grammars: GrammarCompiler | None = None,
        pooling: Pooling = Pooling.LAST,
        adapters: LoraStore | None = None,
        embedding_size: int = sys.maxsize,
    ) -> None:
        """Without ``grammars``, rows that ask for structured output are refused; without ``adapters`` those that name one.

        ``pooling`` is what ``auto`` is; ``embedding_size`` is how many numbers a vector has.
        """
        self._renderer = renderer
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._max_kv_tokens = max_kv_tokens
        self._seed = seed
        self._grammars = grammars
        self._adapters = adapters
        self._reader = AnswerReader(renderer, detokenizer)
        self._writer = AnswerWriter(detokenizer, self._reader)
        self._root = root_hash()
        self._num_sequences = 0
        self._tasks = TaskIngest(
            renderer,
            self._prefill_only,
            max_model_len=max_model_len,
            pooling=pooling,
            embedding_size=embedding_size,
        )

    def row(self, request: Request) -> Row | TaskRow:
        """The row of a request, its ``max_tokens`` clamped to what fits.

        Raises:
            RowFailure: the prompt is empty, too long, or cannot be rendered; a parameter does not fit the model.
        """
        if request.task is not None:
            return self._guarded(self._tasks.row, request)
        params = request.params
        adapter = self._adapter(params)
        prompt, notes = self._guarded(self._encode, request)
        is_scored = params.prompt_logprobs is not None
        max_tokens = self._clamp(len(prompt), params.max_tokens, is_computed=is_scored)
        seed = row_seed(self._seed, request.request_id) if params.seed is None else params.seed
        echo = self._echo(request, prompt) if params.echo else None
        if params.beam_width > 1 and max_tokens > 0:
            return self._beams(request, prompt, max_tokens, echo, notes, adapter=adapter)
        sequences = [
            self._sample(request, prompt, max_tokens, sample_seed(seed, index), index, adapter=adapter)
            for index in range(params.num_sequences)
        ]
        if params.prompt_logprobs is not None:
            sequences[0].prompt_scores = PromptScores(len(prompt), params.prompt_logprobs)
        return Row(sequences, self._writer, echo, notes)

    def _beams(
        self,
        request: Request,
        prompt: list[int],
        max_tokens: int,
        echo: str | None,
        notes: tuple[str, ...],
        *,
        adapter: LoraFile | None,
    ) -> Row:
        """A row that is searched for; each beam is a sequence of one new token."""
        params = request.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        num_options = num_candidates(params.beam_width, len(ends))

        def make(beam: Beam) -> Sequence:
            sequence = self._sequence(request, [*prompt, *beam.tokens], len(beam.tokens) + 1, 0, adapter=adapter)
            sequence.num_prompt_tokens = len(prompt)
            sequence.clamped_max_tokens = max_tokens if max_tokens < params.max_tokens else None
            sequence.scores = AnswerScores(num_options)
            sequence.is_beam = True
            if beam.tokens:
                sequence.num_preemptions = 1  # what it finds in the cache is the row's own, and no hit
            elif params.prompt_logprobs is not None:
                sequence.prompt_scores = PromptScores(len(prompt), params.prompt_logprobs)
            return sequence

        search = BeamSearch(params.beam_width, max_tokens, params.length_penalty, ends)
        return BeamRow(search, ends, make, self._writer, echo=echo, notes=notes)

    def _sample(
        self, request: Request, prompt: list[int], max_tokens: int, seed: int, index: int, *, adapter: LoraFile | None
    ) -> Sequence:
        """One of a row's samples, as far as an earlier engine had come with it."""
        sequence = self._sequence(request, list(prompt), max_tokens, seed, adapter=adapter)
        if index < len(request.progress) and not go_on(sequence, request.progress[index], self._renderer.vocab_size):
            return self._sequence(request, list(prompt), max_tokens, seed, adapter=adapter)
        return sequence

    def _adapter(self, params: SamplingParams) -> LoraFile | None:
        if params.adapter is None:
            return None
        if self._adapters is None:
            raise invalid(params.adapter, "this model runs in layers that take no adapters; docs/lora.md says which do")
        return self._adapters.open(params.adapter)

    def _sequence(
        self, request: Request, prompt: list[int], max_tokens: int, seed: int, *, adapter: LoraFile | None
    ) -> Sequence:
        params = request.params
        self._num_sequences += 1
        stream = self._reader.start(request, prompt)
        constraint = self._constraint(params, stream)
        longer = None
        if params.retry_truncated and constraint is not None and constraint.all_or_nothing:
            longer = self._clamp(len(prompt), 2 * params.max_tokens, is_computed=False)
        return Sequence(
            request_id=request.request_id,
            params=params,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            clamped_max_tokens=max_tokens if max_tokens < params.max_tokens else None,
            seed=seed,
            arrival=self._num_sequences,
            root=self._root if adapter is None else root_hash(f"lora:{adapter.fingerprint}"),
            adapter=adapter,
            stop=StopChecker(params, self._eos_token_ids, stream),
            rules=rules_of(params, prompt, self._renderer),
            constraint=constraint,
            max_tokens_if_truncated=longer,
            scores=AnswerScores(params.logprobs) if params.has_scores else None,
        )

    def _constraint(self, params: SamplingParams, stream: TextStream) -> TokenConstraint | None:
        """What the answer must look like, and where reasoning before it ends."""
        guided = self._guided(params)
        if not isinstance(stream, ReasoningStream) or (guided is None and params.max_reasoning_tokens is None):
            return guided
        return ReasoningLimit(stream, self._reader.tags, params.max_reasoning_tokens, guided)

    def _guided(self, params: SamplingParams) -> GuidedAnswer | None:
        """A token whose log-probability is wanted is sampled, however forced it is."""
        guide = call_guide(params, self._renderer) if params.forces_call else params.guide
        if guide is None:
            return None
        if self._grammars is None:
            raise RowFailure(RowError(ErrorCode.INVALID_SCHEMA, f"{guide.kind}: this engine has no grammars"))
        try:
            return self._grammars.start(guide, jumps=not params.has_scores)
        except RowFailure:
            if (fault := params.tools_fault()) is not None:
                raise RowFailure(RowError(ErrorCode.INVALID_SCHEMA, fault)) from None
            raise

    def _echo(self, request: Request, prompt: list[int]) -> str:
        """The prompt's text: as it was given, or what its tokens say."""
        if request.prompt is not None:
            return request.prompt
        stream = self._reader.stream(request.params)
        for token_id in prompt:
            stream.append(token_id)
        return stream.text

    def _encode(self, request: Request) -> tuple[list[int], tuple[str, ...]]:
        """Token ids of the prompt, and what was done to it."""
        if request.params.truncate is None:
            return self._renderer.encode(request), ()
        max_tokens = request.params.max_tokens
        room = min(self._max_model_len - max_tokens, self._max_kv_tokens + 1 - max(max_tokens, 1))
        return encode_within(self._renderer, request, room)

    def _prefill_only(self, request: Request, token_ids: list[int]) -> Sequence:
        """A sequence that ends with its prompt. Raises RowFailure."""
        self._clamp(len(token_ids), 0, is_computed=True)
        sequence = self._sequence(request, token_ids, 0, 0, adapter=self._adapter(request.params))
        sequence.is_prefill_only, sequence.clamped_max_tokens = True, None
        return sequence

    def _guarded(self, read: Callable[[Request], T], request: Request) -> T:
        try:
            return read(request)
        except RowFailure:
            raise
        except Exception as error:  # a row that breaks the tokenizer must not break its neighbours
            message = f"the prompt could not be encoded: {type(error).__name__}: {error}"
            raise RowFailure(RowError(ErrorCode.ENGINE_ERROR, message)) from error

    def _clamp(self, num_prompt_tokens: int, max_tokens: int, *, is_computed: bool) -> int:
        """Tokens that may be generated. The last one needs a position, but never a place in the cache.

        With ``is_computed`` the prompt runs even if nothing is to be generated.
        """
        in_context = self._max_model_len - num_prompt_tokens
        in_pool = self._max_kv_tokens - num_prompt_tokens + 1
        least = min(max_tokens, 1)
        if in_context < least:
            _too_long(num_prompt_tokens, f"the model's context is {self._max_model_len} tokens")
        if in_pool < max(least, is_computed):
            _too_long(num_prompt_tokens, f"the KV cache holds {self._max_kv_tokens} tokens")
        return min(max_tokens, in_context, in_pool)


def _too_long(num_prompt_tokens: int, limit: str) -> None:
    message = f"the prompt has {num_prompt_tokens} tokens, but {limit}, prompt and answer together"
    raise RowFailure(RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message))
