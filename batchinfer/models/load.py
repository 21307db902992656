"""A model by its path or name: weights, tokenizer and what the engine must know about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


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
        """Where converted tokenizers are kept; None takes the user's cache folder."""


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


def load_model(config: ModelSource, attn_implementation: str) -> LoadedModel:
    """Load ``config.model`` with the attention registered as ``attn_implementation``.

    Raises:
        ModelError: the model cannot be found, read or run; the message says what to do.
    """
    raise NotImplementedError(config, attn_implementation)
