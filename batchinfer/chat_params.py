"""How one row's conversation becomes a prompt, and how its answer is taken apart: tools, reasoning, template, truncation."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_TOOLS = 128
MAX_TEMPLATE_LENGTH = 128 * 1024
"""Characters of a chat template."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_CHOICES = frozenset({"auto", "none", "required"})
_TEMPLATE_ARGUMENTS = frozenset(
    {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
     "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
     "return_assistant_tokens_mask", "tokenizer_kwargs"}
)  # fmt: skip
"""Names that a template has other values for."""


class Truncate(StrEnum):
    """Which side of a prompt goes where it is too long."""

    LEFT = "left"
    RIGHT = "right"
    MIDDLE = "middle"


class ToolParser(StrEnum):
    """How tool calls are written: as the chat template shows, in a family's way, or not looked for."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    NONE = "none"


class ChatParams(BaseModel):
    """The part of a row's parameters that concerns its conversation. Lists and objects may be given as JSON text."""

    tools: Annotated[tuple[dict[str, Any], ...], Field(description="functions that the model may call")] = ()
    tool_choice: Annotated[
        str, Field(max_length=64, description="auto, none, required, or the name of the tool to call")
    ] = "auto"
    parallel_tool_calls: Annotated[
        bool, Field(description="whether an answer that must call a tool may make several calls")
    ] = True
    tool_parser: Annotated[ToolParser, Field(description="how the model writes tool calls")] = ToolParser.AUTO
    chat_template: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=MAX_TEMPLATE_LENGTH,
            description="Jinja template to use instead of the model's chat template",
        ),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(description="variables for the chat template, such as enable_thinking")
    ] = {}
    reasoning: Annotated[bool, Field(description="split the model's reasoning from its answer")] = False
    max_reasoning_tokens: Annotated[
        int | None, Field(ge=0, le=2**31 - 1, description="end the reasoning after so many tokens")
    ] = None
    truncate: Annotated[
        Truncate | None, Field(description="side from which a prompt that leaves no room for max_tokens is cut")
    ] = None

    @field_validator("tools", "tool_choice", "chat_template_kwargs", mode="before")
    @classmethod
    def _read(cls, value: object, info: ValidationInfo) -> object:
        return read_field(info.field_name, value)

    @model_validator(mode="after")
    def _check_choice(self) -> ChatParams:
        names = [tool["function"]["name"] for tool in self.tools]
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice required needs tools")
        if self.tool_choice not in _CHOICES and self.tool_choice not in names:
            known = ", ".join(names) or "none"
            raise ValueError(f"tool_choice {self.tool_choice!r} is none of auto, none, required and the tools: {known}")
        if names and self.tool_choice == "auto" and not self.parallel_tool_calls:
            raise ValueError("parallel_tool_calls false needs tool_choice required or the name of a tool")
        return self

    @property
    def shown_tools(self) -> tuple[dict[str, Any], ...]:
        """Tools that the prompt tells the model of."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def forces_call(self) -> bool:
        """Whether the answer must be a call of a tool."""
        return self.tool_choice not in ("auto", "none")

    @property
    def may_call_often(self) -> bool:
        """Whether an answer that must call a tool may have several calls: the choice of a tool by name is one call."""
        return self.tool_choice == "required" and self.parallel_tool_calls

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """Tools of which the answer must call one; none where it need not."""
        if not self.forces_call:
            return ()
        return tuple(tool for tool in self.tools if self.tool_choice in ("required", tool["function"]["name"]))

    @property
    def splits_reasoning(self) -> bool:
        """Whether reasoning is told from the answer."""
        return self.reasoning or self.max_reasoning_tokens is not None

    @property
    def parses_tool_calls(self) -> bool:
        """Whether calls are looked for in the answer."""
        return bool(self.shown_tools) and self.tool_parser is not ToolParser.NONE


def arguments_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object; a tool without parameters takes none.

    Raises:
        ValueError: the tool's parameters are no object.
    """
    function = tool["function"]
    schema: dict[str, Any] = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f"tools: the parameters of {function['name']} have type {kind!r}; arguments are an object")
    return schema | {"type": "object"}


def _read_tools(value: object) -> object:
    """Tool definitions in OpenAI's form. Raises ValueError."""
    value = _from_json(value, "tools", '[{"type": "function", "function": {"name": ...}}]')
    if value is None:
        return ()
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ValueError("tools is not a list of tool definitions")  # noqa: TRY004 -- pydantic reports ValueErrors
    if len(value) > MAX_TOOLS:
        raise ValueError(f"tools has {len(value)} definitions; at most {MAX_TOOLS}")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(value)]
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"tools has {twice!r} twice")
    return tuple(tools)


def _read_tool_choice(value: object) -> object:
    """A word or a name; OpenAI's object becomes the name in it. Raises ValueError."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _from_json(value, "tool_choice", '{"type": "function", "function": {"name": ...}}')
    if isinstance(value, dict):
        function = value.get("function")
        name = function.get("name") if isinstance(function, dict) else value.get("name")
        if not isinstance(name, str):
            raise ValueError("tool_choice names no function")  # noqa: TRY004 -- pydantic reports ValueErrors
        return name
    return "auto" if value is None else value


def _read_template_kwargs(value: object) -> object:
    """Variables of a template. Raises ValueError."""
    value = _from_json(value, "chat_template_kwargs", '{"enable_thinking": false}')
    if isinstance(value, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        value = dict(value)
    if isinstance(value, dict) and (taken := sorted(_TEMPLATE_ARGUMENTS.intersection(value))):
        raise ValueError(f"{taken[0]} is no variable of a template; there are parameters for what it does")
    return {} if value is None else value


def _from_json(value: object, name: str, example: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is not JSON such as {example}") from None


def _tool(value: object, where: str) -> dict[str, Any]:
    """A definition in OpenAI's form; one without its frame (``{name, parameters}``) gets it."""
    if isinstance(value, dict) and "function" not in value and "name" in value:
        value = {"type": "function", "function": {k: v for k, v in value.items() if k != "type"}}
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        raise ValueError(f'{where} is not {{"type": "function", "function": {{"name": ...}}}}')  # noqa: TRY004 -- pydantic reports ValueErrors
    if value.get("type") not in (None, "function"):
        raise ValueError(f"{where} has type {value['type']!r}; only function is supported")
    function = {key: item for key, item in function.items() if item is not None}
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise ValueError(f"{where} has no name of 1 to 64 letters, digits, and any of _ . -")
    if "parameters" in function:
        function["parameters"] = _from_json(function["parameters"], f"{where}.parameters", '{"type": "object"}')
        if not isinstance(function["parameters"], dict):
            raise ValueError(f"{where}.parameters is not a JSON schema (an object)")
    rest = {key: item for key, item in value.items() if item is not None and key not in ("type", "function")}
    return {"type": "function", "function": function, **rest}


_READERS: Mapping[str | None, Callable[[object], object]] = {
    "tools": _read_tools,
    "tool_choice": _read_tool_choice,
    "chat_template_kwargs": _read_template_kwargs,
}


def read_field(name: str | None, value: object) -> object:
    """A field as JSON text, as OpenAI has it or as Arrow gives it, in the one form that is kept. Raises ValueError."""
    return _READERS[name](value)
