"""A name for the content of model files: the same bytes have the same name wherever they lie."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from batchinfer.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

WHOLE_FILE_BYTES = 1 << 30
"""Up to this size all of a file is read (0.1 s for 100 MB); of a larger one evenly spaced samples and its size."""
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 1 << 20


def fingerprint(files: Iterable[Path]) -> str:
    """Hash names, sizes and content of files, in order of their names, to 32 hexadecimal digits.

    Raises:
        ModelError: a file cannot be read.
    """
    total = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        try:
            size = path.stat().st_size
            total.update(f"{path.name if path.suffix != '.gguf' else ''}\0{size}\0".encode())
            total.update(_content(path, size))
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    return total.hexdigest()[:32]


def _content(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        if size <= WHOLE_FILE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        digest = hashlib.sha256()
        for index in range(_NUM_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * index // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
        return digest.digest()
