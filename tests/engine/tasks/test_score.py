"""Scores of continuations and texts are those of transformers' unpatched model, by lm-evaluation-harness's definitions."""

import math
from pathlib import Path

import pytest
import torch

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import build_engine, create_engine
from batchinfer.tasks import TaskOptions
from batchinfer.types import Request
from tests.engine.fakes import drain

pytestmark = pytest.mark.real_model
LICENCE = (Path(__file__).resolve().parents[3] / "LICENSE").read_text()
QUESTION = "Question: What is the capital of France?\nAnswer:"
CHOICES = [" Paris", " London", " the city of Berlin", " Paris, of course"]
CONTEXT = 128
CLOSE = 2e-4


@pytest.fixture(scope="module")
def engine(loaded):
    return build_engine(
        loaded, EngineConfig(model="shared", num_kv_blocks=64, max_num_seqs=8, max_num_batched_tokens=96)
    )


@pytest.fixture(scope="module")
def short_engine(model_path):
    """A model whose context is short, so that a text of some hundred tokens needs windows."""
    config = EngineConfig(
        model=str(model_path),
        dtype="float32",
        device="cpu",
        max_model_len=CONTEXT,
        num_kv_blocks=64,
        max_num_batched_tokens=100,
    )
    return create_engine(config)


def run(engine, *requests):
    """Completions by id."""
    for request in requests:
        engine.add_request(request)
    found = {completion.request_id: completion for completion in drain(engine)}
    engine.check_integrity()
    return found


def score(request_id, prompt, texts=None, **options):
    return Request(request_id, prompt=prompt, task=TaskOptions(task="score", **options).request(texts))


@torch.inference_mode()
def logprobs_of(model, token_ids):
    """float64 log-probabilities [len(token_ids), vocab_size] of what follows each token."""
    return model(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)


def by_hand(model, tokenizer, context, continuation):
    """lm-eval's ``loglikelihood`` of one pair: the sum, the number of tokens, whether it is the greedy answer."""
    whole = tokenizer.encode(context + continuation, add_special_tokens=False)
    num_context = len(tokenizer.encode(context.rstrip(), add_special_tokens=False))
    lines = logprobs_of(model, whole[:-1])[num_context - 1 :]
    targets = torch.tensor(whole[num_context:])
    total = lines.gather(1, targets[:, None]).sum().item()
    return total, len(targets), bool((lines.argmax(-1) == targets).all())


def test_choices_equal_the_reference(engine, loaded, reference_model):
    done = run(engine, score("q", QUESTION, CHOICES))["q"]
    truth = [by_hand(reference_model, loaded.tokenizer, QUESTION, choice) for choice in CHOICES]
    for ours, (total, num_tokens, is_greedy), text in zip(done.extra["choice_scores"], truth, CHOICES, strict=True):
        assert ours["logprob"] == pytest.approx(total, abs=CLOSE)
        assert (ours["num_tokens"], ours["is_greedy"], ours["num_bytes"]) == (num_tokens, is_greedy, len(text))
        assert ours["logprob_per_token"] == pytest.approx(total / num_tokens, abs=CLOSE)
        assert ours["logprob_per_byte"] == pytest.approx(total / len(text), abs=CLOSE)
    totals = [total for total, _, _ in truth]
    per_byte = [total / len(text) for total, text in zip(totals, CHOICES, strict=True)]
    per_token = [total / num_tokens for total, num_tokens, _ in truth]
    best = {
        name: values.index(max(values))
        for name, values in (("sum", totals), ("per_token", per_token), ("per_byte", per_byte))
    }
    assert done.extra["best_choice"] == best
    assert done.text == CHOICES[best["sum"]] == " Paris"
    assert done.extra["logprob"] == done.extra["choice_scores"][best["sum"]]["logprob"]
    assert done.usage.completion_tokens == 0
    num_prompt = len(loaded.tokenizer.encode(QUESTION, add_special_tokens=False))
    assert done.usage.prompt_tokens == num_prompt + sum(num_tokens for _, num_tokens, _ in truth)


@pytest.mark.parametrize(
    ("context", "continuation"), [("Answer: ", "42"), ("a b", " c d e"), ("2 + 2 =", " 4, as one knows")]
)
def test_white_space_belongs_to_the_continuation(engine, loaded, reference_model, context, continuation):
    done = run(engine, score("q", context, [continuation]))["q"]
    total, num_tokens, is_greedy = by_hand(reference_model, loaded.tokenizer, context, continuation)
    (only,) = done.extra["choice_scores"]
    assert only["logprob"] == pytest.approx(total, abs=CLOSE)
    assert (only["num_tokens"], only["is_greedy"]) == (num_tokens, is_greedy)
    assert done.extra["perplexity"] == pytest.approx(math.exp(-total / num_tokens), rel=1e-3)


def test_one_pass_scores_choices_of_one_token(loaded):
    """Four answers of one token need the prompt and nothing else: as many tokens as it has are computed."""
    engine = build_engine(loaded, EngineConfig(model="shared", num_kv_blocks=64))
    prompt = LICENCE[:600] + "\nAnswer:"
    done = run(engine, score("q", prompt, [" A", " B", " C", " D"]))["q"]
    stats = engine.stats()
    assert [choice["num_tokens"] for choice in done.extra["choice_scores"]] == [1, 1, 1, 1]
    assert stats.prefill_tokens == len(loaded.tokenizer.encode(prompt, add_special_tokens=False))
    assert (stats.decode_tokens, stats.completion_tokens, stats.used_blocks) == (0, 0, 0)


def test_the_prompt_of_many_choices_is_computed_once(loaded):
    """Of each further choice only what follows the last full block of the prompt is computed."""
    engine = build_engine(loaded, EngineConfig(model="shared", num_kv_blocks=64, max_num_batched_tokens=64))
    prompt = LICENCE[:900] + "\nAnswer:"
    choices = [f" choice number {number}" for number in ("one", "two", "three", "four")]
    run(engine, score("q", prompt, choices))
    num_prompt = len(loaded.tokenizer.encode(prompt, add_special_tokens=False))
    longest = max(len(loaded.tokenizer.encode(choice, add_special_tokens=False)) for choice in choices)
    assert engine.stats().prefill_tokens <= num_prompt + len(choices) * (16 + longest)


def rolling(model, tokenizer, text, max_len, stride=None):
    """lm-eval's ``loglikelihood_rolling`` where no stride is given: BOS, then every token once, in windows."""
    tokens = [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
    total, done, size = 0.0, 1, max_len
    while done < len(tokens):
        end = min(len(tokens), done + size)
        window = tokens[max(0, end - 1 - max_len) : end - 1]
        lines = logprobs_of(model, window)[-(end - done) :]
        total += lines.gather(1, torch.tensor(tokens[done:end])[:, None]).sum().item()
        done, size = end, min(stride or max_len, max_len)
    return total, len(tokens) - 1


@pytest.mark.parametrize("stride", [None, 48, 1000])
@pytest.mark.parametrize("size", [3, 400, 1500])
def test_a_text_of_any_length(short_engine, loaded, reference_model, size, stride):
    text = LICENCE[200 : 200 + size]
    done = run(short_engine, score("t", text, score_stride=stride))["t"]
    total, num_tokens = rolling(reference_model, loaded.tokenizer, text, CONTEXT, stride)
    (only,) = done.extra["choice_scores"]
    assert only["num_tokens"] == num_tokens == done.usage.prompt_tokens
    assert only["logprob"] == pytest.approx(total, rel=1e-4)
    assert done.extra["perplexity"] == pytest.approx(math.exp(-total / num_tokens), rel=1e-4)
    assert (done.text, only["num_bytes"]) == ("", len(text.encode()))


def test_a_row_gives_the_same_bytes_alone_and_beside_others(loaded):
    """Small steps cut prompts in pieces and mix them with answers that are generated; not a bit may change."""
    rows = [
        score("choices", QUESTION, CHOICES),
        score("text", LICENCE[:900]),
        score("long", LICENCE[:700], [" Apache", " License and so on"]),
    ]
    others = [Request(f"other-{number}", prompt=LICENCE[number * 50 : number * 50 + 120]) for number in range(6)]

    def fresh(**settings):
        return build_engine(loaded, EngineConfig(model="shared", num_kv_blocks=96, **settings))

    alone = {row.request_id: run(fresh(max_num_batched_tokens=512), row)[row.request_id].extra for row in rows}
    mixed = run(fresh(max_num_batched_tokens=40, max_num_seqs=5), *others[:3], *rows, *others[3:])
    for name, extra in alone.items():
        assert mixed[name].extra == extra


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (score("r", QUESTION, []), "no_continuation"),
        (score("r", QUESTION, [" Paris", "  "]), "no_continuation"),
        (score("r", "  "), "empty_prompt"),
        (score("r", "", [" Paris"]), "empty_prompt"),
        (score("r", "long " * 200, [" Paris"]), "context_length_exceeded"),
        (Request("r", prompt="hi", task={"task": "score", "pooling": "mean"}), "invalid_params"),
        (Request("r", prompt="hi", task={"task": "sing"}), "invalid_params"),
    ],
)  # fmt: skip
def test_a_bad_row_says_why(short_engine, request_, code):
    done = run(short_engine, request_)["r"]
    assert (done.status.value, done.error.code.value) == ("errored", code)
    assert short_engine.stats().used_blocks == 0
