"""Where a model's sequences end: its end tokens and its longest context."""

from __future__ import annotations

from typing import Any

from batchinfer.errors import ModelError

DEFAULT_CONTEXT = 2048
"""Tokens, for a config that states no length."""

GGUF_END_KEYS = ("eos", "eot", "eom")
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Tokens that end a turn; older GGUF files name only one of those a model uses, and llama.cpp finds them by text too."""

LENGTH_DEPENDENT_ROPE = {"longrope", "dynamic"}
"""Rotations that change for every token once one sequence of the batch is longer than the training length."""


def end_token_ids(model: Any, tokenizer: Any, gguf_metadata: dict[str, Any]) -> frozenset[int]:
    """Ids that end a sequence: those of config, generation config and tokenizer together."""
    stated = [model.config.eos_token_id, model.config.get_text_config().eos_token_id, tokenizer.eos_token_id]
    if model.generation_config is not None:
        stated.append(model.generation_config.eos_token_id)
    stated += [gguf_metadata.get(f"tokenizer.ggml.{key}_token_id") for key in GGUF_END_KEYS]
    if gguf_metadata:
        special = tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
        stated += [token_id for token_id, token in special if token.special and token.content in TURN_ENDS]
    ids: set[int] = set()
    for value in stated:
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(ids)


def longest_sequence(hf_config: Any, wanted: int | None, name: str) -> int:
    """Longest sequence in tokens: ``wanted``, or else what the model was made for.

    Raises:
        ModelError: ``wanted`` is more than that.
    """
    limit: int = getattr(hf_config, "max_position_embeddings", None) or DEFAULT_CONTEXT
    rope = getattr(hf_config, "rope_parameters", None) or {}
    reason = ""
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        trained: int = (
            rope.get("original_max_position_embeddings")
            or getattr(hf_config, "original_max_position_embeddings", None)
            or limit
        )
        if trained < limit:
            limit, reason = trained, f" (beyond it its {rope['rope_type']} rotation depends on the batch)"
    if wanted is not None and wanted > limit:
        raise ModelError(
            f"max_model_len {wanted} is more than the {limit} tokens that {name} can read{reason}",
            param="max_model_len",
        )
    return wanted or limit
