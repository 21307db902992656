"""Usage: what was run and what it cost, by day, tenant, model, job or tag."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select, tuple_

from batchinfer.db.session import read_transaction
from batchinfer.db.tables import UsageRow
from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.ledger_usage import ALL, AMOUNTS, JOB, TAG

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import date

    from sqlalchemy import Engine, Row, Select

    from batchinfer.jobs.caller import Caller

EXPORT_BATCH = 10_000
"""Lines held in memory while exporting."""


class GroupBy(StrEnum):
    """What usage is summed by."""

    DAY = "day"
    TENANT = "tenant"
    MODEL = "model"
    JOB = "job"
    TAG = "tag"


_COLUMNS = {
    GroupBy.DAY: UsageRow.day,
    GroupBy.TENANT: UsageRow.tenant_id,
    GroupBy.MODEL: UsageRow.model,
    GroupBy.JOB: UsageRow.key,
    GroupBy.TAG: UsageRow.key,
}


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """What is asked: one or two groups, whole UTC days with both ends included, perhaps of one model."""

    group_by: tuple[GroupBy, ...]
    first_day: date | None = None
    last_day: date | None = None
    model: str | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        """Raises InvalidSpecError."""
        if not 1 <= len(set(self.group_by)) == len(self.group_by) <= 2:
            raise InvalidSpecError(
                "group by one or two different ones of day, tenant, model, job, tag", param="group_by"
            )
        if {GroupBy.JOB, GroupBy.TAG} <= set(self.group_by):
            raise InvalidSpecError("a job has its tags: group by job or by tag, not by both", param="group_by")
        if self.first_day and self.last_day and self.last_day < self.first_day:
            raise InvalidSpecError(f"the last day {self.last_day} comes before the first, {self.first_day}", param="to")


@dataclass(frozen=True, slots=True)
class UsageSum:
    """What belongs to one group. Money in nano-dollars; ``metered`` are rows, ``overhead`` the rest."""

    group: tuple[str, ...]
    num_rows: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    metered_nanos: int
    overhead_nanos: int
    list_nanos: int
    saved_nanos: int
    device_ns: int


def usage_statement(
    query: UsageQuery, caller: Caller, *, after: str | None = None, limit: int | None = None
) -> Select[Any]:
    """The sums in the order of their groups, jobs by id.

    It reads the roll-up by day: a row a day, tenant and model, a row a job and day, or a row a tag, day and model.

    Raises:
        InvalidSpecError: ``after`` is no cursor of this query.
    """
    row, groups = UsageRow, [_COLUMNS[name] for name in query.group_by]
    dimension = JOB if GroupBy.JOB in query.group_by else TAG if GroupBy.TAG in query.group_by else ALL
    columns: list[Any] = [*groups, *(func.sum(getattr(row, name)) for name in AMOUNTS)]
    statement = caller.only(select(*columns), row.tenant_id)
    statement = statement.where(row.dimension == dimension)
    if query.first_day is not None:
        statement = statement.where(row.day >= query.first_day.isoformat())
    if query.last_day is not None:
        statement = statement.where(row.day <= query.last_day.isoformat())
    if query.model is not None:
        statement = statement.where(row.model == query.model)
    if query.tenant is not None:
        statement = statement.where(row.tenant_id == query.tenant)
    if after is not None:
        values = _read_cursor(after, len(groups))
        # one column plainly, so that an index can be entered there
        where = groups[0] > values[0] if len(groups) == 1 else tuple_(*groups) > tuple_(*values)
        statement = statement.where(where)
    return statement.group_by(*groups).order_by(*groups).limit(limit)


def usage_sums(
    engine: Engine, query: UsageQuery, caller: Caller, *, after: str | None = None, limit: int = 100
) -> tuple[list[UsageSum], str | None]:
    """A page of sums, and the cursor of the next one, None if there is none."""
    with read_transaction(engine) as connection:
        found = connection.execute(usage_statement(query, caller, after=after, limit=limit + 1)).all()
    sums = [_sum(row, len(query.group_by)) for row in found[:limit]]
    return sums, _cursor(sums[-1].group) if len(found) > limit else None


def iter_usage(engine: Engine, query: UsageQuery, caller: Caller) -> Iterator[list[UsageSum]]:
    """All sums, in batches."""
    after: str | None = None
    while True:
        sums, after = usage_sums(engine, query, caller, after=after, limit=EXPORT_BATCH)
        if sums:
            yield sums
        if after is None:
            return


def export_usage(engine: Engine, query: UsageQuery, caller: Caller, path: str) -> int:
    """Write all sums to a Parquet file; return how many. Money is ``decimal128(18, 9)`` dollars.

    Raises:
        OSError: it cannot be written.
    """
    import pyarrow as pa  # noqa: PLC0415 -- pyarrow loads when it is used
    import pyarrow.parquet as pq  # noqa: PLC0415 -- see above

    from batchinfer.money import nanos_to_usd  # noqa: PLC0415 -- beside its use

    usd, count = pa.decimal128(28, 9), pa.int64()
    money = {name: name.replace("_nanos", "_usd") for name in AMOUNTS if name.endswith("_nanos")}
    fields = [(str(name), pa.string()) for name in query.group_by]
    fields += [(money.get(name, name), usd if name in money else count) for name in AMOUNTS]
    schema, number = pa.schema(fields), 0
    with pq.ParquetWriter(path, schema) as writer:
        for sums in iter_usage(engine, query, caller):
            columns: list[list[Any]] = [[line.group[place] for line in sums] for place in range(len(query.group_by))]
            for name in AMOUNTS:
                values = [getattr(line, name) for line in sums]
                columns.append([nanos_to_usd(value) for value in values] if name in money else values)
            writer.write_table(
                pa.Table.from_arrays([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
            )
            number += len(sums)
    return number


def parse_groups(names: Sequence[str]) -> tuple[GroupBy, ...]:
    """Read ``day``, ``day,model`` or several of them. Raises InvalidSpecError."""
    words = [word.strip() for name in names for word in name.split(",")]
    known = {str(group) for group in GroupBy}
    if wrong := [word for word in words if word not in known]:
        raise InvalidSpecError(
            f"cannot group by {wrong[0][:40]!r}; use day, tenant, model, job or tag", param="group_by"
        )
    return tuple(GroupBy(word) for word in words)


def _sum(row: Row[Any], num_groups: int) -> UsageSum:
    # sums of 64-bit integers are decimals on PostgreSQL
    return UsageSum(tuple(row[:num_groups]), *(int(value) for value in row[num_groups:]))


def _cursor(group: Sequence[str]) -> str:
    return base64.urlsafe_b64encode(json.dumps(list(group)).encode()).decode()


def _read_cursor(text: str, length: int) -> list[str]:
    try:
        values = json.loads(base64.urlsafe_b64decode(text.encode()))
    except (ValueError, binascii.Error):
        values = None
    if (
        not isinstance(values, list)
        or len(values) != length
        or not all(isinstance(v, str) and "\0" not in v for v in values)
    ):
        raise InvalidSpecError("after is not the next_after of a page of the same query", param="after")
    return values
