"""The engine, and transformers' continuous batching, on models of random weights shaped like Llama's."""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from batchinfer.engine.model_shape import ModelShape
from batchinfer.engine.roofline import Precision, Workload, predict
from benchmarks.gpu.hardware import hardware, known_device

if TYPE_CHECKING:
    from collections.abc import Iterator

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """A model's sizes, and the rows that run on it: equal lengths, no text in common, greedy, no end of sequence."""

    shape: ModelShape
    rows: int = 512
    prompt: int = 512
    output: int = 256
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 64
    """64 tokens let a kernel read one block number for each tile of keys."""


SETTINGS = {
    "1B": Setting(ModelShape(16, 2048, 32, 8, 64, 8192, 128256, is_tied=True)),
    "8B": Setting(ModelShape(32, 4096, 32, 8, 128, 14336, 128256)),
}
"""As Llama 3.2 1B and 3.1 8B."""
TINY = Setting(ModelShape(2, 64, 4, 2, 16, 128, 512), 6, 12, 5, 4, 32, 16)
"""Without a GPU, whatever is asked for: it shows that all runs."""
STD = 0.02
WARM_UP_ROWS = 8
LATEST = 0.85
"""Share of the time after which a run is cut short, so that it still ends in time."""
SEED = 0


def run_engine(engine: str, model: str, deadline: float) -> Iterator[Message]:
    """One engine on one model: a message at each stage, then its figures. Cut short at the ``deadline``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setting = SETTINGS[model] if device.type == "cuda" else TINY
    missing = missing_packages()
    if missing and engine == "batchinfer":
        names = " ".join(missing)
        yield {"type": "engine", "status": "skipped", "detail": f"the engine needs {names}: pip install {names}"}
        return
    try:
        yield {"type": "stage", "of": "load"}
        network = random_llama(setting.shape, device)
        yield {"type": "stage", "of": "run"}
        measure = _measure_ours if engine == "batchinfer" else _measure_transformers
        figures = measure(network, setting, device, deadline)
    except Exception as failure:  # noqa: BLE001 -- the other engines are still to be measured
        detail = f"{type(failure).__name__}: {' '.join(str(failure).split())[:500]}"
        yield {"type": "engine", "status": "failed", "detail": detail}
        return
    if engine == "batchinfer":
        figures |= _roofline(setting, hardware(device)["device"], figures["tokens_per_second"])
    yield {"type": "engine", "status": "ok", "setting": asdict(setting), **figures}


def missing_packages() -> list[str]:
    """What the engine needs beside torch, triton and transformers, and is not installed."""
    from importlib.util import find_spec

    return [name for name in ("gguf", "psutil", "pydantic") if find_spec(name) is None]


def _roofline(setting: Setting, device_name: str, tokens_per_second: float) -> Message:
    sheet = known_device(device_name)
    if sheet is None:
        return {"share": None}
    work = Workload(
        setting.rows, setting.prompt, setting.output,
        max_num_seqs=setting.max_num_seqs, max_num_batched_tokens=setting.max_num_batched_tokens,
    )  # fmt: skip
    sequential, overlap = predict(sheet, setting.shape, Precision(), work).output_tokens_per_second
    return {"roofline": sequential, "overlap_roofline": overlap, "share": tokens_per_second / sequential}


def random_llama(shape: ModelShape, device: torch.device) -> Any:
    """A Llama of these sizes on the device, its weights normal numbers in bfloat16 (float32 on a CPU)."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden_size, intermediate_size=shape.mlp_size, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab_size, tie_word_embeddings=shape.is_tied, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.ones_(parameter)
        else:
            parameter.data.normal_(std=STD, generator=generator)
    # buffers of the meta device have no values: made again where they are
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=1)
    return model.eval().requires_grad_(requires_grad=False)


def prompts(setting: Setting, count: int, seed: int) -> list[list[int]]:
    """Token ids without a prefix in common."""
    rng = random.Random(seed)
    return [[rng.randrange(2, setting.shape.vocab_size) for _ in range(setting.prompt)] for _ in range(count)]


def build(network: Any, setting: Setting, device: torch.device) -> Any:
    """Our engine around a network that is in memory."""
    from batchinfer.engine.attention import register_attention
    from batchinfer.engine.config import EngineConfig
    from batchinfer.engine.engine import build_engine
    from batchinfer.models.load import LoadedModel

    register_attention()
    config = EngineConfig(
        "random", device=device.type, dtype="auto", max_model_len=setting.prompt + setting.output,
        max_num_seqs=setting.max_num_seqs, max_num_batched_tokens=setting.max_num_batched_tokens,
        block_size=setting.block_size, enable_prefix_caching=False,
    )  # fmt: skip
    loaded = LoadedModel(
        model=network, tokenizer=_tokenizer(setting.shape.vocab_size), eos_token_ids=frozenset({1}),
        hf_config=network.config, max_model_len=setting.prompt + setting.output, dtype=network.dtype, device=device,
        revision="random", name="random",
    )  # fmt: skip
    return build_engine(loaded, config, owns_model=True)


def _tokenizer(vocab_size: int) -> Any:
    """A word a token: rows come as ids, and their text is of no interest."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="t0", eos_token="t1", unk_token="t0")


def _measure_ours(network: Any, setting: Setting, device: torch.device, deadline: float) -> Message:
    from batchinfer.sampling_params import SamplingParams
    from batchinfer.types import Request

    core = build(network, setting, device)

    def run(name: str, rows: list[list[int]], latest: float) -> Message:
        params = SamplingParams(max_tokens=setting.output, ignore_eos=True)
        for number, prompt in enumerate(rows):
            core.add_request(Request(f"{name}{number}", params, prompt_token_ids=prompt))
        before = core.stats()
        started = time.perf_counter()
        errors = []
        while core.has_unfinished() and time.monotonic() < latest:
            errors += [str(done.error) for done in core.step() if done.error is not None]
        seconds = time.perf_counter() - started
        if errors:
            raise RuntimeError(f"{len(errors)} rows ended with errors, the first: {errors[0]}")
        spent = core.stats().since(before)
        return {
            "seconds": seconds,
            "tokens": spent.completion_tokens,
            "tokens_per_second": spent.completion_tokens / seconds,
            "is_cut": core.has_unfinished(),
            "stats": spent.report(),
        }

    latest = time.monotonic() + (deadline - time.monotonic()) * LATEST
    run("warm-up ", prompts(setting, WARM_UP_ROWS, 1), latest)
    return run("row ", prompts(setting, setting.rows, 2), latest)


def _measure_transformers(network: Any, setting: Setting, device: torch.device, deadline: float) -> Message:
    """Its own defaults but for sampling: CUDA graphs, block size and batch as it chooses them for the workload."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    network.set_attn_implementation("sdpa")
    config = GenerationConfig(
        max_new_tokens=setting.output, min_new_tokens=setting.output, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # a CPU has no device memory for it to look at
    batching = None if device.type == "cuda" else ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)

    def run(rows: list[list[int]], latest: float) -> Message:
        with network.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, block=True, timeout=5
        ) as manager:
            started = time.perf_counter()
            manager.add_requests(inputs=rows, max_new_tokens=setting.output)
            tokens = num_done = 0
            while num_done < len(rows) and time.monotonic() < latest:
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("its thread ended unexpectedly")
                elif result.is_finished():
                    if result.error:
                        raise RuntimeError(str(result.error))
                    num_done += 1
                    tokens += len(result.generated_tokens)
            seconds = time.perf_counter() - started
        if not tokens:
            raise RuntimeError(f"no row had ended after {seconds:.0f} s")
        figures = {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}
        # rows under way are not counted, so a run that is cut says too little of it
        return {**figures, "is_cut": num_done < len(rows)}

    latest = time.monotonic() + (deadline - time.monotonic()) * LATEST
    run(prompts(setting, min(WARM_UP_ROWS, setting.rows), 1), latest)
    return run(prompts(setting, setting.rows, 2), latest)
