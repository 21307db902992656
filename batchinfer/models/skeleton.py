"""A model whose weights stay in their files until a layer is converted: transformers' modules without data."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM

from batchinfer.models.deferred import DeferredParameter, Index


class Loader(Protocol):
    """Reads one tensor of a file."""

    def __call__(self, index: Index) -> torch.Tensor:
        """What ``index`` says of it, in any precision."""


class Loaders(Protocol):
    """Loaders by the names of a model's parameters."""

    def __getitem__(self, name: str, /) -> Loader:
        """Raises KeyError where there is none."""


def build_skeleton(config: Any, attn_implementation: str, dtype: torch.dtype) -> Any:
    """Transformers' model of ``config`` on the meta device, in evaluation mode."""
    causal_lm: Any = AutoModelForCausalLM  # its annotations are incomplete
    with torch.device("meta"):
        model = causal_lm.from_config(config, attn_implementation=attn_implementation, dtype=dtype)
    return model.eval()


def build_attention_skeleton(model: Any) -> Any:
    """As the skeleton of ``model``, without what stands between attentions: enough to ask layers how they attend."""
    bare = build_skeleton(model.config, model.config._attn_implementation, model.dtype)  # noqa: SLF001 -- the only place it is
    for layer in bare.model.layers:
        layer.mlp = torch.nn.Identity()
    return bare


def is_deferred(model: torch.nn.Module) -> bool:
    """Whether some of the model's weights are still in their files."""
    return any(isinstance(parameter, DeferredParameter) for parameter in model.parameters())


def defer(skeleton: Any, loaders: Loaders, dtype: torch.dtype) -> None:
    """Let each parameter read itself; vectors are read at once, and buffers that no file holds are computed.

    Raises:
        KeyError: a parameter has no loader.
        NotImplementedError: a buffer of this model is computed in a way that is not known here.
    """
    if skeleton.config.get_text_config().tie_word_embeddings:
        skeleton.lm_head.weight = skeleton.model.embed_tokens.weight
    made: dict[int, torch.nn.Parameter] = {}
    for module_name, module in skeleton.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                load = loaders[f"{module_name}.{name}"]
                made[id(parameter)] = (
                    torch.nn.Parameter(load(None).to(dtype), requires_grad=False)
                    if parameter.dim() < 2
                    else DeferredParameter.like(parameter, dtype, load)
                )
            setattr(module, name, made[id(parameter)])
    _compute_buffers(skeleton)


def _compute_buffers(skeleton: Any) -> None:
    decoder = skeleton.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config)
    embed = decoder.embed_tokens
    if hasattr(embed, "embed_scale"):
        embed.embed_scale = torch.tensor(embed.scalar_embed_scale)
    left = [name for name, buffer in skeleton.named_buffers() if buffer.is_meta]
    if left:
        raise NotImplementedError(f"buffers without data: {', '.join(left)}")
