"""API keys and tenants on a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.client.noun import Noun, given
from batchinfer.jobs.views import KeyList, KeyView, NewKeyView, TenantList, TenantView

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEYS, _TENANTS = "/v1/keys", "/v1/tenants"


class Keys(Noun):
    """``client.keys``: API keys. Needs an admin's key."""

    def create(
        self,
        *,
        tenant: str | None = None,
        platform: bool = False,
        role: str = "submitter",
        name: str | None = None,
        scopes: Sequence[str] = (),
        expires_in_seconds: int | None = None,
        rate_per_minute: int | None = None,
    ) -> NewKeyView:
        """Make a key, for the caller's tenant by default; the answer is the only place where it is shown."""
        body = given(tenant=tenant, name=name, expires_in_seconds=expires_in_seconds, rate_per_minute=rate_per_minute)
        body |= {"platform": platform, "role": role, "scopes": list(scopes)}
        return self._send(NewKeyView, "POST", _KEYS, body)

    def list(self, *, limit: int = 20, after: str | None = None) -> KeyList:
        """A page of keys by id, ended ones too."""
        return self._get(KeyList, _KEYS, limit=limit, after=after)

    def get(self, key_id: str) -> KeyView:
        """One key."""
        return self._get(KeyView, f"{_KEYS}/{key_id}")

    def rotate(self, key_id: str, *, overlap_seconds: int = 86400) -> NewKeyView:
        """Make a key that may what this one may; the old one lives on for the overlap."""
        return self._send(NewKeyView, "POST", f"{_KEYS}/{key_id}/rotate", {"overlap_seconds": overlap_seconds})

    def revoke(self, key_id: str) -> KeyView:
        """End a key now."""
        return self._send(KeyView, "DELETE", f"{_KEYS}/{key_id}", again=True)


class Tenants(Noun):
    """``client.tenants``: who shares the installation. Changing them needs an admin's key of the platform."""

    def add(
        self,
        tenant: str,
        *,
        name: str | None = None,
        input_roots: Sequence[str] = (),
        output_roots: Sequence[str] = (),
        weight: float = 1.0,
    ) -> TenantView:
        """Add a tenant; see ``batchinfer tenants add``."""
        body = given(name=name) | {"id": tenant, "weight": weight}
        body |= {"input_roots": list(input_roots), "output_roots": list(output_roots)}
        return self._send(TenantView, "POST", _TENANTS, body)

    def list(self, *, limit: int = 20, after: str | None = None) -> TenantList:
        """A page of tenants, by id."""
        return self._get(TenantList, _TENANTS, limit=limit, after=after)

    def get(self, tenant: str) -> TenantView:
        """One tenant."""
        return self._get(TenantView, f"{_TENANTS}/{tenant}")

    def change(
        self,
        tenant: str,
        *,
        name: str | None = None,
        input_roots: Sequence[str] | None = None,
        output_roots: Sequence[str] | None = None,
        weight: float | None = None,
        disabled: bool | None = None,
    ) -> TenantView:
        """Change what is given."""
        body = given(name=name, input_roots=input_roots, output_roots=output_roots, weight=weight, disabled=disabled)
        return self._send(TenantView, "PATCH", f"{_TENANTS}/{tenant}", body, again=True)
