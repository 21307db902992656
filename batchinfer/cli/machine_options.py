"""Flags for the engine's settings that are the machine's, and none of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

_MACHINE_OPTIONS = (
    click.option(
        "--max-num-batched-tokens",
        type=click.IntRange(16),
        metavar="N",
        help="Most tokens in one engine step (BATCHINFER_MAX_NUM_BATCHED_TOKENS; default: as measured, 8192 on a GPU).",
    ),
    click.option(
        "--max-num-seqs",
        type=click.IntRange(1, 65536),
        metavar="N",
        help="Most rows in one engine step (BATCHINFER_MAX_NUM_SEQS; default: 256 on a GPU, 64 on a CPU, 128 there with an "
        "INT8 KV cache).",
    ),
    click.option(
        "--gpu-memory-utilization",
        type=click.FloatRange(0, 1, min_open=True),
        metavar="SHARE",
        help="Share of a GPU's memory for weights, the largest step and the KV cache "
        "(BATCHINFER_GPU_MEMORY_UTILIZATION; default: 0.9).",
    ),
    click.option(
        "--enforce-eager/--no-enforce-eager",
        default=None,
        help="On a GPU: capture no CUDA graphs (BATCHINFER_ENFORCE_EAGER).",
    ),
    click.option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=None,
        help="Share the KV cache of equal prefixes (BATCHINFER_ENABLE_PREFIX_CACHING; default: yes).",
    ),
    click.option(
        "--tensor-parallel-size",
        type=click.IntRange(1, 64),
        metavar="N",
        help="Devices over which the model is divided (BATCHINFER_TENSOR_PARALLEL_SIZE; default: 1).",
    ),
)
MACHINE_SETTINGS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "gpu_memory_utilization",
    "enforce_eager",
    "enable_prefix_caching",
    "tensor_parallel_size",
)
"""Settings that :func:`machine_options` gives a command."""


def machine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the engine's settings that are the machine's and none of the job, by the names vLLM has for them."""
    for option in reversed(_MACHINE_OPTIONS):
        command = option(command)
    return command
