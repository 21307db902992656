"""A result file as a local copy: whole and with the right hash, or not there."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchinfer.jobs.views import ResultFile


def write_download(folder: Path, file: ResultFile, chunks: Iterable[bytes]) -> Path:
    """Write the bytes of a result file into ``folder`` under its own name. A copy that is there already is replaced.

    Raises:
        InputError: code ``damaged_download``: the bytes are not those that the job wrote.
    """
    target = folder / Path(file.path).name
    staging = folder / f".{target.name}.{secrets.token_hex(8)}.tmp"
    digest = hashlib.sha256()
    try:
        with staging.open("xb") as copy:
            for chunk in chunks:
                digest.update(chunk)
                copy.write(chunk)
        if file.sha256 and digest.hexdigest() != file.sha256:
            raise InputError(f"{file.path} arrived damaged; fetch it again", code="damaged_download")
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)
    return target
