"""The same sources under AddressSanitizer and UndefinedBehaviorSanitizer read and write only what is theirs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchinfer_kernels.cpu.build import build, find_compiler
from batchinfer_kernels.cpu.variants import best_variant, cpu_features, variant_named

# -O1 still vectorises nothing and inlines little, which is what the sanitizers see best
FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ROOT = Path(__file__).resolve().parents[3]


def sanitizer_library(name):
    """Path of the compiler's run-time library: it has to be loaded before Python."""
    command = [find_compiler().path, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("variant", sorted({best_variant(cpu_features()).name, "portable"}))
def test_every_op_is_clean(variant, tmp_path):
    build(variant_named(variant), folder=tmp_path, extra_flags=FLAGS)  # here: under the sanitizer, the compiler crawls
    environment = os.environ | {
        "LD_PRELOAD": f"{sanitizer_library('libasan.so')}:{sanitizer_library('libubsan.so')}",
        # Python itself keeps memory until it exits; torch's libraries override each other's symbols
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "PYTHONPATH": str(ROOT / "kernels"),
    }
    script = Path(__file__).with_name("sanitized_ops.py")
    command = [sys.executable, str(script), variant, str(tmp_path), *FLAGS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "clean\n"
