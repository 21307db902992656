"""The small real model that tests run on; fetched by ``make model``. Missing is a failure, never a skip."""

from functools import lru_cache
from pathlib import Path
from typing import Any

GGUF = Path(__file__).resolve().parent.parent / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_path() -> Path:
    assert GGUF.is_file(), f"{GGUF} is missing: run `make model`"
    return GGUF


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """The model's tokenizer as transformers converts it, without our cache."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gguf_path().parent, gguf_file=gguf_path().name, local_files_only=True)
