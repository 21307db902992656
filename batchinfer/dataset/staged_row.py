"""A row's way through the stages of its job: what is asked next, once the last answer is there."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jinja2 import nodes

from batchinfer.dataset.nulls import OnNull, RowSkipped, failure, template_null
from batchinfer.dataset.stage_columns import check_names, seen_field, seen_value
from batchinfer.dataset.template import (
    DICT_METHODS,
    PromptTemplate,
    RowCondition,
    check_chat_template,
    names_in,
    parse_expression,
    parse_template,
)
from batchinfer.dataset.text import REPLACED, replace_surrogates
from batchinfer.errors import InputError, InvalidSpecError, RowFailure
from batchinfer.types import ErrorCode, Request, RowError, RowStatus, Usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from batchinfer.sampling_params import SamplingParams
    from batchinfer.stages import Stage
    from batchinfer.types import Completion, Message


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage with what the job makes of it: parameters of its rows, optional columns of its answers."""

    stage: Stage
    params: SamplingParams
    columns: tuple[str, ...] = ()


class StageProgram:
    """Compiled stages, checked against the input's columns.

    Raises:
        InvalidSpecError: what :func:`check_stages` refuses.
        InputError: a stage uses a column that does not exist, or has the name of one.
    """

    def __init__(self, plans: Sequence[StagePlan], schema: pa.Schema, on_null: OnNull) -> None:
        check_stages([plan.stage for plan in plans], {plan.stage.name: plan.columns for plan in plans})
        self.plans = tuple(plans)
        self.on_null: OnNull = on_null
        seen = schema
        self.steps: list[_Question | RowCondition] = []
        used: set[str] = set()
        taken = {name.casefold() for name in schema.names}
        for plan in plans:
            stage = plan.stage
            if stage.name.casefold() in taken:
                raise InputError(
                    f"stage {stage.name!r}: the input has a column of that name; choose another", param="stages"
                )
            with _of_stage(stage):
                step = (
                    _Question(plan, seen, on_null)
                    if stage.generates
                    else RowCondition(stage.filter or "", seen, on_null)
                )
            self.steps.append(step)
            used.update(step.columns)
            seen = seen.append(seen_field(stage, plan.columns))
        self.columns: tuple[str, ...] = tuple(name for name in schema.names if name in used)
        """Columns of the input that any stage uses."""


class _Question:
    """A stage that asks the model."""

    def __init__(self, plan: StagePlan, schema: pa.Schema, on_null: OnNull) -> None:
        stage = plan.stage

        def compiled(source: str) -> PromptTemplate:
            return PromptTemplate(source, schema, on_null)

        self.params = plan.params
        if plan.params.chat_template is not None:
            check_chat_template(plan.params.chat_template)
        self._prompt = None if stage.prompt is None else compiled(stage.prompt)
        given = [("system", stage.system)] if stage.system is not None else []
        given += [(message.role, message.content) for message in stage.messages or ()]
        self._messages = [(role, compiled(content)) for role, content in given]
        templates = [*([self._prompt] if self._prompt else []), *(content for _, content in self._messages)]
        self.columns = {name for template in templates for name in template.columns}

    def request(self, values: Mapping[str, list[Any]], row_index: int) -> tuple[Request, bool]:
        """The row's request, and whether text in it was replaced. Raises RowFailure, RowSkipped."""
        replaced = False

        def text(template: PromptTemplate) -> str:
            nonlocal replaced
            found, is_hit = replace_surrogates(template.render(values, 0))
            replaced |= is_hit
            return found

        messages: list[Message] = [{"role": role, "content": text(content)} for role, content in self._messages]
        if self._prompt is not None:
            prompt = text(self._prompt)
            if not prompt.strip():
                raise failure(ErrorCode.EMPTY_PROMPT, "the prompt is empty")
            if not messages:
                return Request(str(row_index), self.params, prompt), replaced
            messages.append({"role": "user", "content": prompt})
        return Request(str(row_index), self.params, messages=messages), replaced


@dataclass(slots=True)
class StagedRow:
    """One row on its way. ``values`` has a list of one value for each column that the stages use.

    ``status`` is None while :meth:`advance` returns requests. Then the row has ended, for ``error`` or at the stage
    ``stopped_at``, if at any.
    """

    row_index: int
    values: dict[str, list[Any]]
    program: StageProgram
    answers: dict[str, Completion] = field(default_factory=dict)
    """What the engine gave, by stage; the last one may have failed."""
    verdicts: dict[str, bool] = field(default_factory=dict)
    """What filters said, by stage."""
    warnings: tuple[str, ...] = ()
    status: RowStatus | None = None
    error: RowError | None = None
    stopped_at: str | None = None
    at: int = 0

    @property
    def stage(self) -> Stage:
        """Where the row stands."""
        return self.program.plans[self.at].stage

    @property
    def num_chars(self) -> int:
        """About how much text is kept for the stages to come."""
        texts = sum(len(value) for (value,) in self.values.values() if isinstance(value, str | bytes))
        return texts + sum(len(answer.text) for answer in self.answers.values())

    @property
    def named_error(self) -> RowError | None:
        """Its error, with the stage in the message."""
        if self.error is None:
            return None
        return replace(self.error, message=f"stage {self.stopped_at!r}: {self.error.message}")

    @property
    def last_answer(self) -> Completion | None:
        """The answer of the last stage, once the row has gone through all."""
        return next(reversed(self.answers.values()), None) if self.status is RowStatus.SUCCEEDED else None

    @property
    def usage(self) -> Usage:
        """Tokens of all stages so far."""
        return sum((answer.usage for answer in self.answers.values()), Usage())

    def advance(self) -> Request | None:
        """The next request, past filters; None where the row ends."""
        try:
            while self.at < len(self.program.steps):
                step = self.program.steps[self.at]
                if isinstance(step, _Question):
                    request, replaced = step.request(self.values, self.row_index)
                    if replaced and REPLACED not in self.warnings:
                        self.warnings += (REPLACED,)
                    return request
                if not self._passes(step):
                    self._end(RowStatus.FILTERED)
                    return None
                self.at += 1
        except RowSkipped:
            self._end(RowStatus.SKIPPED)
        except RowFailure as error:
            self._fail(error.error)
        except RecursionError:
            self._fail(RowError(ErrorCode.TEMPLATE_ERROR, "a value is nested too deeply"))
        else:
            self.status = RowStatus.SUCCEEDED
        return None

    def take(self, completion: Completion) -> Request | None:
        """Keep the answer of the stage where the row stands, and go on; see :meth:`advance`."""
        plan = self.program.plans[self.at]
        name = plan.stage.name
        self.answers[name] = completion
        self.warnings += tuple(f"{name}:{warning}" for warning in _warnings(completion))
        if completion.status is not RowStatus.SUCCEEDED:
            self._end(completion.status, completion.error)
            return None
        try:
            parsed = _parsed(completion, f"{name}.parsed", self.program.on_null)
        except (ValueError, RecursionError):
            self._fail(RowError(ErrorCode.TEMPLATE_ERROR, "the answer's JSON cannot be read"))
            return None
        self.values[name] = [seen_value(completion, plan.columns, parsed)]
        self.at += 1
        return self.advance()

    def _passes(self, condition: RowCondition) -> bool:
        name = self.stage.name
        verdict = condition.holds(self.values, 0)
        self.verdicts[name] = verdict
        self.values[name] = [verdict]
        return verdict

    def _fail(self, error: RowError) -> None:
        self._end(RowStatus.ERRORED, error)

    def _end(self, status: RowStatus, error: RowError | None = None) -> None:
        self.status, self.stopped_at, self.error = status, self.stage.name, error


def _warnings(completion: Completion) -> tuple[str, ...]:
    clamped = completion.clamped_max_tokens
    return completion.warnings + (() if clamped is None else (f"max_tokens_clamped:{clamped}",))


def _parsed(completion: Completion, path: str, on_null: OnNull) -> Any:
    text = completion.extra.get("parsed")
    return None if text is None else _json_value(json.loads(text), path, on_null)


def _json_value(value: Any, path: str, on_null: OnNull) -> Any:
    """Plain JSON as templates see it: a null inside it never becomes the word None."""
    if value is None:
        return template_null(on_null, path)
    if isinstance(value, dict):
        return {key: _json_value(item, f"{path}.{key}", on_null) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item, f"{path}[{i}]", on_null) for i, item in enumerate(value)]
    return value


@contextmanager
def _of_stage(stage: Stage) -> Iterator[None]:
    """Name the stage in what is wrong with its templates."""
    try:
        yield
    except (InvalidSpecError, InputError) as error:
        raise type(error)(f"stage {stage.name!r}: {error.message}", param="stages", code=error.code) from None


def check_stages(stages: Sequence[Stage], columns: Mapping[str, Sequence[str]]) -> None:
    """Check what can be told without the input: syntax, and what stages use of each other.

    ``columns`` are the optional columns of each stage's answers.

    Raises:
        InvalidSpecError: names the stage and the way out.
    """
    check_names(stages)
    for number, stage in enumerate(stages):
        with _of_stage(stage):
            for tree in _trees(stage):
                _check_references(tree, stage, stages[:number], stages[number:], columns)


def _trees(stage: Stage) -> Iterator[nodes.Template]:
    if stage.filter is not None:
        yield parse_expression(stage.filter)
    sources = (stage.prompt, stage.system, *(message.content for message in stage.messages or ()))
    yield from (parse_template(source) for source in sources if source is not None)


def _check_references(
    tree: nodes.Template,
    stage: Stage,
    earlier: Sequence[Stage],
    later: Sequence[Stage],
    columns: Mapping[str, Sequence[str]],
) -> None:
    used = names_in(tree)
    for other in later:
        if other.name in used:
            what = "itself" if other is stage else f"the stage {other.name!r}, which comes after it"
            raise InvalidSpecError(f"it uses {what}: a stage sees the input and the stages before it", param="stages")
    fields = {
        other.name: [f.name for f in seen_field(other, columns[other.name]).type] if other.generates else []
        for other in earlier
        if other.name in used
    }
    for name, attribute in _attributes(tree):
        if name not in fields or attribute in fields[name]:
            continue
        if not fields[name]:
            raise InvalidSpecError(f"it uses {name}.{attribute}, but {name} is a filter: true or false", param="stages")
        if attribute not in DICT_METHODS:
            raise InvalidSpecError(
                f"it uses {name}.{attribute}, but {name} has {', '.join(fields[name])}", param="stages"
            )


def _attributes(tree: nodes.Template) -> Iterator[tuple[str, str]]:
    """``(variable, attribute)`` of each constant attribute or item that is taken of a variable."""
    for node in tree.find_all(nodes.Getattr):
        if isinstance(node.node, nodes.Name):
            yield node.node.name, node.attr
    for item in tree.find_all(nodes.Getitem):
        key = getattr(item.arg, "value", None)
        if isinstance(item.node, nodes.Name) and isinstance(key, str):
            yield item.node.name, key
