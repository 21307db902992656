"""``explain``: a whole input as the engine will see it, and what would make it cheaper. Memory stays bounded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchinfer.jobs.foresight_views import Advice
from batchinfer.jobs.sketches import (
    BLOCK_TOKENS,
    CacheModel,
    DistinctCounter,
    Histogram,
    PrefixTree,
    chain,
    common_suffix,
    key_of,
)
from batchinfer.jobs.survey import ENCODE_ROWS, Stratum, Survey, encode_rows
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request, RowError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchinfer.dataset.prompt import RowReader
    from batchinfer.dataset.source import InputSource
    from batchinfer.jobs.survey import EncodedRow
    from batchinfer.jobs.token_process import Encoder

KV_BLOCKS = 4096
"""Blocks of the cache that is modelled by default: 64 full contexts of 1,024 tokens."""
WINDOW_ROWS = 512
"""Rows that the scheduler sees at once, about."""
LEAST_ADVICE = 0.02
"""Savings below this share are not worth a sentence."""


@dataclass(slots=True)
class Explanation:
    """What was found."""

    kv_blocks: int
    window_rows: int
    num_rows: int = 0
    num_run: int = 0
    prompt_tokens: int = 0
    answer_limit: int = 0
    """Sum of the rows' most answer tokens."""
    errors: dict[str, int] = field(default_factory=dict)
    tree: PrefixTree = field(default_factory=PrefixTree)
    distinct: DistinctCounter = field(default_factory=DistinctCounter)
    lengths: Histogram = field(default_factory=Histogram)
    hit_tokens: int = 0
    rest_tokens: int = 0
    """Prompt tokens behind each row's last full block."""
    suffix: list[int] | None = None
    """Token ids that all prompts end with."""

    @property
    def unique_rows(self) -> int:
        """Rows that differ, of those that run."""
        return min(self.num_run, self.distinct.number)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the modelled cache has."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def survey(self) -> Survey:
        """The same rows as a survey of the whole, for the estimate."""
        whole = Stratum(self.num_rows, self.num_rows - self.num_run, self.prompt_tokens, self.answer_limit)
        return Survey(self.num_rows, is_whole=True, strata=[whole], errors=dict(self.errors))


def explain_rows(
    source: InputSource,
    reader: RowReader,
    encoder: Encoder,
    *,
    max_rows: int | None = None,
    kv_blocks: int = KV_BLOCKS,
    window_rows: int = WINDOW_ROWS,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Explanation:
    """Tokenise rows in order (the first ``max_rows``) and see what they share. ``on_progress(done, total)``.

    Raises:
        InputError: the input cannot be read.
    """
    end = source.num_rows if max_rows is None else min(max_rows, source.num_rows)
    found, cache = Explanation(kv_blocks, window_rows), CacheModel(kv_blocks, window_rows)
    for first, batch in source.iter_batches(0, end, reader.columns, ENCODE_ROWS):
        rows = reader.read(batch, first)
        found.num_rows += len(rows)
        for one in encode_rows(rows, encoder):
            if isinstance(one, str):
                found.errors[one] = found.errors.get(one, 0) + 1
            else:
                _add(found, cache, one)
        on_progress(found.num_rows, end)
    cache.flush()
    found.hit_tokens = cache.hit_tokens
    return found


def _add(found: Explanation, cache: CacheModel, row: EncodedRow) -> None:
    tokens, hashes = row.tokens, chain(row.tokens)
    found.tree.add(hashes, int(row.request.request_id))
    cache.add(hashes)
    found.distinct.add(key_of((tokens, row.request.params.model_dump_json(exclude_defaults=True))))
    found.lengths.add(len(tokens))
    found.num_run += 1
    found.prompt_tokens += len(tokens)
    found.rest_tokens += len(tokens) - BLOCK_TOKENS * len(hashes)
    found.answer_limit += row.max_tokens
    found.suffix = common_suffix(found.suffix, tokens)


def advise(found: Explanation, answer_tokens: float, encoder: Encoder, *, is_chat: bool, reuses: bool) -> list[Advice]:
    """What would make the job cheaper, the greatest saving first. ``answer_tokens``: of all rows, as expected."""
    computed = found.prompt_tokens - found.hit_tokens + answer_tokens
    if found.num_run < 2 or computed <= 0:
        return []
    advice = [
        *_instruction_first(found, computed, encoder, is_chat=is_chat),
        *([] if reuses else _reuse(found, answer_tokens, computed)),
        *_sort(found, computed),
        *_cap(found),
    ]
    return sorted((one for one in advice if one.saved_share >= LEAST_ADVICE), key=lambda one: -one.saved_share)


def _instruction_first(found: Explanation, computed: float, encoder: Encoder, *, is_chat: bool) -> list[Advice]:
    """Prompts that end alike: what they share could stand first, and would be computed once."""
    suffix = len(found.suffix or ()) - _tail_tokens(encoder, is_chat=is_chat)
    blocks = suffix // BLOCK_TOKENS
    if blocks < 1 or found.unique_rows < 2:
        return []
    saved = blocks * BLOCK_TOKENS * (found.num_run - 1)
    text = (
        f"All prompts end with the same {suffix} tokens. Move them before what differs (the instruction before the "
        f"document): they are then computed once"
    )
    return [_advice("instruction_first", text, saved, computed)]


def _tail_tokens(encoder: Encoder, *, is_chat: bool) -> int:
    """Tokens that the chat template puts behind every conversation: they cannot be moved."""
    if not is_chat:
        return 0
    made = [
        Request(str(index), SamplingParams(), messages=[{"role": "user", "content": word}])
        for index, word in enumerate(("apple", "7"))
    ]
    one, other = encoder.encode(made)
    if isinstance(one, RowError) or isinstance(other, RowError):
        return 0
    return len(common_suffix(one, other))


def _reuse(found: Explanation, answer_tokens: float, computed: float) -> list[Advice]:
    copies = found.num_run - found.unique_rows
    if not copies:
        return []
    # a copy's full blocks are cached anyway: what it saves is its answer, and the rest of its prompt
    saved = int(copies * (answer_tokens + found.rest_tokens) / found.num_run)
    text = f"{copies:,} of {found.num_run:,} rows are copies of others: --reuse-results computes equal rows of a shard once"
    return [_advice("reuse_results", text, saved, computed)]


def _sort(found: Explanation, computed: float) -> list[Advice]:
    saved = found.tree.shared_tokens - found.hit_tokens
    text = (
        "Rows that begin alike lie far apart: sort the input by the prompt, so that the cache still has what they share"
    )
    return [_advice("sort_rows", text, saved, computed)] if saved > 0 else []


def _cap(found: Explanation) -> list[Advice]:
    """What a lower limit would take off the most that the job can cost."""
    most = found.prompt_tokens - found.hit_tokens + found.answer_limit
    saved = found.answer_limit // 2
    limit = found.answer_limit // found.num_run // 2
    text = f"The answers may have {found.answer_limit:,} tokens: --max-tokens {limit} halves that, if answers are that short"
    return [_advice("cap_answers", text, saved, most)] if limit else []


def _advice(kind: str, text: str, saved: int, computed: float) -> Advice:
    share = min(1.0, saved / computed)
    of = "of the most it can compute" if kind == "cap_answers" else "of its tokens"
    return Advice.model_validate(
        {"kind": kind, "text": f"{text}: {share:.0%} less {of}.", "saved_share": round(share, 6), "saved_tokens": saved}
    )


def longest_first(shard_tokens: Sequence[int], num_workers: int) -> float:
    """How much longer than its share the busiest of so many workers works, if none is idle while a shard waits.

    1 is even; a job of one shard on four workers is 4.
    """
    total = sum(shard_tokens)
    if not total:
        return 1.0
    # a list schedule ends no later than the even share plus the largest shard's rest (Graham's bound)
    bound = total / num_workers + max(shard_tokens) * (1 - 1 / num_workers)
    return min(bound, float(total)) * num_workers / total
