"""Tenants, for the platform's admin; anyone may look at their own."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from batchinfer.api.deps import Limit, PlatformService, Service
from batchinfer.api.schemas import ErrorBody, TenantBody, TenantChanges
from batchinfer.errors import NotFoundError
from batchinfer.jobs.present import tenant_view
from batchinfer.jobs.tenants import TENANT_ID
from batchinfer.jobs.views import TenantList, TenantView

_ERRORS: dict[int | str, dict[str, Any]] = {
    403: {"model": ErrorBody, "description": "This needs an admin of the whole platform."},
    404: {"model": ErrorBody, "description": "No such tenant."},
    409: {"model": ErrorBody, "description": "The tenant exists already."},
    422: {"model": ErrorBody, "description": "A field is wrong; `param` names it."},
}
router = APIRouter(prefix="/v1/tenants", tags=["tenants"], responses=_ERRORS)
TenantId = Annotated[str, Path(description="Id of a tenant.")]


def _known(tenant: str) -> str:
    """Text that no id can be never reaches the database."""
    if not TENANT_ID.fullmatch(tenant):
        raise NotFoundError("no such tenant", param="tenant")
    return tenant


@router.get("")
def list_tenants(
    service: PlatformService,
    limit: Limit = 20,
    after: Annotated[str | None, Query(description="Last id of the page before.")] = None,
) -> TenantList:
    """List tenants by id."""
    found = service.tenants.list(service.caller, limit=limit + 1, after=None if after is None else _known(after))
    views = [tenant_view(record) for record in found[:limit]]
    return TenantList(
        data=views,
        first_id=views[0].id if views else None,
        last_id=views[-1].id if views else None,
        has_more=len(found) > limit,
    )


@router.post("", status_code=201)
def add_tenant(service: PlatformService, body: TenantBody) -> TenantView:
    """Add a tenant."""
    record = service.tenants.add(
        service.caller,
        body.id,
        name=body.name,
        input_roots=body.input_roots,
        output_roots=body.output_roots,
        weight=body.weight,
    )
    return tenant_view(record)


@router.get("/{tenant}")
def get_tenant(service: Service, tenant: TenantId) -> TenantView:
    """One tenant: one's own, or any for the platform."""
    return tenant_view(service.tenants.get(service.caller, _known(tenant)))


@router.patch("/{tenant}")
def change_tenant(service: Service, tenant: TenantId, body: TenantChanges) -> TenantView:
    """Change what is given. The platform's admin may."""
    found = service.tenants.get(service.caller, _known(tenant))
    record = service.tenants.change(
        service.caller,
        found.id,
        name=body.name,
        input_roots=body.input_roots,
        output_roots=body.output_roots,
        weight=body.weight,
        is_disabled=body.disabled,
    )
    return tenant_view(record)
