"""Vectors, labels and ranks of a decoder are those of transformers' unpatched model."""

import math
from pathlib import Path

import pytest
import torch

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import build_engine
from batchinfer.tasks import TaskOptions
from batchinfer.types import Request
from tests.engine.fakes import drain
from tests.engine.tasks.test_score import by_hand

pytestmark = pytest.mark.real_model
LICENCE = (Path(__file__).resolve().parents[3] / "LICENSE").read_text()
TEXTS = ["A man is eating food.", "x", LICENCE[:700], LICENCE[:600] + "but then another end", "☾ ä"]
LABELS = (" positive", " negative", " rather mixed")
REVIEW = "Review: I loved every minute of it.\nSentiment:"


def fresh(loaded, **settings):
    return build_engine(loaded, EngineConfig(model="shared", num_kv_blocks=96, **settings))


def run(engine, *requests):
    for request in requests:
        engine.add_request(request)
    found = {completion.request_id: completion for completion in drain(engine)}
    engine.check_integrity()
    assert engine.stats().used_blocks == 0
    return found


def embed(request_id, text, **options):
    return Request(request_id, prompt=text, task=TaskOptions(task="embed", **options).request())


@pytest.fixture(scope="module")
def states(loaded, reference_model):
    """Of each text the last hidden states of transformers' own model."""
    encoded = [loaded.tokenizer.encode(text) for text in TEXTS]
    with torch.inference_mode():
        return [reference_model.model(torch.tensor([ids])).last_hidden_state[0] for ids in encoded]


@pytest.mark.parametrize("pooling", ["mean", "last", "cls", "auto"])
def test_vectors_equal_the_reference(loaded, states, pooling):
    """``auto`` is the last token of a decoder whose folder says nothing else."""
    pool = {"mean": lambda s: s.double().mean(0).float(), "cls": lambda s: s[0]}.get(pooling, lambda s: s[-1])
    truth = torch.stack([torch.nn.functional.normalize(pool(state), dim=0) for state in states])
    engine = fresh(loaded, max_num_batched_tokens=64)
    done = run(engine, *(embed(str(i), text, pooling=pooling) for i, text in enumerate(TEXTS)))
    ours = torch.tensor([done[str(i)].extra["embedding"] for i in range(len(TEXTS))])
    torch.testing.assert_close(ours, truth, atol=3e-6, rtol=1e-4)
    assert all(completion.usage.completion_tokens == 0 for completion in done.values())


def test_the_last_token_alone_lets_a_prefix_be_shared(loaded, states):
    """Two texts begin alike: the second finds the first's blocks, but for a mean each token must be computed."""
    num_tokens = sum(map(len, states[2:4]))
    for pooling, shares in (("last", True), ("mean", False)):
        engine = fresh(loaded)
        run(engine, *(embed(str(i), TEXTS[i], pooling=pooling) for i in (2, 3)))
        assert (engine.stats().prefill_tokens < num_tokens) is shares


def test_vectors_through_transformers_modules(loaded, states):
    """Families without fused layers give the states of their own body."""
    engine = fresh(loaded, block_size=10)  # the fused layers need a multiple of 16
    assert engine.stats().layers == "transformers"
    done = run(engine, *(embed(str(i), text, normalize=False) for i, text in enumerate(TEXTS)))
    ours = torch.tensor([done[str(i)].extra["embedding"] for i in range(len(TEXTS))])
    torch.testing.assert_close(ours, torch.stack([state[-1] for state in states]), atol=2e-4, rtol=2e-4)


def classify(request_id, prompt, **options):
    return Request(request_id, prompt=prompt, task=TaskOptions(task="classify", labels=LABELS, **options).request())


def test_labels_equal_the_reference(loaded, reference_model):
    done = run(fresh(loaded), classify("r", REVIEW))["r"]
    logprobs = [by_hand(reference_model, loaded.tokenizer, REVIEW, label)[0] for label in LABELS]
    weights = [math.exp(logprob) for logprob in logprobs]
    ours = [score["probability"] for score in done.extra["scores"]]
    assert ours == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-4)
    assert sum(ours) == pytest.approx(1)
    assert done.extra["label"] == done.text == LABELS[weights.index(max(weights))]


def test_calibration_divides_a_labels_own_likelihood_out(loaded, reference_model):
    neutral = "Review: N/A\nSentiment:"
    done = run(
        fresh(loaded),
        classify("r", REVIEW, content_free_prompt=neutral),
        classify("n", neutral, content_free_prompt=neutral),
    )

    def logprobs(prompt):
        return [by_hand(reference_model, loaded.tokenizer, prompt, label)[0] for label in LABELS]

    weights = [math.exp(own - free) for own, free in zip(logprobs(REVIEW), logprobs(neutral), strict=True)]
    ours = [score["probability"] for score in done["r"].extra["scores"]]
    assert ours == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-4)
    # a prompt that says nothing is undecided by definition
    assert [score["probability"] for score in done["n"].extra["scores"]] == pytest.approx([1 / 3] * 3)


def test_documents_are_ranked_by_yes_against_no(loaded, reference_model):
    """The chat is put together here from the template's own text, and the logits are the unpatched model's."""
    documents = ["Paris is the capital of France.", "Bananas are yellow."]
    task = TaskOptions(task="rerank", instruction="Find the answer.").request(documents)
    done = run(fresh(loaded), Request("q", prompt="What is the capital of France?", task=task))["q"]
    scores = []
    for document in documents:
        conversation = [
            {
                "role": "system",
                "content": "Decide whether the document meets the instruction for the query. The answer is only yes or no.",
            },
            {
                "role": "user",
                "content": f"Instruction: Find the answer.\nQuery: What is the capital of France?\nDocument: {document}",
            },
        ]
        text = loaded.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        yes, no = (math.exp(by_hand(reference_model, loaded.tokenizer, text, answer)[0]) for answer in ("yes", "no"))
        scores.append(yes / (yes + no))
    ranking = done.extra["ranking"]
    assert [entry["score"] for entry in ranking] == pytest.approx(scores, abs=1e-4)
    best = scores.index(max(scores))
    assert [entry["rank"] for entry in ranking] == ([1, 2] if best == 0 else [2, 1])
    assert (done.text, done.extra["score"]) == (documents[best], ranking[best]["score"])


def test_token_ids_are_the_text_that_they_are_of(loaded):
    token_ids = [loaded.tokenizer.encode(text) for text in TEXTS[:2]]
    task = TaskOptions(task="embed")
    done = run(
        fresh(loaded),
        Request("ids", task={**task.request(), "token_ids": token_ids}),
        Request("texts", task=task.request(TEXTS[:2])),
        embed("cut", "x", dimensions=10**6),
    )
    assert done["ids"].extra["embeddings"] == done["texts"].extra["embeddings"]
    assert done["ids"].usage.prompt_tokens == sum(map(len, token_ids))
    assert "vectors have 576" in done["cut"].error.message


def test_rows_of_all_tasks_give_the_same_bytes_alone_and_together(loaded):
    documents = ["Paris.", "Bananas are yellow.", LICENCE[:200]]
    rows = [
        *(embed(f"mean-{i}", text, pooling="mean") for i, text in enumerate(TEXTS)),
        *(embed(f"last-{i}", text) for i, text in enumerate(TEXTS)),
        classify("label", REVIEW, content_free_prompt="Review: N/A\nSentiment:"),
        Request("rank", prompt="France?", task=TaskOptions(task="rerank").request(documents)),
        Request("text", prompt=LICENCE[:500]),
    ]
    alone = {row.request_id: run(fresh(loaded), row)[row.request_id] for row in rows}
    together = run(fresh(loaded, max_num_batched_tokens=40, max_num_seqs=6), *rows)
    for name, completion in alone.items():
        assert (together[name].extra, together[name].text) == (completion.extra, completion.text)


def test_a_row_without_labels_says_why(loaded):
    done = run(fresh(loaded), Request("r", prompt="hi", task={"task": "classify"}))["r"]
    assert done.error.code.value == "invalid_params"
