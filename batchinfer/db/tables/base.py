"""What all tables share: names of constraints, and how Python's types are stored."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, MetaData, Text
from sqlalchemy.orm import DeclarativeBase

from batchinfer.db.types import JsonValue, UtcDateTime

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """Declares the tables."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012 -- SQLAlchemy's own protocol
        datetime: UtcDateTime,
        dict[str, Any]: JsonValue,
        list[Any]: JsonValue,
        int: BigInteger,
        str: Text,
    }
