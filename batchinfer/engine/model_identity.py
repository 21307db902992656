"""Which model a name stands for right now: its content, and a stamp that tells cheaply that it changed."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from batchinfer.errors import ModelError
from batchinfer.models.fingerprint import fingerprint

_SUFFIXES = frozenset({".gguf", ".safetensors", ".json", ".jinja", ".model", ".txt"})


def model_stamp(model: str) -> str | None:
    """Names, sizes and times of a local model's files, or the commit of a hub model in the cache; None if unknown."""
    try:
        files = _files(model)
        if files is None:
            return _commit(model)
        stats = [(path, path.stat()) for path in files]
    except OSError:
        return None
    return ";".join(f"{path}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}" for path, stat in stats)


def model_revision(model: str) -> str | None:
    """Hash of a local model's content, or the commit of a hub model; None if neither is known here (yet)."""
    stamp = model_stamp(model)
    try:
        return stamp if stamp is None or _files(model) is None else _content(model, stamp)
    except (OSError, ModelError):
        return None


def _files(model: str) -> list[Path] | None:
    path = Path(model).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    return None


@lru_cache(maxsize=16)
def _content(model: str, _stamp: str) -> str:
    return fingerprint(_files(model) or [])


def _commit(model: str) -> str | None:
    if model.startswith(("/", ".", "~")) or "/" not in model:
        return None
    # a third of a second that only hub models need
    from huggingface_hub import snapshot_download  # noqa: PLC0415 -- see above
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415 -- see above

    repository, _, revision = model.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, local_files_only=True)).name
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError, ValueError):
        return None
