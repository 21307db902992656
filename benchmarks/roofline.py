"""The tables of docs/performance.md on GPUs, from data sheets and models' sizes.

python -m benchmarks.roofline
"""

from __future__ import annotations

import argparse

from batchinfer.engine.devices import DEVICES
from batchinfer.engine.model_shape import ModelShape
from batchinfer.engine.roofline import Precision, Workload, predict, restore_seconds
from batchinfer.errors import InvalidSpecError

INT8 = Precision("int8", "int8", "int8", "int8")
MODELS = {
    "1B": ModelShape(16, 2048, 32, 8, 64, 8192, 128256, is_tied=True),
    "8B": ModelShape(32, 4096, 32, 8, 128, 14336, 128256),
    "70B": ModelShape(80, 8192, 64, 8, 128, 28672, 128256),
}
"""Shaped as Llama 3.2 1B, 3.1 8B and 3.1 70B."""
WORKLOAD = Workload(100_000, 1000, 1000)
PREFIX = 4096
COLUMNS = (("8B", Precision()), ("8B", INT8), ("70B", INT8))


def speeds() -> list[str]:
    """Output tokens a second by both bounds, and rows at once, a line a device."""
    lines = []
    for name, device in DEVICES.items():
        cells = []
        for model, precision in COLUMNS:
            try:
                found = predict(device, MODELS[model], precision, WORKLOAD)
            except InvalidSpecError:
                cells.append("does not fit")
                continue
            sequential, overlap = found.output_tokens_per_second
            cells.append(f"{sequential:,.0f} to {overlap:,.0f} ({found.batch:,.0f} rows)")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def restores() -> list[str]:
    """Milliseconds to fetch the KV cache of :data:`PREFIX` tokens from the host, and to compute it, a line a device."""
    lines = []
    for name, device in DEVICES.items():
        cells = []
        for shape in MODELS.values():
            fetch, compute = restore_seconds(device, shape, INT8, PREFIX)
            cells.append(f"{fetch * 1e3:.1f} against {compute * 1e3:,.1f} ({compute / fetch:.0f}x)")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def here(model: str) -> list[str]:
    """Both bounds of a model on this machine: 256 rows, of 256 + 256 tokens, 64 at once."""
    from batchinfer.engine.ceilings import machine_ceilings
    from batchinfer.models.cache_dir import default_cache_dir
    from batchinfer.models.config_fields import config_fields

    device, shape = machine_ceilings(default_cache_dir()).as_device(), ModelShape.from_config(config_fields(model))
    products = f"bfloat16 {device.bf16 / 1e9:,.0f} GFLOP/s, INT8 {device.peak('int8') / 1e9:,.0f} GOP/s"
    lines = [f"{device.source}: {products}, {device.bandwidth / 1e9:,.1f} GB/s read"]
    for name, precision in (("bfloat16", Precision()), ("INT8", INT8)):
        found = predict(device, shape, precision, Workload(256, 256, 256, max_num_seqs=64, max_num_batched_tokens=512))
        sequential, overlap = found.output_tokens_per_second
        lines.append(f"{name}: {sequential:,.0f} to {overlap:,.0f} output tokens/s, sequential to overlap")
    return lines


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", metavar="MODEL", help="a GGUF file or a folder with a config.json")
    wanted = parser.parse_args().here
    print("\n".join(here(wanted) if wanted else [*speeds(), "", *restores()]))


if __name__ == "__main__":
    main()
