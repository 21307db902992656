"""A process that turns requests into token ids with a model's own tokenizer and chat template: no weights, no device.

``python -m batchinfer.engine.token_server MODEL`` reads one JSON object a line, ``{"requests": [...]}``, and answers with
``{"tokens": [...]}``: for each request its token ids, or ``{"code", "message"}``. The first line that it writes is
``{"max_model_len": tokens or null}``, or ``{"error": message}`` where the model's tokenizer cannot be read. It downloads nothing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import IO, Any

from batchinfer.engine.chat import ChatRenderer
from batchinfer.engine.wire import request_from_json
from batchinfer.errors import ModelError, RowFailure
from batchinfer.models.cache_dir import default_cache_dir
from batchinfer.models.config_fields import cached_folder
from batchinfer.models.fingerprint import fingerprint
from batchinfer.models.gguf_file import GgufFile
from batchinfer.models.tokenizer import load_folder_tokenizer, load_gguf_tokenizer


def find_tokenizer(model: str) -> tuple[Any, int | None]:
    """The tokenizer of a GGUF file, a folder, or a hub id whose files are in the cache, and the model's context.

    Raises ModelError.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1 or (path / "config.json").exists():
            return _folder(path)
        path = files[0]
    if path.is_file():
        file = GgufFile(path)
        length = file.get("context_length")
        return load_gguf_tokenizer(file, fingerprint([path]), default_cache_dir()), length and int(length)
    return _folder(cached_folder(model))


def _folder(folder: Path) -> tuple[Any, int | None]:
    tokenizer = load_folder_tokenizer(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return tokenizer, None
    length = (config.get("text_config") or config).get("max_position_embeddings")
    return tokenizer, int(length) if length else None


def answer(renderer: ChatRenderer, message: dict[str, Any]) -> list[Any]:
    """Token ids of each request, or its error."""
    return [_encode(renderer, fields) for fields in message["requests"]]


def _encode(renderer: ChatRenderer, fields: dict[str, Any]) -> Any:
    try:
        return renderer.encode(request_from_json(fields))
    except RowFailure as failure:
        return {"code": failure.error.code, "message": failure.error.message}
    except Exception as error:  # noqa: BLE001 -- a row that breaks the tokenizer must not break its neighbours
        return {"code": "engine_error", "message": f"{type(error).__name__}: {error}"}


def serve(model: str, lines: IO[str], out: IO[str]) -> None:
    """Answer line by line until the input ends."""
    try:
        tokenizer, max_model_len = find_tokenizer(model)
    except ModelError as error:
        _write(out, {"error": error.message})
        return
    renderer = ChatRenderer(tokenizer)
    _write(out, {"max_model_len": max_model_len})
    for line in lines:
        _write(out, {"tokens": answer(renderer, json.loads(line))})


def _write(out: IO[str], message: dict[str, Any]) -> None:
    out.write(json.dumps(message, separators=(",", ":")) + "\n")
    out.flush()


if __name__ == "__main__":
    # what libraries print must not get between the answers
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, answers)
