"""Log-probabilities against transformers' own logits, and the same to the bit whatever the batch, chunks and cache."""

import pytest
import torch

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import build_engine
from batchinfer.engine.logprobs import log_softmax, score_token
from batchinfer.engine.scheduler import MAX_SCORED_TOKENS
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request
from tests.engine.fakes import drain, make_engine, next_token
from tests.engine.test_core import ask, by_id

NEAR = 2e-3
"""Two float32 passes through 30 layers differ by about 1e-4 in a logit; near ties may change places within this."""


def test_a_score_is_the_log_softmax_its_rank_and_the_best():
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 4
    logits[7] = logits[9]
    expected = logits.double().log_softmax(0)
    torch.testing.assert_close(log_softmax(logits).double(), expected, rtol=0, atol=1e-5)
    for token in (0, 7, 9, int(logits.argmax())):
        score = score_token(logits, token, 4)
        assert score.rank == 1 + int((logits > logits[token]).sum())
        assert score.logprob == pytest.approx(expected[token].item(), abs=1e-5)
        assert [i for i, _ in score.top] == logits.argsort(descending=True, stable=True)[:4].tolist()


def test_more_alternatives_than_tokens_are_all_tokens():
    assert len(score_token(torch.randn(3), 0, 20).top) == 3


@pytest.fixture(scope="module")
def rows(loaded, prompts):
    """Prompts of several lengths, one of them longer than may be scored in a step, and their requests."""
    long = (prompts[1] + prompts[4] + prompts[6])[: MAX_SCORED_TOKENS + 60]
    chosen = [*prompts[:2], *[p for p in prompts if 20 < len(p) < 60][:2], long]
    asked = SamplingParams(max_tokens=6, logprobs=5, prompt_logprobs=2, ignore_eos=True)
    drawn = asked.model_copy(update={"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2})
    return [
        Request(str(i), drawn if i % 2 else asked, prompt_token_ids=list(prompt)) for i, prompt in enumerate(chosen)
    ]


def run(loaded, requests, **settings):
    engine = build_engine(
        loaded, EngineConfig(**{"model": "real", "max_model_len": 1024, "num_kv_blocks": 300, **settings})
    )
    for request in requests:
        engine.add_request(request)
    return by_id(drain(engine)), engine.stats()


@pytest.fixture(scope="module")
def alone(loaded, rows):
    """Each row with the engine for itself."""
    return {row.request_id: run(loaded, [row])[0][row.request_id] for row in rows}


def check_entry(entry, logits, num_top):
    """One token's entry against the truth's logits."""
    truth = logits.double().log_softmax(0)
    assert entry["logprob"] == pytest.approx(truth[entry["token_id"]].item(), abs=NEAR)
    own = truth[entry["token_id"]]
    assert 1 + int((truth > own + NEAR).sum()) <= entry["rank"] <= 1 + int((truth > own - NEAR).sum())
    best = truth.topk(num_top).values.tolist()
    assert [top["logprob"] for top in entry["top"]] == pytest.approx(best, abs=NEAR)
    for top in entry["top"]:
        assert top["logprob"] == pytest.approx(truth[top["token_id"]].item(), abs=NEAR)


@pytest.mark.real_model
@torch.inference_mode()
def test_logprobs_and_prompt_logprobs_are_those_of_transformers(loaded, rows, alone, reference_model):
    """Of the model's logits as they are, also where a temperature and a penalty chose the token."""
    tokenizer = loaded.tokenizer
    for row in rows:
        completion = alone[row.request_id]
        tokens = [*row.prompt_token_ids, *completion.token_ids]
        logits = reference_model(torch.tensor([tokens])).logits[0]
        prompt = completion.extra["prompt_logprobs"]
        assert [entry["token_id"] for entry in prompt] == row.prompt_token_ids
        assert prompt[0]["logprob"] is prompt[0]["rank"] is None
        for position, entry in enumerate(prompt[1:]):
            check_entry(entry, logits[position], 2)
        answer = completion.extra["logprobs"]
        assert [entry["token_id"] for entry in answer] == list(completion.token_ids)
        for position, entry in enumerate(answer, start=len(row.prompt_token_ids) - 1):
            check_entry(entry, logits[position], 5)
            assert entry["token"] == tokenizer.decode([entry["token_id"]])
        total = sum(entry["logprob"] for entry in answer)
        assert completion.extra["cumulative_logprob"] == pytest.approx(total, abs=1e-9)


@pytest.mark.real_model
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 48, "max_num_seqs": 3}, {"enable_prefix_caching": False}, {"block_size": 32}],
    ids=str,
)
def test_the_same_bytes_in_any_batch_and_from_a_warm_cache(loaded, rows, alone, settings):
    """Rows that ask for scores, plain rows of the same prompts before, between and after them."""
    plain = SamplingParams(max_tokens=6, ignore_eos=True)
    before = [Request(f"before {r.request_id}", plain, prompt_token_ids=r.prompt_token_ids) for r in rows]
    after = [Request(f"again {r.request_id}", r.params, prompt_token_ids=r.prompt_token_ids) for r in reversed(rows)]
    done, stats = run(loaded, [*before, *rows, *after], **settings)
    for row in rows:
        for name in (row.request_id, f"again {row.request_id}"):
            assert done[name].extra == alone[row.request_id].extra
            assert done[name].token_ids == alone[row.request_id].token_ids
            assert done[name].usage.cached_tokens == 0, "the cache has no logits"
        if row.params.is_greedy and row.params.repetition_penalty == 1:
            assert done[f"before {row.request_id}"].token_ids == alone[row.request_id].token_ids
    assert stats.preemptions == 0


@pytest.mark.real_model
def test_a_prompt_alone_can_be_scored_and_echoed(loaded, rows, alone):
    """max_tokens 0: nothing is generated, and the prompt has its numbers."""
    asked = SamplingParams(max_tokens=0, prompt_logprobs=2, echo=True)
    requests = [Request(f"{r.request_id}", asked, prompt_token_ids=r.prompt_token_ids) for r in rows]
    text = "The capital of  France\nis"
    done, _ = run(loaded, [*requests, Request("text", asked, prompt=text)])
    for row in rows:
        completion = done[row.request_id]
        assert completion.extra["prompt_logprobs"] == alone[row.request_id].extra["prompt_logprobs"]
        assert completion.text == loaded.tokenizer.decode(row.prompt_token_ids, skip_special_tokens=True)
        assert completion.usage.completion_tokens == 0
    assert done["text"].text == text


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("blocks", [6, 32])
def test_prompt_scores_survive_chunks_preemption_and_a_failed_step(caching, blocks):
    """The favourite of each position is the fake model's answer to what comes before it."""
    engine = make_engine(num_blocks=blocks, max_num_batched_tokens=5, caching=caching, estimate=lambda _: 1)
    failing = iter([False, False, True, False, True])

    def sometimes(scheduled):
        if len(scheduled) > 1 and next(failing, False):
            raise RuntimeError("flaky")

    engine._runner.before_step = sometimes
    prompts = {"a": [3, 1, 4, 1, 5, 9, 2, 6], "b": [3, 1, 4, 1, 5, 9, 2, 7], "c": [2, 7]}
    for name, prompt in prompts.items():
        engine.add_request(ask(name, prompt, max_tokens=12, prompt_logprobs=1, logprobs=1, ignore_eos=True))
    done = by_id(drain(engine))
    for name, prompt in prompts.items():
        tokens = [*prompt, *done[name].token_ids]
        entries = done[name].extra["prompt_logprobs"][1:] + done[name].extra["logprobs"]
        assert [entry["token_id"] for entry in entries] == tokens[1:]
        assert [entry["top"][0]["token_id"] for entry in entries] == [
            next_token(tokens[:i]) for i in range(1, len(tokens))
        ]
