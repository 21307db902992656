"""A model's config without the model: no weights are read, nothing is downloaded, no torch is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError


def config_fields(model: str) -> dict[str, Any]:
    """Fields of the transformers config of a GGUF file, a folder, or a hub id whose files are in the cache.

    Raises:
        ModelError: there is no such model on this machine, or its config cannot be read.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1 or (path / "config.json").exists():
            return _read(path)
        path = files[0]
    if not path.is_file():
        return _read(cached_folder(model))
    # numpy and the package gguf load only for such files
    from batchinfer.models.gguf_config import hf_config_fields  # noqa: PLC0415 -- see above
    from batchinfer.models.gguf_file import GgufFile  # noqa: PLC0415 -- see above

    file = GgufFile(path)
    try:
        return hf_config_fields(file)
    finally:
        file.close()


def cached_folder(model: str) -> Path:
    """Where a hub model lies in the cache. Raises ModelError."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 -- only hub models need it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    repository, _, revision = model.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError, ValueError):
        raise ModelError(
            f"no model at {model} on this machine: give a .gguf file, a folder, or a hub id that a worker here has loaded"
        ) from None


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): give the folder of a transformers model") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path} is not a model's config: give the folder of a transformers model")
    return fields
