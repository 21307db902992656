"""A model's tokenizer, from its folder or from a GGUF file's metadata."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from batchinfer.errors import ModelError
from batchinfer.models.reason import reason

if TYPE_CHECKING:
    from batchinfer.models.gguf_file import GgufFile

CONVERSION = 1
"""Raised when the conversion of a GGUF tokenizer changes, so that older cached ones are left alone."""

SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
"""llama.cpp's pre-tokenizers that split numbers into digits before GPT-2's rule; transformers' conversion does not."""


def load_folder_tokenizer(folder: Path) -> Any:
    """The tokenizer that lies in a model's folder.

    Raises:
        ModelError: there is none, or none of the fast kind.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its many readers raise
        raise ModelError(f"{folder} has no tokenizer that can be read ({reason(error)})") from error
    return _ready(tokenizer, folder)


def load_gguf_tokenizer(file: GgufFile, revision: str, cache_dir: Path) -> Any:
    """The tokenizer that a GGUF file describes, converted once a ``revision`` and kept in ``cache_dir``.

    Converting takes 3.5 s for a vocabulary of 49,152; reading the converted one back 0.1 s.

    Raises:
        ModelError: its kind is not supported.
    """
    kept = cache_dir / "tokenizers" / f"{revision}-{CONVERSION}-{transformers.__version__}"
    if (kept / "tokenizer.json").exists():
        with contextlib.suppress(ModelError):  # damaged: convert again
            return load_folder_tokenizer(kept)
    tokenizer = _convert(file)
    with contextlib.suppress(OSError):  # a read-only or full disk costs time, not the job
        _keep(tokenizer, kept)
    return _ready(tokenizer, file.path)


def _convert(file: GgufFile) -> Any:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            file.path.parent, gguf_file=file.path.name, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises whatever its many readers raise
        raise ModelError(
            f"{file.path}: its tokenizer cannot be converted ({reason(error)}); take the safetensors folder"
        ) from error
    if file.metadata.get("tokenizer.ggml.pre") in SINGLE_DIGITS:
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return tokenizer


def _keep(tokenizer: Any, folder: Path) -> None:
    """Write under another name and rename: a reader sees all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        tokenizer.save_pretrained(draft)
        if folder.exists():  # damaged, or another process was faster
            shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _ready(tokenizer: Any, source: Path) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{source} has only a slow tokenizer; save its fast form (tokenizer.json) beside it")
    # some files carry the truncation and padding of their training
    backend.no_truncation()
    backend.no_padding()
    return tokenizer
