"""Local inputs of a job that runs elsewhere: each file is uploaded once, whatever its name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.jobs.files import INPUT, is_file_id
from batchinfer.jobs.paths import is_uri

if TYPE_CHECKING:
    from batchinfer.client.transport import Transport

_UPLOAD_TIMEOUT_S = 600.0


def is_elsewhere(path: str) -> bool:
    """Whether an input is the server's to find: a URI, an absolute path, or the id of a file that it has."""
    return is_uri(path) or path.startswith("/") or is_file_id(path)


def upload_inputs(transport: Transport, inputs: tuple[str, ...], base: Path) -> list[str]:
    """Put ids of uploaded files in the place of local paths, folders and globs; URIs and ids stay as they are.

    Raises:
        InputError: a path does not exist, or has no Parquet or JSONL file.
    """
    ids: list[str] = []
    for text in inputs:
        if is_uri(text) or (is_file_id(text) and not (base / text).exists()):
            ids.append(text)
        else:
            ids += [upload(transport, path) for path in _files(str(base / Path(text).expanduser()))]
    return ids


def _files(path: str) -> list[Path]:
    from batchinfer.dataset.listing import find_files  # noqa: PLC0415 -- pyarrow loads when there is something to upload

    return [Path(found.location.path) for found in find_files([path]).files]


def upload(transport: Transport, path: Path, purpose: str = INPUT) -> str:
    """Upload a file, unless the server has its bytes already; return its id."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    known = transport.ask("GET", "/v1/files", params={"sha256": digest, "purpose": purpose, "limit": 1}).json()["data"]
    if known:
        return str(known[0]["id"])
    with path.open("rb") as file:
        # not sent again by itself: the file has been read on
        answer = transport.ask(
            "POST", "/v1/files", files={"file": (path.name, file)}, data={"purpose": purpose}, timeout=_UPLOAD_TIMEOUT_S
        )
    return str(answer.json()["id"])
