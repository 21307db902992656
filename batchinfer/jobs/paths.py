"""Where a job's inputs, model and output are: relative paths become absolute, since workers have another folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.adapter_config import AdapterConfig
from batchinfer.errors import ConflictError, InputError, InvalidSpecError, ModelError, RowFailure

if TYPE_CHECKING:
    from batchinfer.jobs.spec import JobSpec

MAX_PATH_LENGTH = 1024
"""PostgreSQL cannot index longer models; no path is that long."""
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*(@\w[\w./-]*)?)?")
_GLOB = re.compile(r"[*?\[]")


def is_uri(text: str) -> bool:
    """Whether ``text`` begins with a scheme, such as ``s3://``."""
    return _URI.match(text) is not None


def resolve_paths(spec: JobSpec, *, base: Path | None, job_id: str, must_exist: bool) -> JobSpec:
    """Make every path of the spec absolute and choose the default output.

    ``base`` is the folder that relative paths start from; None refuses them (a server's folder means nothing to its
    clients). ``must_exist`` checks local inputs and the model on this machine; leave it off where workers see other
    disks than this process does.

    Raises:
        InputError: an input is not there.
        ModelError: a model given as a path is not there; an adapter is not there or cannot be used.
        InvalidSpecError: a relative path without ``base``, or an output that is an input.
    """
    for path in (*spec.inputs, spec.output or "", spec.model, spec.adapter or "", spec.adapter_folder or ""):
        _check_text(path)
    inputs = tuple(_absolute(path, base, "inputs") for path in spec.inputs)
    output = default_output(inputs[0], job_id) if spec.output is None else _absolute(spec.output, base, "output")
    model = _resolve_model(spec.model, base, must_exist=must_exist)
    adapter, adapter_folder = (_local(getattr(spec, name), base, name) for name in ("adapter", "adapter_folder"))
    if must_exist:
        for path in inputs:
            _check_input(path)
        _check_adapters(adapter, adapter_folder)
    for path in inputs:
        _check_output_is_not_input(output, path)
    return spec.model_copy(
        update={
            "inputs": inputs,
            "output": output,
            "model": model,
            "adapter": adapter,
            "adapter_folder": adapter_folder,
        }
    )


def _check_text(path: str) -> None:
    """Refuse what no file system and no database index can hold."""
    if "\0" in path or path != path.encode(errors="replace").decode():
        raise InvalidSpecError(f"{path!r} holds a NUL or a lone surrogate, which no path has")
    if len(path) > MAX_PATH_LENGTH:
        raise InvalidSpecError(f"{path[:40]!r}... is longer than {MAX_PATH_LENGTH} characters, which no path is")


def default_output(first_input: str, job_id: str) -> str:
    """``prompts.parquet`` -> ``prompts.parquet.results/<job id>``; a glob's folder stands for its files."""
    root = first_input
    if _GLOB.search(root):
        root = root[: _GLOB.search(root).start()].rpartition("/")[0]  # type: ignore[union-attr]  # it has just matched
    return f"{root.rstrip('/')}.results/{job_id}"


def check_output_is_free(output: str) -> None:
    """Refuse a local output that holds something already.

    Raises:
        ConflictError: code ``output_exists``.
    """
    path = Path(output)
    if is_uri(output) or not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    raise ConflictError(
        f"the output {output} exists already; choose another --output or remove it",
        param="output",
        code="output_exists",
    )


def check_model_exists(model: str) -> None:
    """Refuse a model given as a path that is not there. Raises ModelError."""
    path = Path(model).expanduser()
    if path.is_absolute() and not path.exists():
        raise ModelError(
            f"model {model} does not exist; give a GGUF file, a safetensors folder or a hub id", param="model"
        )


def _local(text: str | None, base: Path | None, param: str) -> str | None:
    if text is None:
        return None
    if is_uri(text):
        raise InvalidSpecError(
            f"{param} {text!r} is no local folder; adapters are read from the workers' disks", param=param
        )
    return _absolute(text, base, param)


def _check_adapters(adapter: str | None, folder: str | None) -> None:
    if adapter is not None:
        try:
            AdapterConfig.read(adapter)
        except RowFailure as failure:
            raise ModelError(failure.error.message, param="adapter", code=failure.error.code.value) from None
    if folder is not None and not Path(folder).is_dir():
        raise ModelError(f"there is no folder {folder}; give the one that holds the adapters", param="adapter_folder")


def _absolute(text: str, base: Path | None, param: str) -> str:
    if is_uri(text):
        return text
    if base is None:
        if not text.startswith("/"):
            raise InvalidSpecError(
                f"{param} {text!r} is a relative path; send an absolute one or a URI such as s3://bucket/key",
                param=param,
            )
        return text
    # not Path.resolve: a link stays as it was named; a trailing slash says that a folder is meant
    whole = base / Path(text).expanduser()
    return str(whole) + ("/" if text.endswith("/") and str(whole) != "/" else "")


def _resolve_model(model: str, base: Path | None, *, must_exist: bool) -> str:
    if is_uri(model):
        return model
    path = Path(model).expanduser()
    if not path.is_absolute() and base is not None and (base / path).exists():
        return str(base / path)
    if path.is_absolute():
        if must_exist:
            check_model_exists(model)
        return str(path)
    if model.startswith((".", "~")) or model.endswith(".gguf") or not _HUB_ID.fullmatch(model):
        where = (
            f"is not a file or folder under {base}" if base is not None else "is a relative path: send an absolute one"
        )
        raise ModelError(f"model {model!r} {where}, and no hub id such as org/name", param="model")
    return model


def _check_input(path: str) -> None:
    if is_uri(path):
        return
    if Path(path).exists() or (_GLOB.search(path) and _matches_something(path)):
        return
    kind = "matches no file" if _GLOB.search(path) else "does not exist"
    raise InputError(f"input {path} {kind}; give a Parquet or JSONL file, a folder or a glob", param="inputs")


def _matches_something(pattern: str) -> bool:
    root = Path(pattern[: _GLOB.search(pattern).start()]).parent  # type: ignore[union-attr]  # it has matched before
    return next(root.glob(pattern[len(str(root)) :].lstrip("/")), None) is not None


def _check_output_is_not_input(output: str, path: str) -> None:
    if output.rstrip("/") == path.rstrip("/"):
        raise InvalidSpecError(f"output {output} is also an input; choose another --output", param="output")
