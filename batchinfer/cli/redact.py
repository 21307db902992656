"""Keeps secrets out of logs, whoever writes them."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime

from batchinfer.log_context import bound_ids

_SECRETS = re.compile(
    r"(?P<key>bi_[0-9a-z]{12}_)[0-9A-Za-z]{43}"
    r"|(?P<hook>whsec_)[\w+/=-]{8,}"
    r"|(?P<auth>\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}"
    r"|(?P<user>\w://[^\s:/@]*:)[^\s@/]+(?=@)",
    re.IGNORECASE,
)
_SIGNS = ("bi_", "whsec_", "bearer", "basic", "://")
"""One of these is in every secret: most lines have none, and are spared the slower search."""


def redact(text: str) -> str:
    """The text without keys, Authorization values and passwords of URLs."""
    if text.isascii():  # elsewhere other letters are equal to these but for case
        lowered = text.lower()
        if not any(sign in lowered for sign in _SIGNS):
            return text
    return _SECRETS.sub(lambda match: f"{match['key'] or match['hook'] or match['auth'] or match['user']}***", text)


class RedactingFormatter(logging.Formatter):
    """Formats as its base does, traceback included, and then takes secrets out."""

    def format(self, record: logging.LogRecord) -> str:
        """The line that is written."""
        return redact(super().format(record))


class JsonFormatter(logging.Formatter):
    """A JSON object a line: time, level, logger, message, the ids of what it is about, and a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line that is written."""
        line: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
            **bound_ids(),
        }
        if record.exc_info:
            line["exception"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)
