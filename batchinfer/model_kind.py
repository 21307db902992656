"""What a model can do, and how its vectors are meant to be made: read from its folder, without loading it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from batchinfer.errors import InvalidSpecError
from batchinfer.tasks import Pooling, Task

_POOLINGS = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_cls_token": Pooling.CLS,
}
_DECODER_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


class ModelKind(StrEnum):
    """A decoder generates text; an encoder gives token vectors; a classifier has a head over the classes of a text."""

    DECODER = "decoder"
    ENCODER = "encoder"
    CLASSIFIER = "classifier"


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """What a sentence-transformers folder says: pooling, and the longest text in tokens; None where it says nothing."""

    pooling: Pooling | None = None
    max_tokens: int | None = None
    has_identity_activation: bool = False
    """Whether a cross-encoder's score is its logit, and not the logit's sigmoid."""


def model_kind(model: str | Path) -> ModelKind:
    """The kind of a local model by its architecture's name; a GGUF file or what is not here counts as a decoder."""
    names = _json(Path(model).expanduser() / "config.json").get("architectures") or []
    name = str(names[0]) if names else ""
    if name.endswith("ForSequenceClassification"):
        return ModelKind.CLASSIFIER
    return ModelKind.DECODER if not name or name.endswith(_DECODER_ENDINGS) else ModelKind.ENCODER


_TASKS = {
    ModelKind.DECODER: frozenset(Task),
    ModelKind.ENCODER: frozenset({Task.EMBED}),
    ModelKind.CLASSIFIER: frozenset({Task.CLASSIFY, Task.RERANK}),
}


def check_task(model: str, task: Task, *, has_labels: bool) -> None:
    """Refuse a task that a model cannot do; of a model that is not on this machine nothing is known.

    Raises:
        InvalidSpecError: it cannot; the message says what it can.
    """
    kind = model_kind(model)
    if task not in _TASKS[kind]:
        can = " and ".join(sorted(task.value for task in _TASKS[kind]))
        raise InvalidSpecError(f"{model} is of kind {kind.value}, which does {can}, not {task.value}", param="task")
    if task is Task.CLASSIFY and kind is ModelKind.CLASSIFIER and has_labels:
        raise InvalidSpecError(f"{model} has labels of its own; leave out labels", param="labels")
    if task is Task.CLASSIFY and kind is ModelKind.DECODER and not has_labels and Path(model).expanduser().exists():
        raise InvalidSpecError(f"{model} is a decoder, which needs labels to choose from", param="labels")


def sentence_config(model: str | Path) -> SentenceConfig:
    """What the files of sentence-transformers in a model's folder say."""
    folder = Path(model).expanduser()
    pooling = _json(folder / "1_Pooling" / "config.json")
    own = _json(folder / "config.json").get("sentence_transformers") or {}
    activation = str(own.get("activation_fn", "")) if isinstance(own, dict) else ""
    longest = _json(folder / "sentence_bert_config.json").get("max_seq_length")
    named = next((found for key, found in _POOLINGS.items() if pooling.get(key)), None)
    return SentenceConfig(named, longest if isinstance(longest, int) else None, activation.endswith("Identity"))


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
