"""Rows of one engine with adapters, other adapters and none: the tokens of peft's merged models, and error rows."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from batchinfer.engine.attention import ATTENTION_NAME, register_attention
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import build_engine
from batchinfer.models.load import load_model
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode, Request, RowStatus
from tests.engine.adapters import save_adapter
from tests.engine.fakes import drain
from tests.engine.reference import check_tokens, generate_alone
from tests.engine.small_decoder import VOCAB, small_model

NEW_TOKENS = 10
PROMPTS = [[*range(5, 5 + 34)], [*range(5, 5 + 34), 7, 7], [3, 4, 5], [*range(60, 90)]]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A small Llama on disk, two adapters of it, and what peft's merged models and the plain one generate."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("lora")
    model = small_model("llama")
    model.generation_config.eos_token_id = model.config.eos_token_id = 2
    merged = {None: model}
    for seed, name in enumerate("ab"):
        merged[str(folder / name)] = save_adapter(model, folder / name, seed=seed)
    truths = {
        (adapter, place): generate_alone(reference, prompt, NEW_TOKENS, 2)
        for adapter, reference in merged.items()
        for place, prompt in enumerate(PROMPTS)
    }
    model.save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder / "model")
    return SimpleNamespace(folder=folder, truths=truths, merged=merged, adapters=list(merged))


def make_engine(world, **settings):
    config = EngineConfig(model=str(world.folder / "model"), device="cpu", num_kv_blocks=120, **settings)
    register_attention()
    return build_engine(load_model(config, ATTENTION_NAME, may_defer=True), config, owns_model=True)


def request(row_id, prompt, adapter, **params):
    return Request(row_id, SamplingParams(max_tokens=NEW_TOKENS, adapter=adapter, **params), prompt_token_ids=prompt)


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 20, "adapter_cache_bytes": 0}])
def test_every_row_gets_the_tokens_of_its_own_merged_model(world, settings):
    """One batch in which equal prompts run under two adapters and none: what they share is kept apart by adapter."""
    engine = make_engine(world, **settings)
    for adapter, place in world.truths:
        engine.add_request(request(f"{adapter}|{place}", PROMPTS[place], adapter))
    done = {c.request_id: c for c in drain(engine)}
    assert len({tuple(world.truths[adapter, 0].tokens) for adapter in world.adapters}) == len(world.adapters)
    exact = 0
    for (adapter, place), truth in world.truths.items():
        completion = done[f"{adapter}|{place}"]
        assert completion.status is RowStatus.SUCCEEDED
        exact += check_tokens(truth, list(completion.token_ids))
    assert exact >= len(done) - 1
    # of prompts 0 and 1 the second finds the first two blocks, within its adapter alone
    cached = sum(completion.usage.cached_tokens for completion in done.values())
    assert cached == len(world.adapters) * 32


def test_alone_and_beside_others_a_row_has_the_same_log_probabilities(world):
    """To the last bit, plain rows too, with and without adapters beside them."""
    together = make_engine(world)
    for adapter, place in world.truths:
        together.add_request(request(f"{adapter}|{place}", PROMPTS[place], adapter, logprobs=3))
    found = {c.request_id: (c.token_ids, c.extra["logprobs"]) for c in drain(together)}
    alone = make_engine(world, max_num_seqs=1, enable_prefix_caching=False)
    for adapter, place in world.truths:
        alone.add_request(request(f"{adapter}|{place}", PROMPTS[place], adapter, logprobs=3))
        (completion,) = drain(alone)
        assert (completion.token_ids, completion.extra["logprobs"]) == found[completion.request_id]


def test_a_bad_adapter_is_an_error_row_and_its_neighbours_never_notice(world, tmp_path):
    shutil.copytree(world.folder / "a", tmp_path / "cut")
    (tmp_path / "cut" / "adapter_model.safetensors").write_bytes(b"\x08")
    engine = make_engine(world)
    engine.add_request(request("gone", [3, 4, 5], str(tmp_path / "gone")))
    engine.add_request(request("cut", [3, 4, 5], str(tmp_path / "cut")))
    engine.add_request(request("good", PROMPTS[2], world.adapters[1]))
    done = {c.request_id: c for c in drain(engine)}
    assert done["gone"].error.code is ErrorCode.ADAPTER_NOT_FOUND
    assert done["cut"].error.code is ErrorCode.INVALID_ADAPTER
    assert check_tokens(world.truths[world.adapters[1], 2], list(done["good"].token_ids))


def test_samples_and_beams_use_the_adapter(world):
    """The first sample is the row's own; a beam search of one row finds what peft's merged model finds."""
    adapter = world.adapters[2]
    engine = make_engine(world)
    engine.add_request(request("one", PROMPTS[3], adapter, temperature=0.8, seed=4))
    engine.add_request(request("many", PROMPTS[3], adapter, temperature=0.8, seed=4, n=3))
    engine.add_request(request("beams", PROMPTS[3], adapter, beam_width=2))
    done = {c.request_id: c for c in drain(engine)}
    assert {c.status for c in done.values()} == {RowStatus.SUCCEEDED}
    assert done["many"].token_ids == done["one"].token_ids
    assert len(done["beams"].token_ids) > 0


def test_tasks_read_with_the_adapter(world):
    """Vectors and log-likelihoods are those of peft's merged model, beside a row that generates."""
    engine = make_engine(world)
    embed = {"task": "embed", "normalize": False, "pooling": "last"}
    for number, adapter in enumerate(world.adapters):
        params = SamplingParams(adapter=adapter)
        engine.add_request(Request(f"embed {number}", params, prompt_token_ids=PROMPTS[3], task=embed))
        engine.add_request(request(f"score {number}", PROMPTS[3], adapter, prompt_logprobs=0))
    done = {c.request_id: c for c in drain(engine)}
    for number, adapter in enumerate(world.adapters):
        with torch.inference_mode():
            output = world.merged[adapter](torch.tensor([PROMPTS[3]]), output_hidden_states=True)
        vector = torch.tensor(done[f"embed {number}"].extra["embedding"])
        torch.testing.assert_close(vector, output.hidden_states[-1][0, -1], atol=2e-3, rtol=2e-3)
        expected = output.logits[0, :-1].log_softmax(-1)[range(len(PROMPTS[3]) - 1), PROMPTS[3][1:]]
        found = [score["logprob"] for score in done[f"score {number}"].extra["prompt_logprobs"][1:]]
        torch.testing.assert_close(torch.tensor(found), expected, atol=2e-3, rtol=2e-3)


def test_a_model_in_transformers_modules_refuses_adapters(world):
    """Blocks of 5 tokens are none of the fused layers'."""
    engine = make_engine(world, block_size=5)
    engine.add_request(request("row", [3, 4, 5], world.adapters[1]))
    engine.add_request(request("plain", PROMPTS[2], None))
    done = {c.request_id: c for c in drain(engine)}
    assert done["row"].error.code is ErrorCode.INVALID_ADAPTER
    assert "take no adapters" in done["row"].error.message
    assert check_tokens(world.truths[None, 2], list(done["plain"].token_ids))
