"""What an engine finds out about its machine and model before its first row: measured once, then read from a cache."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import torch

from batchinfer.engine.calibration import Calibration, CalibrationStore, SharedPrefix, describe, measure_curve
from batchinfer.engine.ceilings import cpu_model, machine_ceilings
from batchinfer.engine.model_shape import ModelShape
from batchinfer.engine.others_load import OthersLoad
from batchinfer.engine.roofline import Precision
from batchinfer.engine.scheduler import Progress, ScheduledSequence
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.step_bound import StepBound
from batchinfer.errors import ModelError
from batchinfer.models.cache_dir import default_cache_dir
from batchinfer.sampling_params import SamplingParams
from batchinfer_kernels.cpu.build import source_version

if TYPE_CHECKING:
    from batchinfer.engine.config import EngineConfig
    from batchinfer.engine.model_runner import ModelRunner
    from batchinfer.models.load import LoadedModel

PREFILL_SECONDS = 1.5
DECODE_SECONDS = 0.6
"""About so long the two curves take; one step of each is run whatever it takes."""
PREFILL_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CHUNK = 128
"""Prompt tokens of a sequence in a measured step."""
CONTEXT = 15
"""Tokens of a decoding row's context in one: with its own a block, so that few blocks become resident."""
SHARED_PREFIXES = (256, 1024)
SHARED_ROWS = (2, 4, 8, 16, 32)
SHARED_RUNS = 3
"""The best of so many counts."""
ACTIVATION_SHARE = 0.05
"""Of the free memory, that a step's activations may take."""
THREAD_TOKENS = 1024
"""Tokens of a prompt's step for each of a CPU's threads: with two of them, larger steps gained what runs differ by anyway, and
took 200 MB."""
DISTURBED_PERCENT = 10.0
"""Of the machine's CPU time: if other processes take more, what is measured meanwhile says little."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartUp:
    """What was found out; ``bound`` is None where the device's ceilings or the model's sizes are not known."""

    calibration: Calibration
    bound: StepBound | None


@torch.inference_mode()
def start_up(runner: ModelRunner, loaded: LoadedModel, config: EngineConfig) -> StartUp:
    """Measure, or read what was measured before under the same circumstances. The KV cache's blocks are written to."""
    store = CalibrationStore(loaded.cache_dir or default_cache_dir())
    key = calibration_key(runner, loaded)
    calibration = store.load(key)
    how = "measured before"
    if calibration is None:
        with OthersLoad() as others:
            calibration = _measure(runner, loaded)
        is_disturbed = others.percent > DISTURBED_PERCENT
        store.save(key, calibration, is_disturbed=is_disturbed)
        how = f"measured in {others.seconds:.1f} s"
        if is_disturbed:
            how += f" while others took {others.percent:.0f} % of the CPU, so a start ten minutes later measures again"
    _log.info("model %s: %s (%s)", loaded.name, describe(calibration, config.max_num_seqs_on(loaded.device.type)), how)
    return StartUp(calibration, _bound(runner, loaded, config))


def calibration_key(runner: ModelRunner, loaded: LoadedModel) -> dict[str, str]:
    """The circumstances that times depend on, in words."""
    device = loaded.device
    is_cpu = device.type == "cpu"
    about = runner.about
    return {
        "model": loaded.name,
        "revision": loaded.revision,
        "device": cpu_model() if is_cpu else torch.cuda.get_device_name(device),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "kernels": f"{about['kernels']} {source_version()}",
        "layers": about["layers"],
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "recipe": about["recipe"],
        "kv_cache_dtype": about["kv_cache_dtype"],
        "block_size": str(runner.block_size),
    }


def _measure(runner: ModelRunner, loaded: LoadedModel) -> Calibration:
    most = min(runner.num_blocks * runner.block_size, _most_tokens(loaded))
    prefill = [tokens for tokens in PREFILL_TOKENS if tokens <= most] or [runner.block_size]
    decode = [rows for rows in DECODE_ROWS if rows * _blocks(runner, CONTEXT + 1) <= runner.num_blocks] or [1]
    steps = _Steps(runner, loaded)
    return Calibration(
        measure_curve(steps.prefill, prefill, PREFILL_SECONDS, time.perf_counter_ns),
        measure_curve(steps.decode, decode, DECODE_SECONDS, time.perf_counter_ns),
        _measure_shared(runner),
    )


def _most_tokens(loaded: LoadedModel) -> int:
    """Tokens whose widest activations, those of the MLP, fit into a small share of the memory, and no more than a CPU needs."""
    try:
        shape = ModelShape.from_config(loaded.hf_config.to_dict())
    except ModelError:
        return PREFILL_TOKENS[3]
    widest = 4 * shape.hidden_size + 3 * shape.mlp_size * (shape.experts_per_token or 1) + 3 * shape.shared_mlp_size
    most = PREFILL_TOKENS[-1]
    if loaded.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(loaded.device)
    else:
        free = psutil.virtual_memory().available
        most = THREAD_TOKENS * torch.get_num_threads()
    return max(PREFILL_TOKENS[0], min(most, int(ACTIVATION_SHARE * free / (torch.float32.itemsize * widest))))


class _Steps:
    """Steps of the real model over made-up rows."""

    def __init__(self, runner: ModelRunner, loaded: LoadedModel) -> None:
        self._runner = runner
        self._vocabulary = int(loaded.hf_config.get_text_config().vocab_size)
        self._chunk = max(1, min(CHUNK, loaded.max_model_len))
        self._context = max(0, min(CONTEXT, loaded.max_model_len - 1))

    def prefill(self, num_tokens: int) -> None:
        """Beginnings of prompts, so many tokens together."""
        lengths = [self._chunk] * (num_tokens // self._chunk)
        if rest := num_tokens % self._chunk:
            lengths.append(rest)
        self._run([(0, length) for length in lengths])

    def decode(self, num_rows: int) -> None:
        """One token each."""
        self._run([(self._context, 1)] * num_rows)

    def _run(self, parts: list[tuple[int, int]]) -> None:
        scheduled, block = [], 0
        for index, (start, count) in enumerate(parts):
            number = _blocks(self._runner, start + count)
            tokens = [(7 * index + 13 * place) % self._vocabulary for place in range(start + count)]
            sequence = Sequence(
                "", SamplingParams(), tokens, len(tokens), 1, 0, index, b"",
                None,  # type: ignore[arg-type]  # nothing is generated
                block_table=[at % self._runner.num_blocks for at in range(block, block + number)],
            )  # fmt: skip
            scheduled.append(ScheduledSequence(sequence, start, count, True, False, Progress(0, 0, 0), ()))
            block += number
        self._runner.execute(scheduled)
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)


def _measure_shared(runner: ModelRunner) -> tuple[SharedPrefix, ...]:
    """One layer's attention, both ways in turn; empty where the attention has no two ways."""
    found = []
    for prefix in SHARED_PREFIXES:
        for rows in SHARED_ROWS:
            runs = runner.shared_prefix_runs(prefix, rows)
            if runs is None:
                continue
            best = [2**62, 2**62]
            for _ in range(SHARED_RUNS + 1):  # the first of them warms the cache
                for way, run in enumerate(runs):
                    started = time.perf_counter_ns()
                    run()
                    best[way] = min(best[way], max(1, time.perf_counter_ns() - started))
            found.append(SharedPrefix(prefix, rows, *best))
    return tuple(found)


def _blocks(runner: ModelRunner, num_tokens: int) -> int:
    return -(-num_tokens // runner.block_size)


def _bound(runner: ModelRunner, loaded: LoadedModel, config: EngineConfig) -> StepBound | None:
    if loaded.device.type != "cpu":
        return None
    try:
        shape = ModelShape.from_config(loaded.hf_config.to_dict())
    except ModelError as error:
        _log.info("model %s: no roofline: %s", loaded.name, error)
        return None
    device = machine_ceilings(loaded.cache_dir or default_cache_dir()).as_device()
    precision = precision_of(config.quantization, loaded.dtype, runner.about["kv_cache_dtype"])
    return StepBound(device, shape, precision, runner.windows)


def precision_of(quantization: str, dtype: torch.dtype, kv_cache_dtype: str) -> Precision:
    """What the roofline counts with: of weights, rows, cache and head."""
    own = "fp32" if dtype == torch.float32 else "bf16"
    kv = {"float32": "fp32", "int8": "int8"}.get(kv_cache_dtype, "bf16")
    if quantization == "int8":
        return Precision("int8", "int8", kv, "int8")
    if quantization == "int8-weight-only":
        return Precision("int8", "bf16", kv, "int8")
    return Precision(own, own, kv, own)
