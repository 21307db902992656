"""What a job does with its rows: generate text, or only read it and say what the model makes of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_LABELS = 1024
MAX_LABEL_LENGTH = 1024


class Task(StrEnum):
    """``score``: log-likelihoods; ``embed``: vectors; ``classify``: labels; ``rerank``: documents against a query."""

    GENERATE = "generate"
    SCORE = "score"
    EMBED = "embed"
    CLASSIFY = "classify"
    RERANK = "rerank"


class Pooling(StrEnum):
    """How token vectors become one; ``auto`` is what the model's folder says, else ``mean``, of a decoder ``last``."""

    AUTO = "auto"
    MEAN = "mean"
    LAST = "last"
    CLS = "cls"


class TaskOptions(BaseModel):
    """A task and its options, the same for all rows of a job; field names are those of ``JobSpec``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: Annotated[Task, Field(description="what is done with each row")] = Task.GENERATE
    score_stride: Annotated[
        int | None, Field(ge=1, description="score: tokens that a window moves on in a text longer than the context")
    ] = None
    pooling: Annotated[Pooling, Field(description="embed: how token vectors become one")] = Pooling.AUTO
    normalize: Annotated[bool, Field(description="embed: scale vectors to length 1")] = True
    dimensions: Annotated[
        int | None, Field(ge=1, le=1_000_000, description="embed: keep the first so many numbers of a vector")
    ] = None
    instruction: Annotated[
        str | None, Field(max_length=100_000, description="embed: put before each text; rerank: what is looked for")
    ] = None
    labels: Annotated[tuple[str, ...], Field(max_length=MAX_LABELS, description="classify: the labels")] = ()
    content_free_prompt: Annotated[
        str | None,
        Field(
            max_length=100_000,
            description="classify: a prompt that says nothing, whose label probabilities are divided out",
        ),
    ] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """An option of another task is refused: it would do nothing, and whoever set it expects something."""
        for name, tasks in _OPTIONS.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.task not in tasks:
                named = " or ".join(task.value for task in tasks)
                raise ValueError(f"{name} is for task {named}, not for {self.task.value}")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("labels must be different from each other")
        if any(not label.strip() or len(label) > MAX_LABEL_LENGTH for label in self.labels):
            raise ValueError(f"a label must have 1 to {MAX_LABEL_LENGTH} characters")
        if len(self.labels) == 1:
            raise ValueError("one label is no choice; give at least two")
        if self.content_free_prompt is not None and not self.content_free_prompt.strip():
            raise ValueError("content_free_prompt is empty; N/A in place of the row's text is customary")
        return self

    @property
    def generates(self) -> bool:
        """Whether rows are answered with text."""
        return self.task is Task.GENERATE

    def request(self, texts: list[str] | None = None) -> dict[str, Any]:
        """What a request carries: JSON data. ``texts`` are a row's continuations, choices, documents, or its input."""
        return self.model_dump(mode="json", exclude_defaults=True) | ({} if texts is None else {"texts": texts})


_INPUTS = ("texts", "token_ids")
_OPTIONS = {
    "score_stride": (Task.SCORE,),
    "pooling": (Task.EMBED,),
    "normalize": (Task.EMBED,),
    "dimensions": (Task.EMBED,),
    "instruction": (Task.EMBED, Task.RERANK),
    "labels": (Task.CLASSIFY,),
    "content_free_prompt": (Task.CLASSIFY,),
}


class TaskRequest(NamedTuple):
    """What a request carries: its task; its texts or, in their place, the token ids of texts to embed."""

    options: TaskOptions
    texts: list[str] | None
    token_ids: list[list[int]] | None


def read_request(data: dict[str, Any]) -> TaskRequest:
    """Read what :meth:`TaskOptions.request` gave; ``token_ids`` may stand in it beside the options.

    Raises:
        ValueError: it is something else.
    """
    options = {name: value for name, value in data.items() if name not in _INPUTS}
    return TaskRequest(TaskOptions.model_validate(options), *(data.get(name) for name in _INPUTS))
