"""Vectors, classes and ranks of encoders are those of sentence-transformers and of transformers' unpatched modules."""

import base64
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from batchinfer.dataset.jsonl_source import JSONL_SCHEMA
from batchinfer.dataset.openai_embeddings import embedding_objects
from batchinfer.dataset.prompt import PromptConfig, RowReader
from batchinfer.dataset.schema import OPTIONAL_COLUMNS
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import create_engine
from batchinfer.tasks import TaskOptions
from batchinfer.types import Request

ROOT = Path(__file__).resolve().parents[3]
MINILM = ROOT / ".models" / "all-MiniLM-L6-v2"
LICENCE = (ROOT / "LICENSE").read_text()
TEXTS = [
    "A man is eating food.",
    "ein Satz mit Umlauten: äöü ☾",
    "x",
    LICENCE[:500],
    LICENCE[300:1500],
    "The girl is carrying a baby. " * 8,
    "two words",
]
SAME = 2e-6
"""Vectors of length 1 in float32, by another order of sums."""


@pytest.fixture(scope="module")
def engine():
    assert MINILM.is_dir(), f"{MINILM} is missing: run `make model`"
    return create_engine(EngineConfig(model=str(MINILM), device="cpu", max_model_len=512))


@pytest.fixture(scope="module")
def sentence_transformer():
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(MINILM), device="cpu", local_files_only=True)
    model.max_seq_length = 512
    return model


def run(engine, *requests):
    for request in requests:
        engine.add_request(request)
    engine.check_integrity()
    found = {}
    while engine.has_unfinished():
        found |= {completion.request_id: completion for completion in engine.step()}
        engine.check_integrity()
    return found


def embed(request_id, text=None, texts=None, **options):
    return Request(request_id, prompt=text, task=TaskOptions(task="embed", **options).request(texts))


def vectors(engine, texts, **options):
    done = run(engine, *(embed(str(i), text, **options) for i, text in enumerate(texts)))
    return torch.tensor([done[str(i)].extra["embedding"] for i in range(len(texts))])


def test_vectors_equal_sentence_transformers(engine, sentence_transformer):
    truth = torch.from_numpy(sentence_transformer.encode(TEXTS, batch_size=1))
    ours = vectors(engine, TEXTS)
    assert ours.shape == (len(TEXTS), 384)
    assert (ours - truth).abs().max() < SAME


@pytest.mark.parametrize("options", [{"normalize": False}, {"dimensions": 64}, {"dimensions": 7, "normalize": False}])
def test_cuts_and_lengths(engine, sentence_transformer, options):
    """A cut vector is scaled to length 1 after the cut, as sentence-transformers does."""
    truth = sentence_transformer.encode(TEXTS[:3], batch_size=1, normalize_embeddings=False)
    raw = torch.from_numpy(truth)
    if options.get("normalize", True):
        cut = raw[:, : options["dimensions"]]
        raw = cut / cut.norm(dim=1, keepdim=True)
        ours = vectors(engine, TEXTS[:3], **options)
    else:
        # the folder's own last module normalises, so the truth is the mean over unpatched hidden states
        from transformers import AutoModel, AutoTokenizer

        tokenizer, model = AutoTokenizer.from_pretrained(MINILM), AutoModel.from_pretrained(MINILM).eval()
        with torch.inference_mode():
            states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS[:3]]
        raw = torch.stack([state.mean(0) for state in states])[:, : options.get("dimensions")]
        ours = vectors(engine, TEXTS[:3], **options)
    torch.testing.assert_close(ours, raw, atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_other_poolings(engine, pooling):
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(MINILM), AutoModel.from_pretrained(MINILM).eval()
    with torch.inference_mode():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]
    truth = torch.stack([state[0 if pooling == "cls" else -1] for state in states])
    torch.testing.assert_close(vectors(engine, TEXTS, pooling=pooling, normalize=False), truth, atol=1e-5, rtol=1e-4)


def test_instruction_and_lists(engine):
    """An instruction is put before each text; a list of texts is a list of vectors."""
    told = run(engine, embed("a", "food", instruction="query: "))["a"]
    plain = run(engine, embed("b", "query: food"))["b"]
    assert told.extra["embedding"] == plain.extra["embedding"]
    several = run(engine, embed("c", texts=["query: food", "x"]))["c"]
    assert several.extra["embeddings"][0] == plain.extra["embedding"]
    assert len(several.extra["embeddings"]) == 2
    assert several.usage.completion_tokens == 0


def test_requests_of_the_openai_door_equal_sentence_transformers(engine, sentence_transformer):
    """From a request's body to the numbers in its answer: texts, their token ids, cut, as base64."""
    schema = pa.schema([JSONL_SCHEMA.field("body")])
    token_ids = [sentence_transformer.tokenizer(text)["input_ids"] for text in TEXTS]
    asked = [{"input": TEXTS}, {"input": token_ids}, {"input": TEXTS, "dimensions": 64}]
    written = [json.dumps({"model": "minilm", "encoding_format": "base64"} | body) for body in asked]
    batch = pa.RecordBatch.from_arrays([pa.array(written, pa.large_string())], schema=schema)
    rows = RowReader(PromptConfig(task=TaskOptions(task="embed"), embedding_lists=True), schema).read(batch, 0)
    done = run(engine, *(row.request for row in rows))
    whole = sentence_transformer.encode(TEXTS, batch_size=1)
    cut = sentence_transformer.encode(TEXTS, batch_size=1, truncate_dim=64, normalize_embeddings=True)
    for index, truth in enumerate((whole, whole, cut)):
        scalar = pa.array([done[str(index)].extra["embeddings"]], OPTIONAL_COLUMNS["embeddings"])[0]
        data = embedding_objects(scalar, written[index])
        ours = np.array([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data])
        assert ours.shape == truth.shape
        assert np.abs(ours - truth).max() < SAME
        assert done[str(index)].usage.prompt_tokens == sum(map(len, token_ids))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_gives_the_same_bytes_alone_and_beside_others(engine, threads):
    """A tile has one shape however many rows it has, so a row's place and neighbours do not matter."""
    torch.set_num_threads(threads)
    try:
        alone = [vectors(engine, [text])[0] for text in TEXTS]
        crowd = ["a " + LICENCE[i * 40 : i * 40 + 20 + i * 11] for i in range(60)]
        mixed = vectors(engine, [*crowd[:25], *TEXTS, *crowd[25:]])[25 : 25 + len(TEXTS)]
        backwards = vectors(engine, [*reversed(TEXTS), *crowd])[: len(TEXTS)].flip(0)
    finally:
        torch.set_num_threads(1)
    for one, two, three in zip(alone, mixed, backwards, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (embed("r", " "), "empty_prompt"),
        (embed("r", texts=["a", ""]), "empty_prompt"),
        (embed("r", "word " * 600), "context_length_exceeded"),
        (embed("r", "a \udc80 surrogate"), "invalid_encoding"),
        (embed("r", "a", dimensions=385), "invalid_params"),
        (Request("r", task={"task": "embed", "token_ids": [[101, 99999]]}), "invalid_params"),
        (Request("r", task={"task": "embed", "token_ids": [[101], []]}), "empty_prompt"),
        (Request("r", task={"task": "embed", "token_ids": [[101]], "instruction": "q"}), "invalid_params"),
        (Request("r", prompt="a"), "invalid_params"),
        (Request("r", prompt="a", task={"task": "score"}), "invalid_params"),
        (Request("r", messages=[{"role": "user", "content": "a"}], task={"task": "embed"}), "invalid_params"),
    ],
)
def test_a_bad_row_says_why(engine, request_, code):
    done = run(engine, request_)["r"]
    assert (done.status.value, done.error.code.value) == ("errored", code)


def test_a_text_of_the_longest_length(engine, sentence_transformer):
    """Without any padding: 510 words and two special tokens."""
    text = "a " * 510
    truth = torch.from_numpy(sentence_transformer.encode([text], batch_size=1))
    assert (vectors(engine, [text]) - truth).abs().max() < SAME
    done = run(engine, embed("r", text + "a"))["r"]
    assert done.error.code.value == "context_length_exceeded"


def test_one_bad_text_of_a_batch_fails_alone(engine, monkeypatch):
    """A model that raises on one text does so again when that text is alone, and on no other."""
    model = engine._model
    poison = model.tokenizer.backend_tokenizer.encode("poison").ids

    class Poisoned:
        def __call__(self, tile, texts):
            if any(list(text.token_ids) == poison for text in texts):
                raise RuntimeError("it burns")
            return model(tile, texts)

    clean = vectors(engine, ["good", "fine"])
    monkeypatch.setattr(engine, "_model", Poisoned())
    done = run(engine, embed("0", "good"), embed("p", "poison"), embed("1", "fine"))
    assert (done["p"].error.code.value, done["p"].error.message) == ("engine_error", "RuntimeError: it burns")
    assert torch.equal(torch.tensor([done[i].extra["embedding"] for i in ("0", "1")]), clean)
    assert engine.stats().step_ns >= sum(completion.device_ns for completion in done.values()) > 0


def test_an_aborted_row_leaves_nothing_behind(engine):
    engine.add_request(embed("a", texts=["one", "two"]))
    engine.add_request(embed("b", "three"))
    engine.abort("a")
    done = run(engine)
    assert {name: completion.status.value for name, completion in done.items()} == {"a": "cancelled", "b": "succeeded"}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Random BERT classifiers with MiniLM's tokenizer, by their number of labels; folders."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    def make(num_labels, **more):
        folder = tmp_path_factory.mktemp("classifier")
        torch.manual_seed(num_labels)
        config = BertConfig(
            vocab_size=30522, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=128, num_labels=num_labels, **more,
        )  # fmt: skip
        model = BertForSequenceClassification(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(MINILM, model_max_length=128).save_pretrained(folder)
        return folder

    return make


def test_a_classification_head(classifier):
    from transformers import pipeline

    names = {0: "bad", 1: "so-so", 2: "good"}
    folder = classifier(3, id2label=names)
    engine = create_engine(EngineConfig(model=str(folder), device="cpu"))
    task = TaskOptions(task="classify").request()
    done = run(engine, *(Request(str(i), prompt=text, task=task) for i, text in enumerate(TEXTS[:3])))
    truth = pipeline("text-classification", model=str(folder), top_k=None)
    for index, text in enumerate(TEXTS[:3]):
        expected = {found["label"]: found["score"] for found in truth([text])[0]}
        extra = done[str(index)].extra
        assert {score["label"]: score["probability"] for score in extra["scores"]} == pytest.approx(expected, abs=1e-5)
        assert extra["label"] == done[str(index)].text == max(expected, key=expected.get)
    told = Request("r", prompt="hi", task=TaskOptions(task="classify", labels=("a", "b")).request())
    assert run(engine, told)["r"].error.code.value == "invalid_params"


@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
def test_a_cross_encoder_ranks_as_sentence_transformers(classifier, activation):
    from sentence_transformers import CrossEncoder

    folder = classifier(1)
    config = json.loads((folder / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": f"torch.nn.modules.activation.{activation}"}
    if activation == "Identity":
        config["sentence_transformers"]["activation_fn"] = "torch.nn.modules.linear.Identity"
    (folder / "config.json").write_text(json.dumps(config))
    engine = create_engine(EngineConfig(model=str(folder), device="cpu"))
    documents = ["Berlin is large.", "Paris is the capital of France.", "x", LICENCE[:300]]
    task = TaskOptions(task="rerank").request(documents)
    done = run(engine, Request("q", prompt="capital of France", task=task))["q"]
    truth = CrossEncoder(str(folder), device="cpu").predict([("capital of France", d) for d in documents], batch_size=1)
    ranking = done.extra["ranking"]
    assert [entry["score"] for entry in ranking] == pytest.approx(truth.tolist(), abs=1e-5)
    order = sorted(range(4), key=lambda index: -truth[index])
    assert [entry["rank"] for entry in ranking] == [order.index(index) + 1 for index in range(4)]
    assert done.extra["score"] == pytest.approx(max(truth.tolist()), abs=1e-5)
    assert done.text == documents[order[0]]
