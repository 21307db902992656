"""Ranks as processes: the same answers as one device, and no rank is left when another ends.

``test_tensor_parallel.py`` shows the arithmetic for every family.
"""

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from batchinfer import Engine
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import create_engine
from batchinfer.engine.parallel.devices import config_of_rank
from batchinfer.engine.parallel.step import read_step, write_step
from batchinfer.engine.process import EngineProcess
from batchinfer.errors import EngineError, EngineStalledError, ModelError
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request
from tests.engine.small_decoder import small_model
from tests.engine.test_load import words_tokenizer
from tests.engine.test_process import fault, is_alive, wait_until_dead

VOCAB, ANSWER = 97, 10
PROMPTS = [f"w{i} w7 w{(5 * i) % 90} w1 " * (1 + i % 4) for i in range(14)]
CACHE = {"kv_cache_bytes": 1 << 22, "max_num_batched_tokens": 48}


@pytest.fixture(scope="module")
def model():
    return small_model("qwen3", vocab_size=VOCAB, max_position_embeddings=128).float()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "small"
    model.save_pretrained(path)
    words_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def truth(model):
    """transformers' greedy answers, one prompt at a time."""
    tokenizer = words_tokenizer()
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        with torch.inference_mode():
            tokens = model.generate(
                torch.tensor([ids]), max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False, pad_token_id=0
            )
        answers.append(tuple(tokens[0, len(ids) :].tolist()))
    return answers


def requests(**params):
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, **params)
    return [Request(str(i), greedy, prompt=prompt) for i, prompt in enumerate(PROMPTS)]


def answers_of(engine, **params):
    found = {completion.request_id: completion for completion in engine.generate(requests(**params))}
    return [found[str(i)] for i in range(len(PROMPTS))]


def rank_pids(parent):
    """The rank processes of a process."""
    return [child.pid for child in psutil.Process(parent).children() if "rank_child" in " ".join(child.cmdline())]


def test_two_ranks_answer_as_transformers_does_and_to_the_byte_whatever_the_batch(folder, truth):
    """Large and small batches, guessed tokens, sampled rows; the log-probabilities show every bit of a logit."""
    with Engine(folder, tensor_parallel_size=2, **CACHE) as engine:
        answers = answers_of(engine, logprobs=3)
        assert [a.token_ids for a in answers] == truth
        alone = [next(iter(engine.generate([request]))) for request in requests(logprobs=3)[:3]]
        for together, single in zip(answers, alone, strict=False):
            assert (together.token_ids, together.extra) == (single.token_ids, single.extra)
        sampled = requests(logprobs=2, seed=7)
        sampled = [replace(r, params=r.params.model_copy(update={"temperature": 0.8})) for r in sampled]
        first, again = ([(c.token_ids, c.extra) for c in engine.generate(sampled)] for _ in range(2))
        assert sorted(map(str, first)) == sorted(map(str, again))
        (pid,) = rank_pids(os.getpid())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=rf"rank 1 of 2 \(process {pid}\) ended with SIGKILL"):
            answers_of(engine)
    assert not is_alive(pid)


def test_an_engine_process_with_a_hanging_rank_is_a_stall_and_all_of_it_is_killed(folder, truth):
    config = EngineConfig(folder, tensor_parallel_size=2, dtype="float32", **CACHE)
    process = EngineProcess("batchinfer.engine.engine:create_engine", config, stall_seconds=1.0)
    try:
        process.submit(requests())
        found = {}
        while process.num_unfinished:
            found |= {c.request_id: c.token_ids for c in process.poll(1)}
        assert [found[str(i)] for i in range(len(PROMPTS))] == truth
        (rank,) = rank_pids(process.pid)
        os.kill(rank, signal.SIGSTOP)
        process.submit(requests())
        assert isinstance(fault(process), EngineStalledError)
        wait_until_dead(rank)
    finally:
        process.close()


def test_a_step_crosses_as_numbers():
    tokens, table = list(range(100, 140)), [4, 9, 1]
    row = SimpleNamespace(token_ids=tokens, block_table=table, is_prefill_only=False)
    embedded = SimpleNamespace(token_ids=tokens, block_table=table, is_prefill_only=True)
    parts = [
        SimpleNamespace(sequence=row, start=30, num_new_tokens=12, samples=True, guesses=[7, 8]),
        SimpleNamespace(sequence=embedded, start=0, num_new_tokens=16, samples=False, guesses=()),
    ]
    (one, two), kept, scored = read_step(write_step(parts, [0, 2], [5]))
    assert (kept, scored) == ([0, 2], [5])
    assert one.sequence.token_ids[30:42] == list(range(130, 140))
    assert (one.start, one.num_new_tokens, one.samples, one.guesses) == (30, 12, True, [7, 8])
    assert (one.sequence.block_table, one.sequence.is_prefill_only, one.sequence.adapter) == ([4, 9, 1], False, None)
    assert two.sequence.token_ids[0:16] == list(range(100, 116))
    assert (two.samples, two.sequence.is_prefill_only, two.guesses) == (False, True, [])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "int8"}, ["quantization int8", "int8-weight-only"]),
        ({"async_scheduling": True}, ["async_scheduling cannot run", "leave it out"]),
        ({"tensor_parallel_size": 3}, ["4 query heads", "can be 1, 2, 4"]),
    ],
)
def test_what_cannot_be_divided_is_refused_before_processes_start(folder, settings, words, monkeypatch):
    monkeypatch.setattr("batchinfer.engine.engine.Ranks", None)
    config = EngineConfig(folder, device="cpu", **{"tensor_parallel_size": 2} | settings)
    with pytest.raises(ModelError) as caught:
        create_engine(config)
    for word in words:
        assert word in str(caught.value)


def test_gpus_are_numbered_by_rank_and_must_be_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = EngineConfig("m", tensor_parallel_size=2)
    assert [config_of_rank(config, rank).device for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ModelError, match="needs 4 GPUs and 2 are visible"):
        config_of_rank(replace(config, tensor_parallel_size=4), 0)
    with pytest.raises(ModelError, match="CUDA_VISIBLE_DEVICES"):
        config_of_rank(replace(config, device="cuda:1"), 0)
    assert config_of_rank(replace(config, device="cpu", tensor_parallel_size=8), 3).device == "cpu"
