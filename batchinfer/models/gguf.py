"""A GGUF file as a transformers model: config from its metadata, weights dequantised tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import torch
from transformers import AutoConfig

from batchinfer.errors import ModelError
from batchinfer.models.gguf_config import hf_config_fields
from batchinfer.models.gguf_file import ALL_ROWS, GgufFile
from batchinfer.models.parallel.shard import Division
from batchinfer.models.reason import reason
from batchinfer.models.skeleton import build_skeleton, defer

if TYPE_CHECKING:
    from batchinfer.models.deferred import Index
    from batchinfer.models.parallel.shard import Shard
    from batchinfer.models.skeleton import Loader, Loaders

ROTATED_IN_PAIRS = {"llama"}
"""Architectures whose query and key rows llama.cpp reorders, because it rotates neighbours instead of halves."""
MAX_ROWS = 16384
"""Rows of a tall matrix that are dequantised at a time."""
NORMS_PLUS_ONE = {"gemma2", "gemma3"}
"""Architectures that are stored with 1 added to the norm weights."""


def load_gguf_model(
    file: GgufFile,
    *,
    attn_implementation: str,
    dtype: torch.dtype,
    device: torch.device,
    may_defer: bool = False,
    shard: Shard | None = None,
) -> Any:
    """The model of ``file`` in ``dtype`` on ``device``, in evaluation mode.

    With ``may_defer`` the matrices stay in the file until they are read; with a ``shard`` they do so too, and the model
    is a rank's share of it.

    Raises:
        ModelError: the architecture is not supported, or the file's tensors are not those of its architecture, or it
            cannot be divided so.
    """
    fields = hf_config_fields(file)
    may_defer = may_defer or shard is not None
    try:
        model = _build(file, fields, attn_implementation, dtype, may_defer=may_defer, shard=shard)
    except ModelError:
        raise
    except Exception as error:  # transformers raises whatever its many checks raise
        raise ModelError(f"the model in {file.path} cannot be loaded: {reason(error)}") from error
    _divide_rope_frequencies(model, file)
    return model if may_defer else model.to(device)


def _build(
    file: GgufFile,
    fields: dict[str, Any],
    attn_implementation: str,
    dtype: torch.dtype,
    *,
    may_defer: bool,
    shard: Shard | None,
) -> Any:
    config = AutoConfig.for_model(**fields)
    division = None if shard is None else Division(config, shard)
    skeleton = build_skeleton(config if division is None else division.config, attn_implementation, dtype)
    names = _gguf_names(skeleton, file)
    missing = [name for name in names.values() if name not in file.tensors]
    if missing:
        raise ModelError(f"{file.path} lacks {len(missing)} tensors, such as {missing[0]}: download it again")
    if may_defer:
        loaders: Loaders = {hf_name: _loader(file, name, config, dtype) for hf_name, name in names.items()}
        if division is not None:
            division.narrow(skeleton)
            loaders = division.loaders(loaders)
        defer(skeleton, loaders, dtype)
        return skeleton
    state = {hf_name: LazyTensor(file, name, config) for hf_name, name in names.items()}
    return type(skeleton).from_pretrained(
        None, config=config, state_dict=state, attn_implementation=attn_implementation, dtype=dtype
    )


class LazyTensor:
    """A tensor that is read from the file when transformers asks for it, like a slice of a safetensors file."""

    def __init__(self, file: GgufFile, name: str, config: Any) -> None:
        self._file = file
        self._name = name
        self._config = config
        self.shape = file.tensors[name].shape

    def __getitem__(self, _: Any) -> torch.Tensor:
        """All of the tensor, in float32."""
        return torch.from_numpy(to_hf_layout(self._file, self._name, self._config))


def _loader(file: GgufFile, name: str, config: Any, dtype: torch.dtype) -> Loader:
    """Reads a tall matrix some rows at a time into ``dtype``, so that it is never there in float32 as a whole."""
    height, *others = file.tensors[name].shape
    is_tall = len(others) == 1 and height > MAX_ROWS and not _is_reordered(file, name)

    def load(index: Index) -> torch.Tensor:
        if index is None and is_tall:
            whole = torch.empty(height, *others, dtype=dtype)
            for start in range(0, height, MAX_ROWS):
                rows = slice(start, start + MAX_ROWS)
                whole[rows] = torch.from_numpy(to_hf_layout(file, name, config, rows))
            return whole
        if not isinstance(index, tuple):
            tensor = torch.from_numpy(to_hf_layout(file, name, config))
            return tensor if index is None else tensor[index]
        rows, *columns = index
        tensor = torch.from_numpy(to_hf_layout(file, name, config, rows))
        return tensor[(slice(None), *columns)].clone()  # the rest of the rows is let go

    return load


def to_hf_layout(file: GgufFile, name: str, config: Any, rows: slice = ALL_ROWS) -> Any:
    """A tensor or rows of it, dequantised, with llama.cpp's changes undone; a float32 array.

    Rows of queries and keys must be those of whole heads.
    """
    weights = file.read(name, rows)
    if _is_reordered(file, name):
        num_heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return _halves_from_pairs(weights, len(weights) * num_heads // file.tensors[name].shape[0])
    if file.architecture in NORMS_PLUS_ONE and name.endswith("norm.weight"):
        return weights - 1
    return weights


def _is_reordered(file: GgufFile, name: str) -> bool:
    return file.architecture in ROTATED_IN_PAIRS and (".attn_q." in name or ".attn_k." in name)


def _halves_from_pairs(weights: Any, num_heads: int) -> Any:
    """Undo llama.cpp's ``permute``: rows (2i, 2i + 1) of a head go back to (i, i + head_dim / 2)."""
    pairs = weights.reshape(num_heads, -1, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape).copy()


def _gguf_names(skeleton: Any, file: GgufFile) -> dict[str, str]:
    """Map parameter names of transformers to GGUF tensor names; a tied head has none."""
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[file.architecture]
    table = gguf.get_tensor_name_map(architecture, skeleton.config.num_hidden_layers)
    names = {}
    for hf_name in skeleton.state_dict():
        if hf_name == "lm_head.weight" and skeleton.config.tie_word_embeddings:
            continue
        name = table.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ModelError(f"{file.path}: no GGUF name is known for {hf_name}; take the model's safetensors folder")
        names[hf_name] = name
    return names


def _divide_rope_frequencies(model: Any, file: GgufFile) -> None:
    """Apply Llama 3's frequency factors, which a GGUF file holds as a tensor and not as the config's four numbers."""
    if "rope_freqs.weight" not in file.tensors:
        return
    factors = torch.from_numpy(file.read("rope_freqs.weight"))
    rotary = model.model.rotary_emb
    for frequencies in (rotary.inv_freq, rotary.original_inv_freq):
        frequencies.div_(factors.to(frequencies.device))
