"""Tenants: who shares an installation, and where each may read and write."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, update
from sqlalchemy.dialects import postgresql, sqlite

from batchinfer.db.session import read_transaction
from batchinfer.db.tables import TenantRow
from batchinfer.errors import ConflictError, InvalidSpecError, NotFoundError
from batchinfer.jobs.caller import DEFAULT_TENANT, Caller
from batchinfer.jobs.ledger_base import LedgerBase

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Row

MIN_WEIGHT, MAX_WEIGHT = 0.01, 1000.0
TENANT_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,39}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """A tenant. Roots that are empty are those of the installation; ``weight`` is its share of busy workers."""

    id: str
    name: str | None = None
    input_roots: tuple[str, ...] = ()
    output_roots: tuple[str, ...] = ()
    weight: float = 1.0
    created_at: datetime | None = None
    """None: the default tenant, which nobody has made."""
    disabled_at: datetime | None = None


def _record(row: Row[Any]) -> TenantRecord:
    return TenantRecord(
        row.id, row.name, tuple(row.input_roots), tuple(row.output_roots), row.weight, row.created_at, row.disabled_at
    )


def find_tenant(connection: Connection, tenant: str) -> TenantRecord:
    """One tenant, inside a transaction. Raises NotFoundError."""
    row = connection.execute(select(TenantRow).where(TenantRow.id == tenant)).one_or_none()
    if row is None:
        if tenant == DEFAULT_TENANT:
            return TenantRecord(DEFAULT_TENANT)
        raise NotFoundError(f"no tenant {tenant}; `batchinfer tenants ls` lists them", param="tenant")
    return _record(row)


class Tenants(LedgerBase):
    """The tenants of a database. Reading one's own is for everyone, the rest for the platform's admin."""

    def get(self, caller: Caller, tenant: str) -> TenantRecord:
        """One tenant. Raises NotFoundError."""
        caller.check_sees(tenant, f"no tenant {tenant}; `batchinfer tenants ls` lists them", param="tenant")
        with read_transaction(self._engine) as connection:
            return find_tenant(connection, tenant)

    def list(self, caller: Caller, *, limit: int = 100, after: str | None = None) -> list[TenantRecord]:
        """Tenants by id, ``default`` among them. Raises ForbiddenError."""
        caller.check_platform_admin()
        query = select(TenantRow).order_by(TenantRow.id)
        with read_transaction(self._engine) as connection:
            found = {DEFAULT_TENANT: TenantRecord(DEFAULT_TENANT)}
            found |= {row.id: _record(row) for row in connection.execute(query)}
        return [found[name] for name in sorted(found) if after is None or name > after][:limit]

    def add(
        self,
        caller: Caller,
        tenant: str,
        *,
        name: str | None = None,
        input_roots: Sequence[str] = (),
        output_roots: Sequence[str] = (),
        weight: float = 1.0,
    ) -> TenantRecord:
        """Make a tenant. Raises ForbiddenError, ConflictError, InvalidSpecError."""
        caller.check_platform_admin()
        if not TENANT_ID.fullmatch(tenant):
            raise InvalidSpecError(
                f"tenant {tenant[:60]!r} is not 1 to 40 of a-z, 0-9 and -, such as search-team", param="tenant"
            )
        roots = {"input_roots": list(input_roots), "output_roots": list(output_roots)}
        values = {"id": tenant, "name": name, "weight": _checked_weight(weight), **roots}

        def work(connection: Connection, now: datetime) -> TenantRecord:
            is_new = _insert(connection, values | {"created_at": now})
            if tenant == DEFAULT_TENANT or not is_new:
                raise ConflictError(f"tenant {tenant} exists already", param="tenant")
            return find_tenant(connection, tenant)

        return self._write(work, again=False)

    def change(
        self,
        caller: Caller,
        tenant: str,
        *,
        name: str | None = None,
        input_roots: Sequence[str] | None = None,
        output_roots: Sequence[str] | None = None,
        weight: float | None = None,
        is_disabled: bool | None = None,
    ) -> TenantRecord:
        """Change what is given. Raises ForbiddenError, NotFoundError, InvalidSpecError."""
        caller.check_platform_admin()
        values: dict[str, Any] = {}
        if name is not None:
            values["name"] = name
        if input_roots is not None:
            values["input_roots"] = list(input_roots)
        if output_roots is not None:
            values["output_roots"] = list(output_roots)
        if weight is not None:
            values["weight"] = _checked_weight(weight)

        def work(connection: Connection, now: datetime) -> TenantRecord:
            found = find_tenant(connection, tenant)
            _insert(connection, {"id": tenant, "created_at": now})
            if is_disabled is not None:
                values["disabled_at"] = (found.disabled_at or now) if is_disabled else None
            if values:
                connection.execute(update(TenantRow).where(TenantRow.id == tenant).values(values))
            return find_tenant(connection, tenant)

        return self._write(work)


def _checked_weight(weight: float) -> float:
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise InvalidSpecError(f"a weight is between {MIN_WEIGHT:g} and {MAX_WEIGHT:g}", param="weight")
    return weight


def _insert(connection: Connection, values: dict[str, Any]) -> bool:
    """Insert unless it is there; tell whether it was inserted."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    full = {"name": None, "input_roots": [], "output_roots": []} | values
    statement = dialect.insert(TenantRow).values(full).on_conflict_do_nothing().returning(TenantRow.id)
    return connection.execute(statement).one_or_none() is not None
