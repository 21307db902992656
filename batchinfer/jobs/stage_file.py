"""Files that describe the stages of a job, in YAML or JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import InvalidSpecError
from batchinfer.stages import read_stages

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
"""Levels of lists and tables in a file; a schema has some."""


def read_stage_file(path: str) -> list[dict[str, Any]]:
    """The stages of a file as plain data, each a table.

    Raises:
        InvalidSpecError: it cannot be read, or is no description of stages; the sentence names the stage and the way out.
    """
    try:
        value = parse_stage_text(_read(path))
        read_stages(value)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise InvalidSpecError(f"--stages {path}: {error}", param="stages") from None
    return list(value["stages"] if isinstance(value, dict) else value)


def _read(path: str) -> str:
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidSpecError(f"--stages {path} cannot be read: {reason}", param="stages") from None
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is longer than {MAX_BYTES // 1024} KiB")
    return text


def parse_stage_text(text: str) -> Any:
    """Plain data out of YAML or JSON, without aliases, repeated keys and YAML's surprises.

    ``yes``, ``no``, ``on``, ``off`` and dates are texts, as in YAML 1.2.

    Raises:
        ValueError: it is neither; the message names the line.
    """
    if text.lstrip().startswith(("{", "[")):
        try:
            return json.loads(text, object_pairs_hook=_table)
        except json.JSONDecodeError:  # YAML has braces, too
            pass
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    import yaml  # noqa: PLC0415 -- loads when a file is read

    try:
        return _loader(yaml)(text).get_single_data()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a table has the key {next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def _loader(module: Any) -> type[yaml.SafeLoader]:
    """The loader; made here since the library loads late."""

    class Loader(module.SafeLoader):  # type: ignore[misc]  # the library is passed in
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(module.AliasEvent):
                mark = self.peek_event().start_mark
                raise module.MarkedYAMLError(None, None, "aliases are not read: write the text again", mark)
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise module.MarkedYAMLError(None, None, "it is nested too deeply", self.peek_event().start_mark)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise module.MarkedYAMLError(None, None, f"a table has the key {twice!r} twice", node.start_mark)
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":timestamp", ":merge"))]
        for first, resolvers in module.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
    )
    return Loader
