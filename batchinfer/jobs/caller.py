"""On whose behalf something is done: the one place that says what a tenant may see."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, TypeVar

from batchinfer.errors import ForbiddenError, NotFoundError

if TYPE_CHECKING:
    from sqlalchemy import Delete, Select, Update

DEFAULT_TENANT = "default"
"""Owns whatever was made without a tenant: an installation for one never hears of tenants."""

Q = TypeVar("Q", "Select[Any]", "Update", "Delete")


class Role(StrEnum):
    """What a caller may do, each with all that the one before may."""

    VIEWER = "viewer"
    """Look."""
    SUBMITTER = "submitter"
    """Submit and steer jobs."""
    ADMIN = "admin"
    """Manage the tenant's keys; of the platform: its tenants, too."""

    def covers(self, other: Role) -> bool:
        """Whether it may do what ``other`` may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. ``tenant`` None is the platform itself: it sees every tenant, and what it makes is ``default``'s.

    ``scopes`` narrow the role down to nouns, such as ``jobs:read``; none means all of them.
    """

    tenant: str | None
    role: Role
    key_id: str | None = None
    scopes: tuple[str, ...] = ()
    rate_per_minute: int | None = None

    @classmethod
    def operator(cls, tenant: str | None = None) -> Self:
        """Whoever has the database or the loopback address: the command line, an installation without keys."""
        return cls(tenant, Role.ADMIN)

    @property
    def home(self) -> str:
        """The tenant that owns what this caller makes."""
        return self.tenant or DEFAULT_TENANT

    @property
    def is_platform(self) -> bool:
        """Whether it sees all tenants."""
        return self.tenant is None

    def only(self, query: Q, tenant_column: Any) -> Q:
        """The query, narrowed down to what this caller may see."""
        return query if self.tenant is None else query.where(tenant_column == self.tenant)

    def check_sees(self, tenant: str | None, message: str, *, param: str | None = None) -> None:
        """Raises NotFoundError for what belongs to another tenant: that it exists is nobody else's business."""
        if self.tenant is not None and tenant != self.tenant:
            raise NotFoundError(message, param=param)

    def check_role(self, needed: Role) -> None:
        """Raises ForbiddenError if the role does not suffice."""
        if not self.role.covers(needed):
            raise ForbiddenError(
                f"this needs the role {needed}, and the key has {self.role}; ask an admin for another key"
            )

    def check_platform_admin(self) -> None:
        """Raises ForbiddenError unless it administers the whole platform."""
        self.check_role(Role.ADMIN)
        self.check_platform()

    def check_platform(self) -> None:
        """Raises ForbiddenError unless it sees every tenant."""
        if not self.is_platform:
            raise ForbiddenError("this needs a key of the whole platform; ask whoever runs it")

    def check_scope(self, noun: str, verb: str) -> None:
        """``verb`` is ``read`` or ``write``. Raises ForbiddenError if the key's scopes leave it out."""
        if self.scopes and not {f"{noun}:{verb}", f"{noun}:*", f"*:{verb}"} & set(self.scopes):
            raise ForbiddenError(f"this key lacks the scope {noun}:{verb}; it has {', '.join(self.scopes)}")
