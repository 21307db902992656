"""Drift from the reference precision: nothing in float32, little in bfloat16, and the figures are those of the logits."""

import math

import pytest
import torch

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.protocol import EngineProtocol
from batchinfer.engine.reference import ReferenceEngine
from batchinfer.jobs.drift import Drift
from batchinfer.types import Request, SampleProgress
from tests.engine.fakes import drain

pytestmark = pytest.mark.real_model
PROMPT = "The capital of France is"
ANSWER = " Paris, and the capital of Italy is Rome. " * 20  # longer than one chunk


@pytest.fixture(scope="module")
def engine(model_path):
    return ReferenceEngine(EngineConfig(model=str(model_path), dtype="bfloat16", device="cpu", max_model_len=512))


def compare(engine, *requests):
    for request in requests:
        engine.add_request(request)
    return {c.request_id: c.extra["drift"] for c in drain(engine)}


def test_figures_are_those_of_the_whole_logits(engine, reference_model, loaded):
    """Against transformers' model in one forward pass, and our scorer's logits in one piece."""
    assert isinstance(engine, EngineProtocol)
    prompt, answer = (loaded.tokenizer.encode(t, add_special_tokens=False) for t in (PROMPT, ANSWER))
    found = compare(
        engine,
        Request("text", prompt=PROMPT, answer=ANSWER),
        Request("tokens", prompt=PROMPT, progress=(SampleProgress(tuple(answer)),)),
        Request("prompt", prompt=PROMPT),
    )
    assert found["text"] == found["tokens"]
    assert found["prompt"]["tokens"] == len(prompt) - 1
    tokens = [*prompt, *answer]
    with torch.inference_mode():
        logits = reference_model(torch.tensor([tokens])).logits[0]
    expected = torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1]
    own = torch.log_softmax(engine._scorer.logits(tokens), -1)[len(prompt) - 1 : -1]
    divergences = (expected.exp() * (expected - own)).sum(-1)
    drift = Drift()
    drift.add_row(7, found["text"])
    figures = drift.figures()
    assert figures["tokens_compared"] == len(answer) > 128
    assert figures["kl_mean"] == pytest.approx(float(divergences.mean()), rel=0.02, abs=1e-6)
    assert figures["kl_max"] == pytest.approx(float(divergences.max()), rel=0.05, abs=1e-6)
    exact = float(divergences.sort().values[math.ceil(0.99 * len(divergences)) - 1])
    assert figures["kl_p99"] == pytest.approx(exact, rel=0.1, abs=1e-6)
    assert figures["agreement"] == pytest.approx(
        float((expected.argmax(-1) == own.argmax(-1)).float().mean()), abs=0.01
    )
    follows = torch.tensor(answer)[:, None]
    assert figures["reference_perplexity"] == pytest.approx(
        math.exp(-float(expected.gather(1, follows).mean())), rel=1e-3
    )
    assert all(place["row_index"] == 7 for place in figures["differences"])


def test_float32_does_not_drift(model_path):
    """Our own float32 path is the unpatched model, up to rounding."""
    engine = ReferenceEngine(EngineConfig(model=str(model_path), dtype="float32", device="cpu", max_model_len=256))
    drift = Drift()
    drift.add_row(0, compare(engine, Request("a", prompt=PROMPT, answer=ANSWER))["a"])
    assert drift.kl_mean < 1e-6
    assert drift.figures()["agreement"] == 1
