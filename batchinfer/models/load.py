"""A model by its path or name: weights, tokenizer and what the engine must know about them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.utils import logging as transformers_logging

from batchinfer.errors import ModelError
from batchinfer.models.cache_dir import default_cache_dir
from batchinfer.models.fingerprint import fingerprint
from batchinfer.models.folder import (
    check_folder,
    defer_folder_model,
    defer_folder_part,
    load_folder_model,
    own_dtype,
    read_config,
)
from batchinfer.models.fused.families import FAMILIES
from batchinfer.models.gguf import load_gguf_model
from batchinfer.models.gguf_file import GgufFile
from batchinfer.models.hub import download, is_hub_id
from batchinfer.models.limits import end_token_ids, longest_sequence
from batchinfer.models.tokenizer import load_folder_tokenizer, load_gguf_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchinfer.models.parallel.shard import Shard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelSource(Protocol):
    """What loading needs to know; :class:`~batchinfer.engine.config.EngineConfig` has all of it."""

    @property
    def model(self) -> str:
        """A ``.gguf`` file, a folder with ``config.json`` and safetensors, or a hub id ``owner/name``."""

    @property
    def dtype(self) -> str:
        """``auto``, ``float32``, ``bfloat16`` or ``float16``."""

    @property
    def device(self) -> str:
        """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence in tokens; None takes the model's own."""

    @property
    def cache_dir(self) -> str | None:
        """Where converted tokenizers, quantised weights and downloads are kept; None takes the user's cache folders."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    ``eos_token_ids`` is the union of config, generation config and tokenizer. ``revision`` names the content: a hash
    of local files, the commit of a hub model. ``max_model_len`` is in tokens, prompt and answer together.
    """

    model: Any
    tokenizer: Any
    eos_token_ids: frozenset[int]
    hf_config: Any
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    revision: str
    name: str
    cache_dir: Path | None = None
    """Where what is made of it may be kept; None keeps nothing."""


def load_model(
    config: ModelSource, attn_implementation: str, *, may_defer: bool = False, shard: Shard | None = None
) -> LoadedModel:
    """Load ``config.model`` with the attention registered as ``attn_implementation``.

    With ``may_defer`` the matrices of a family that has fused layers stay in their files on a CPU, until those layers
    or :func:`~batchinfer.models.deferred.read_all` read them. With a ``shard`` the model is a rank's share of it, all
    of whose matrices stay in their files.

    Raises:
        ModelError: the model cannot be found, read or run; the message says what to do.
    """
    device = choose_device(config.device)
    path, revision = find_model(config)
    with _no_progress_bars():
        if path.is_file():
            return _load_gguf(config, path, attn_implementation, device, revision, may_defer=may_defer, shard=shard)
        return _load_folder(config, path, attn_implementation, device, revision, may_defer=may_defer, shard=shard)


def find_model(config: ModelSource) -> tuple[Path, str | None]:
    """Where the model lies, and its revision if it comes from the hub."""
    path = Path(config.model).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        is_gguf_folder = len(files) == 1 and not (path / "config.json").exists()
        return (files[0], None) if is_gguf_folder else (path, None)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a .gguf file; give such a file or the folder of a safetensors model")
        return path, None
    if is_hub_id(config.model) and not config.model.endswith(".gguf"):
        folder = download(config.model, str(Path(config.cache_dir) / "hub") if config.cache_dir else None)
        return folder, folder.name
    raise ModelError(f"no model at {config.model}: give a .gguf file, a safetensors folder or a hub id owner/name")


def _load_gguf(
    config: ModelSource,
    path: Path,
    attn_implementation: str,
    device: torch.device,
    revision: str | None,
    *,
    may_defer: bool,
    shard: Shard | None,
) -> LoadedModel:
    file = GgufFile(path)
    revision = revision or fingerprint([path])
    # a quantised file has no dtype of its own; bfloat16 holds every range it can have
    dtype = choose_dtype(config.dtype, device, torch.bfloat16)
    model = load_gguf_model(
        file,
        attn_implementation=attn_implementation,
        dtype=dtype,
        device=device,
        may_defer=may_defer and device.type == "cpu",  # every architecture that is read has fused layers
        shard=shard,
    )
    tokenizer = load_gguf_tokenizer(file, revision, _cache_dir(config))
    name = str(file.metadata.get("general.name") or path.stem)
    return _loaded(config, model, tokenizer, device=device, revision=revision, name=name, metadata=file.metadata)


def _load_folder(
    config: ModelSource,
    folder: Path,
    attn_implementation: str,
    device: torch.device,
    revision: str | None,
    *,
    may_defer: bool,
    shard: Shard | None,
) -> LoadedModel:
    files = check_folder(folder)
    # what can fail fast goes before the weights
    hf_config = read_config(folder)
    tokenizer = load_folder_tokenizer(folder)
    dtype = choose_dtype(config.dtype, device, own_dtype(hf_config))
    model = None
    if shard is not None:
        model = defer_folder_part(folder, hf_config, shard, attn_implementation=attn_implementation, dtype=dtype)
    elif may_defer and device.type == "cpu" and hf_config.model_type in FAMILIES:
        model = defer_folder_model(folder, hf_config, attn_implementation=attn_implementation, dtype=dtype)
    if model is None:
        model = load_folder_model(
            folder, hf_config, attn_implementation=attn_implementation, dtype=dtype, device=device
        )
    return _loaded(
        config,
        model,
        tokenizer,
        device=device,
        revision=revision or fingerprint(files),
        name=Path(config.model).name,
        metadata={},
    )


def _loaded(
    config: ModelSource,
    model: Any,
    tokenizer: Any,
    *,
    device: torch.device,
    revision: str,
    name: str,
    metadata: dict[str, Any],
) -> LoadedModel:
    hf_config = model.config.get_text_config()
    return LoadedModel(
        model=model.eval().requires_grad_(requires_grad=False),
        tokenizer=tokenizer,
        eos_token_ids=end_token_ids(model, tokenizer, metadata),
        hf_config=hf_config,
        max_model_len=longest_sequence(hf_config, config.max_model_len, config.model),
        dtype=model.dtype,
        device=device,
        revision=revision,
        name=name,
        cache_dir=_cache_dir(config),
    )


def _cache_dir(config: ModelSource) -> Path:
    return Path(config.cache_dir) if config.cache_dir else default_cache_dir()


def choose_device(name: str) -> torch.device:
    """The device of a setting. Raises ModelError: it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(
            f"device {name!r} is none that is known: use auto, cpu, cuda or cuda:N", param="device"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {name} is not there: {torch.cuda.device_count()} GPUs are visible", param="device")
    return device


def choose_dtype(name: str, device: torch.device, own: torch.dtype) -> torch.dtype:
    """The dtype of a setting; ``auto`` is the model's ``own`` on a GPU. Raises ModelError: there is none such."""
    if name == "auto":
        return own if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is none of auto, {', '.join(DTYPES)}", param="dtype")
    return DTYPES[name]


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """An engine has its own progress to show, and its log is no terminal."""
    switch: Any = transformers_logging  # its annotations are incomplete
    was_enabled = switch.is_progress_bar_enabled()
    switch.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            switch.enable_progress_bar()
