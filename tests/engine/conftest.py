"""One real model a session: loaded by us, loaded independently, and what transformers generates with it."""

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from tests.engine.reference import generate_alone, load_reference

ROOT = Path(__file__).resolve().parents[2]
NUM_PROMPTS = 64
NEW_TOKENS = 16
EOS = 2  # <|im_end|> of SmolLM2


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Two OpenMP threads collapse tenfold as soon as anything else takes a core; one is never slower than that."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_path():
    """The small real model: ``BATCHINFER_TEST_MODEL`` or the one that ``make model`` fetches."""
    if path := os.environ.get("BATCHINFER_TEST_MODEL"):
        return Path(path)
    found = sorted((ROOT / ".models").glob("*.gguf"))
    assert found, "no model in .models; run `make model`"
    return found[0]


@pytest.fixture(scope="session")
def loaded(model_path):
    """The model as our own loader gives it."""
    from batchinfer.engine.attention import ATTENTION_NAME, register_attention
    from batchinfer.engine.config import EngineConfig
    from batchinfer.models.load import load_model

    register_attention()
    return load_model(EngineConfig(model=str(model_path), dtype="float32", device="cpu"), ATTENTION_NAME)


@pytest.fixture(scope="session")
def prompts(loaded):
    """64 real prompts of 1 to some 250 tokens: the example job's, and pieces of the licence for the long ones."""
    tokenizer = loaded.tokenizer
    texts = []
    for row in pq.read_table(ROOT / "examples" / "prompts.parquet").to_pylist():
        if row["messages"] is not None:
            chat = tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
            texts.append(chat)
        elif row["prompt"] and row["prompt"].strip():
            texts.append(row["prompt"])
    licence = (ROOT / "LICENSE").read_text()
    pieces = [licence[at * 1000 : at * 1000 + size] for at, size in enumerate((30, 200, 450, 700, 1000, 1300))]
    encoded = [[504], *(tokenizer.encode(text, add_special_tokens=False) for text in pieces + texts)]
    short = [ids for ids in encoded if len(ids) < 400]  # one example is over-long on purpose
    assert len(short) >= NUM_PROMPTS
    return short[:NUM_PROMPTS]


@pytest.fixture(scope="session")
def reference_model(model_path):
    """transformers' own unpatched model, in float32."""
    return load_reference(model_path)


@pytest.fixture(scope="session")
def truths(reference_model, prompts):
    """Per prompt what transformers generates, computed once."""
    return [generate_alone(reference_model, prompt, NEW_TOKENS, EOS) for prompt in prompts]
