"""Requantise a GGUF file with llama.cpp's own call; run by llama-cpp-python's interpreter.

python -m benchmarks.peers.requantize source.gguf target.gguf q8_0|q4_0
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Write the file under another name first: an interrupted one must not look finished."""
    import ctypes

    import llama_cpp  # of the peer's environment

    source, target, name = sys.argv[1:]
    part = Path(f"{target}.part")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}[name]
    params.allow_requantize = True
    if code := llama_cpp.llama_model_quantize(source.encode(), str(part).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp cannot requantise {source}: code {code}")
    part.replace(target)


if __name__ == "__main__":
    main()
