"""Every decoder family through our paged engine path: logits equal the unpatched model's, chunked, mixed and shared.

Small random models in float32. The reference is the same model before its attention is replaced: transformers' eager
attention over the whole sequence, no cache.
"""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from batchinfer.engine.block_pool import BlockPool, root_hash
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.model_runner import ModelRunner
from batchinfer.engine.scheduler import Scheduler
from batchinfer.engine.sequence import Sequence
from batchinfer.errors import ModelError
from batchinfer.models.load import LoadedModel
from batchinfer.sampling_params import SamplingParams

SMALL = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 7},
    "gemma2": {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24},
    "gemma3_text": {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24},
    "phi3": {},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "smollm3": {},
    "mixtral": MOE,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
    "gpt_oss": MOE
    | {"head_dim": 16, "sliding_window": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "cohere2": {"sliding_window": 7, "logit_scale": 1.0},
    "starcoder2": {},
    "olmo3": {"sliding_window": 7},
    "phi": {},
    "glm4": {"head_dim": 16},
    "deepseek_v3": {  # values narrower than keys
        "num_key_value_heads": 6,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
}
# (query heads, KV heads, head_dim)
HEADS = [(4, 4, 16), (6, 2, 16), (10, 2, 16), (6, 1, 16), (7, 1, 16), (5, 1, 8), (4, 2, 80), (2, 1, 96), (3, 3, 20)]
LENGTHS = (23, 11, 1, 16, 17, 40)
BLOCK_SIZES = (4, 16)
"""One that only the torch reference takes, and one that faster kernels take as well."""
TOLERANCE = 1e-5


def random_model(family, **extra):
    """A model with random weights, large enough that logits differ by whole units."""
    config = CONFIG_MAPPING[family](**(SMALL | extra))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
            else:  # norms, biases and sinks are born as constants: a model that drops them would go unnoticed
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def texts(lengths=LENGTHS):
    """Random token ids; the last text begins like the first, so that they share blocks."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]
    shared = min(len(rows[0]), len(rows[-1])) * 2 // 3
    rows[-1][:shared] = rows[0][:shared]
    return rows


@torch.inference_mode()
def reference_logits(model, rows):
    return [model(torch.tensor([row]), use_cache=False).logits[0] for row in rows]


def paged_logits(model, rows, block_size=4, max_num_batched_tokens=20):
    """Logits ``(row, position) -> [vocab_size]`` of the engine's path, each text's end fed token by token.

    The first two thirds of a text are its prompt, computed in chunks beside the decode tokens of others.
    """
    config = EngineConfig(model="random", block_size=block_size, num_kv_blocks=200)
    loaded = LoadedModel(model, None, frozenset(), model.config, 512, torch.float32, torch.device("cpu"), "", "random")
    runner = ModelRunner(loaded, config)
    scheduler = Scheduler(
        BlockPool(runner.num_blocks, block_size), max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens
    )
    for i, row in enumerate(rows):
        prompt = row[: max(1, len(row) * 2 // 3)]
        rest = len(row) - len(prompt) + 1
        params = SamplingParams(max_tokens=rest)
        scheduler.add(Sequence(str(i), params, list(prompt), len(prompt), rest, 0, i, root_hash(), None))
    logits = {}
    while scheduler.running or scheduler.waiting:
        output = scheduler.schedule()
        sampling = [part.sequence for part in output.scheduled if part.samples]
        rows_of_logits = runner.execute(output.scheduled, range(len(sampling))).logits
        scheduler.commit(output)
        assert len(sampling) == len(rows_of_logits)
        for sequence, row_logits in zip(sampling, rows_of_logits, strict=True):
            row = rows[int(sequence.request_id)]
            logits[int(sequence.request_id), sequence.num_tokens - 1] = row_logits
            if sequence.num_tokens == len(row):
                scheduler.finish(sequence)
            else:
                sequence.token_ids.append(row[sequence.num_tokens])
    scheduler.pool.check_integrity([])
    return logits


def assert_same_logits(model, rows, **settings):
    references = reference_logits(model, rows)
    logits = paged_logits(model, rows, **settings)
    assert len(logits) == sum(len(row) - max(1, len(row) * 2 // 3) + 1 for row in rows)
    for (row, position), ours in logits.items():
        torch.testing.assert_close(ours, references[row][position], atol=TOLERANCE, rtol=TOLERANCE)
    assert max(reference.abs().max() for reference in references) > 0.5, "logits near zero would prove nothing"


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, block_size):
    assert_same_logits(random_model(family, **FAMILIES[family]), texts(), block_size=block_size)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("window", [1, 5, 16, 40, 100])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_sliding_window_shorter_equal_and_longer_than_the_prompt(family, window, block_size):
    """Texts are of 1 to 40 tokens, prompts of 1 to 26."""
    extra = FAMILIES[family] | {"sliding_window": window}
    assert_same_logits(random_model(family, **extra), texts(), block_size=block_size)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_any_ratio_of_query_to_kv_heads_and_odd_head_sizes(num_heads, num_kv_heads, head_dim, block_size):
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    heads["hidden_size"] = num_heads * 12  # not a multiple of 16
    assert_same_logits(random_model("llama", **heads), texts(), block_size=block_size)


@pytest.mark.parametrize("block_size", [1, 3, 7, 64])
@pytest.mark.parametrize("max_num_batched_tokens", [4, 9, 200])
def test_any_block_and_chunk_size(block_size, max_num_batched_tokens):
    """From one token a block and four a step to all prompts in one step."""
    model = random_model("mistral", **FAMILIES["mistral"])
    assert_same_logits(model, texts(), block_size=block_size, max_num_batched_tokens=max_num_batched_tokens)


def test_long_chunks_are_computed_in_tiles(monkeypatch):
    """The score matrix of a long chunk is cut by rows; the cut must not show."""
    monkeypatch.setattr("batchinfer.engine.attention.MAX_SCORES", 100)
    assert_same_logits(random_model("gemma2", **FAMILIES["gemma2"]), texts(), max_num_batched_tokens=200)


def test_a_poisoned_row_does_not_reach_its_neighbours():
    """NaN in one row's KV: a weight of zero times NaN is NaN, so padding must never read another row's slots."""
    model = random_model("llama")
    rows = texts((9, 30, 12))
    references = reference_logits(model, rows)
    with torch.no_grad():
        model.model.embed_tokens.weight[299] = float("nan")
    poisoned = [[299, 299, 299], *rows]
    logits = paged_logits(model, poisoned, max_num_batched_tokens=200)
    for (row, position), ours in logits.items():
        if row:
            torch.testing.assert_close(ours, references[row - 1][position], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("mamba", {"state_size": 4, "num_hidden_layers": 2}),
        ("bamba", {"attn_layer_indices": [1], "mamba_n_heads": 12, "mamba_d_head": 16, "mamba_n_groups": 1}),
        ("qwen3_next", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
        ("lfm2", {"full_attn_idxs": [1]}),
    ],
)
def test_a_model_that_is_not_all_causal_attention_is_refused_by_name(family, extra):
    model = random_model(family, **extra)
    with pytest.raises(ModelError, match=family):
        paged_logits(model, texts())
