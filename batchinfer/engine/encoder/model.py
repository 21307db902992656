"""A model that reads whole texts at once, and its forward pass over one tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from batchinfer.errors import ModelError
from batchinfer.model_kind import ModelKind, model_kind, sentence_config
from batchinfer.models.folder import check_folder, own_dtype, read_config
from batchinfer.models.load import choose_device, choose_dtype, find_model
from batchinfer.models.reason import reason
from batchinfer.models.tokenizer import load_folder_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.engine.encoder.tiles import Tile
    from batchinfer.model_kind import SentenceConfig
    from batchinfer.models.load import ModelSource

HEAD_WEIGHTS = ("pooler.",)
"""Weights that a body may lack: BERT's pooler, which no pooling here uses."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text or a pair of texts: token ids, and which of the two each belongs to."""

    token_ids: Sequence[int]
    type_ids: Sequence[int]


class EncoderModel:
    """A loaded model of kind ``encoder`` or ``classifier``; ``longest`` is the most tokens of a text.

    Raises:
        ModelError: the model cannot be found, read or run this way.
    """

    def __init__(self, source: ModelSource) -> None:
        folder, _ = find_model(source)
        check_folder(folder)
        self.kind = model_kind(folder)
        self.sentence: SentenceConfig = sentence_config(folder)
        self.config = read_config(folder)
        self.tokenizer = load_folder_tokenizer(folder)
        self._device = choose_device(source.device)
        dtype = choose_dtype(source.dtype, self._device, own_dtype(self.config))
        auto: Any = AutoModelForSequenceClassification if self.kind is ModelKind.CLASSIFIER else AutoModel
        try:
            model, report = auto.from_pretrained(
                folder, config=self.config, dtype=dtype, use_safetensors=True, local_files_only=True,
                trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
        except Exception as error:  # transformers raises whatever its many readers raise
            raise ModelError(f"the model in {folder} cannot be loaded: {reason(error)}") from error
        if missing := sorted(name for name in report["missing_keys"] if not name.startswith(HEAD_WEIGHTS)):
            raise ModelError(f"{folder} lacks {len(missing)} weights, such as {missing[0]}: download it again")
        if self.config.is_encoder_decoder:
            raise ModelError(
                f"model {source.model} is an encoder with a decoder, whose vectors nobody has defined here"
            )
        self._model = model.eval().requires_grad_(requires_grad=False).to(self._device)
        self._takes_types = "token_type_ids" in self.tokenizer.model_input_names
        self._pad = self.tokenizer.pad_token_id or 0
        if self.kind is ModelKind.CLASSIFIER and getattr(self.config, "pad_token_id", None) is None:
            self._model.config.pad_token_id = self._pad
        self.dtype = dtype
        self.max_positions = _max_positions(self.config, self.tokenizer)
        self.longest = _longest(source, self.max_positions, self.sentence.max_tokens)

    @property
    def labels(self) -> list[str]:
        """A classifier's classes, in the order of its logits."""
        return [str(self.config.id2label[index]) for index in range(self.config.num_labels)]

    @torch.inference_mode()
    def __call__(self, tile: Tile, texts: Sequence[Encoded]) -> torch.Tensor:
        """float32: hidden states ``[tile.rows, tile.length, hidden_size]`` or logits ``[tile.rows, num_labels]``.

        Rows that no text fills are copies of the first: a tile's shape, and so each row's bytes, never depend on how
        many texts it has.
        """
        filled = [*texts, *([texts[0]] * (tile.rows - len(texts)))]
        inputs = {"input_ids": self._padded([text.token_ids for text in filled], tile.length, self._pad)}
        inputs["attention_mask"] = self._padded([[1] * len(text.token_ids) for text in filled], tile.length, 0)
        if self._takes_types:
            inputs["token_type_ids"] = self._padded([text.type_ids for text in filled], tile.length, 0)
        output = self._model(**inputs)
        result: torch.Tensor = output.logits if self.kind is ModelKind.CLASSIFIER else output.last_hidden_state
        return result.float()

    def _padded(self, rows: Sequence[Sequence[int]], length: int, filler: int) -> torch.Tensor:
        whole = [[*row, *([filler] * (length - len(row)))] for row in rows]
        return torch.tensor(whole, dtype=torch.int64, device=self._device)


def _max_positions(config: Any, tokenizer: Any) -> int:
    """The most tokens that have a position. Tokenizers of RoBERTa know that two of the positions are taken."""
    known: int = tokenizer.model_max_length
    return min(getattr(config, "max_position_embeddings", None) or known, known)


def _longest(source: ModelSource, positions: int, trained: int | None) -> int:
    if source.max_model_len is not None and source.max_model_len > positions:
        raise ModelError(
            f"max_model_len {source.max_model_len} is more than the {positions} tokens that {source.model} can read",
            param="max_model_len",
        )
    return source.max_model_len or min(positions, trained or positions)
