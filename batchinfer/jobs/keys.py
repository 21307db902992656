"""API keys: made, listed, rotated, revoked, checked.

A key is ``bi_<id>_<secret>``. The secret has 256 random bits, so its SHA-256 is as good as any slow hash: there is no
list of likely secrets to try, and a check costs microseconds instead of a processor's tenth of a second for everybody
who sends nonsense. Only the digest is stored; the key itself is shown once.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, or_, select, update

from batchinfer.db.session import read_transaction
from batchinfer.db.tables import ApiKeyRow, TenantRow
from batchinfer.errors import ConflictError, ForbiddenError, InvalidSpecError, NotFoundError, UnauthorizedError
from batchinfer.jobs.caller import Caller, Role
from batchinfer.jobs.ledger_base import LedgerBase
from batchinfer.jobs.tenants import find_tenant

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Row

KEY = re.compile(r"bi_([0-9a-z]{12})_([0-9A-Za-z]{43})", re.ASCII)
KEY_ID = re.compile(r"[0-9a-z]{12}", re.ASCII)
SCOPE = re.compile(r"(\*|[a-z][a-z-]{0,31}):(read|write|\*)", re.ASCII)
_LOWER = "0123456789abcdefghijklmnopqrstuvwxyz"
_LETTERS = _LOWER + _LOWER[10:].upper()
USED_EVERY = timedelta(minutes=1)
"""``last_used_at`` is as coarse as this, so that a key in use does not write with each request."""
MAX_SCOPES = 32


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key without its secret."""

    id: str
    tenant: str | None
    """None: the whole platform."""
    name: str | None
    role: Role
    scopes: tuple[str, ...]
    rate_per_minute: int | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    replaced_by: str | None


def _record(row: Row[Any]) -> KeyRecord:
    return KeyRecord(
        id=row.id,
        tenant=row.tenant_id,
        name=row.name,
        role=Role(row.role),
        scopes=tuple(row.scopes),
        rate_per_minute=row.rate_per_minute,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
        replaced_by=row.replaced_by,
    )


class Keys(LedgerBase):
    """The API keys of a database. Every method but :meth:`authenticate` and :meth:`exist` acts for a caller."""

    def exist(self) -> bool:
        """Whether a key was ever made: from then on nobody is let in without one."""
        with read_transaction(self._engine) as connection:
            return connection.scalar(select(ApiKeyRow.id).limit(1)) is not None

    def authenticate(self, token: str) -> Caller:
        """Whom a key stands for.

        Raises:
            UnauthorizedError: it is no key, or unknown, expired, revoked, or of a disabled tenant.
        """
        match = KEY.fullmatch(token)
        row = None if match is None else self._row(match[1])
        if match is None or row is None or not hmac.compare_digest(row.secret_sha256, _digest(match[2])):
            raise UnauthorizedError("this API key is not known here; `batchinfer keys create` makes one")
        return self._write_if_stale(row)

    def create(
        self,
        caller: Caller,
        *,
        tenant: str | None,
        role: Role,
        name: str | None = None,
        scopes: Sequence[str] = (),
        lifetime: timedelta | None = None,
        rate_per_minute: int | None = None,
    ) -> tuple[KeyRecord, str]:
        """Make a key; the text is what its holder sends, and is nowhere else. ``tenant`` None: the whole platform.

        Raises:
            ForbiddenError: the caller may not, or the key would be allowed more than the caller.
            NotFoundError: no such tenant.
            InvalidSpecError: a scope is none.
        """
        _check_may_make(caller, tenant, role, scopes)
        values = {
            "tenant_id": tenant,
            "role": role,
            "name": name,
            "scopes": sorted(set(scopes)),
            "rate_per_minute": rate_per_minute,
        }

        def work(connection: Connection, now: datetime) -> tuple[KeyRecord, str]:
            if tenant is not None:
                find_tenant(connection, tenant)
            return _insert(connection, now, values | {"expires_at": None if lifetime is None else now + lifetime})

        # not again: a second run after a lost answer would leave a key that nobody knows of
        return self._write(work, again=False)

    def list(self, caller: Caller, *, limit: int = 100, after: str | None = None) -> list[KeyRecord]:
        """Keys by id. Raises ForbiddenError."""
        caller.check_role(Role.ADMIN)
        query = caller.only(select(ApiKeyRow), ApiKeyRow.tenant_id).order_by(ApiKeyRow.id).limit(limit)
        if after is not None:
            query = query.where(ApiKeyRow.id > after)
        with read_transaction(self._engine) as connection:
            return [_record(row) for row in connection.execute(query)]

    def get(self, caller: Caller, key_id: str) -> KeyRecord:
        """One key. Raises ForbiddenError, NotFoundError."""
        caller.check_role(Role.ADMIN)
        with read_transaction(self._engine) as connection:
            return _record(_find(connection, caller, key_id))

    def revoke(self, caller: Caller, key_id: str) -> KeyRecord:
        """End a key now. Asking again changes nothing. Raises ForbiddenError, NotFoundError."""
        caller.check_role(Role.ADMIN)

        def work(connection: Connection, now: datetime) -> KeyRecord:
            _find(connection, caller, key_id)
            is_this = (ApiKeyRow.id == key_id) & ApiKeyRow.revoked_at.is_(None)
            connection.execute(update(ApiKeyRow).where(is_this).values(revoked_at=now))
            return _record(_find(connection, caller, key_id))

        return self._write(work)

    def rotate(self, caller: Caller, key_id: str, *, overlap: timedelta) -> tuple[KeyRecord, str]:
        """Make a key that may what this one may; the old one lives on for ``overlap``, so that holders can change over.

        Raises:
            ForbiddenError: the caller may not.
            NotFoundError: no such key.
            ConflictError: the key has ended or was rotated before.
        """
        caller.check_role(Role.ADMIN)

        def work(connection: Connection, now: datetime) -> tuple[KeyRecord, str]:
            old = _find(connection, caller, key_id)
            _check_may_make(caller, old.tenant_id, Role(old.role), old.scopes)
            if old.revoked_at is not None or old.replaced_by is not None or (old.expires_at and old.expires_at <= now):
                raise ConflictError(f"key {key_id} has ended or was rotated before; create a new one")
            lifetime = None if old.expires_at is None else old.expires_at - old.created_at
            copied = {name: getattr(old, name) for name in ("tenant_id", "role", "name", "scopes", "rate_per_minute")}
            new = _insert(connection, now, copied | {"expires_at": None if lifetime is None else now + lifetime})
            ends = now + overlap if old.expires_at is None else min(now + overlap, old.expires_at)
            changed = {"replaced_by": new[0].id, "expires_at": ends}
            connection.execute(update(ApiKeyRow).where(ApiKeyRow.id == key_id).values(changed))
            return new

        return self._write(work, again=False)

    # -- how ----------------------------------------------------------------------------------------------------------
    def _row(self, key_id: str) -> Row[Any] | None:
        query: Any = select(ApiKeyRow, TenantRow.disabled_at.label("disabled_at"))
        query = query.outerjoin(TenantRow, TenantRow.id == ApiKeyRow.tenant_id).where(ApiKeyRow.id == key_id)
        with read_transaction(self._engine) as connection:
            row: Row[Any] | None = connection.execute(query).one_or_none()
            return row

    def _write_if_stale(self, row: Row[Any]) -> Caller:
        """Check the times of a key whose secret was right, and note its use."""

        def check(_connection: Connection, now: datetime) -> bool:
            if row.revoked_at is not None:
                raise UnauthorizedError(f"API key bi_{row.id} was revoked")
            if row.expires_at is not None and row.expires_at <= now:
                raise UnauthorizedError(f"API key bi_{row.id} expired at {row.expires_at.isoformat()}")
            if row.disabled_at is not None:
                raise UnauthorizedError(f"tenant {row.tenant_id} is disabled")
            return row.last_used_at is None or now - row.last_used_at >= USED_EVERY

        def touch(connection: Connection, now: datetime) -> None:
            is_stale = or_(ApiKeyRow.last_used_at.is_(None), ApiKeyRow.last_used_at <= now - USED_EVERY)
            connection.execute(update(ApiKeyRow).where(ApiKeyRow.id == row.id, is_stale).values(last_used_at=now))

        if self._read(check):
            self._write(touch)
        return Caller(row.tenant_id, Role(row.role), row.id, tuple(row.scopes), row.rate_per_minute)


def _check_may_make(caller: Caller, tenant: str | None, role: Role, scopes: Sequence[str]) -> None:
    caller.check_role(Role.ADMIN)
    if tenant is None:
        caller.check_platform_admin()
    else:
        caller.check_sees(tenant, f"no tenant {tenant}", param="tenant")
    caller.check_role(role)
    if len(scopes) > MAX_SCOPES or not all(SCOPE.fullmatch(scope) for scope in scopes):
        raise InvalidSpecError(
            f"scopes {', '.join(scopes)[:200]!r} are not up to {MAX_SCOPES} times NOUN:read, NOUN:write or NOUN:*, "
            "such as jobs:read",
            param="scopes",
        )
    if caller.scopes and (not scopes or not set(scopes) <= set(caller.scopes)):
        raise ForbiddenError(f"a key cannot be allowed more than yours, which has {', '.join(caller.scopes)}")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _insert(connection: Connection, now: datetime, values: dict[str, Any]) -> tuple[KeyRecord, str]:
    key_id = "".join(secrets.choice(_LOWER) for _ in range(12))
    secret = "".join(secrets.choice(_LETTERS) for _ in range(43))
    connection.execute(
        insert(ApiKeyRow).values(values | {"id": key_id, "secret_sha256": _digest(secret), "created_at": now})
    )
    row = connection.execute(select(ApiKeyRow).where(ApiKeyRow.id == key_id)).one()
    return _record(row), f"bi_{key_id}_{secret}"


def _find(connection: Connection, caller: Caller, key_id: str) -> Row[Any]:
    query = caller.only(select(ApiKeyRow).where(ApiKeyRow.id == key_id), ApiKeyRow.tenant_id)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFoundError(f"no key {key_id}; `batchinfer keys ls` lists them", param="key_id")
    return row
