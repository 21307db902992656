"""Column types that read the same from SQLite and PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Integer, Text
from sqlalchemy.types import TypeDecorator, TypeEngine


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC datetime with microseconds.

    PostgreSQL keeps it as ``timestamptz``; SQLite as text of fixed width, which sorts as time does.
    """

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """``timestamptz`` where there is one."""
        return dialect.type_descriptor(DateTime(timezone=dialect.name == "postgresql"))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse naive times: their zone would be a guess."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        value = value.astimezone(UTC)
        return value if dialect.name == "postgresql" else value.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Give back an aware UTC time."""
        if value is None:
            return None
        return value.astimezone(UTC) if dialect.name == "postgresql" else value.replace(tzinfo=UTC)


BigId = BigInteger().with_variant(Integer(), "sqlite")
"""A 64-bit id that counts up by itself (SQLite does so only for a column declared INTEGER)."""

JsonValue = JSON
"""JSON as text. Not ``jsonb``, which refuses the NUL and the lone surrogates that a job's template may hold."""


class SafeText(TypeDecorator[str]):
    """Text of unknown origin, such as an error message: what no UTF-8 column can hold becomes U+FFFD."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002 -- the base's
        """Replace NUL and lone surrogates."""
        return None if value is None else storable(value)


def storable(text: str) -> str:
    """Text as any UTF-8 column can hold it: NUL and lone surrogates become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")
