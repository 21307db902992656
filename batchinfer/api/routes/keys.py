"""API keys: made, listed, rotated, revoked, by a tenant's admin or the platform's."""

from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from batchinfer.api.deps import AdminService, Limit
from batchinfer.api.schemas import ErrorBody, KeyBody, RotateBody
from batchinfer.errors import NotFoundError
from batchinfer.jobs.caller import Role
from batchinfer.jobs.keys import KEY_ID, KeyRecord
from batchinfer.jobs.present import key_view
from batchinfer.jobs.views import KeyList, KeyView, NewKeyView

_ERRORS: dict[int | str, dict[str, Any]] = {
    403: {"model": ErrorBody, "description": "The key is not an admin's, or would make one that may more."},
    404: {"model": ErrorBody, "description": "No such key or tenant."},
    409: {"model": ErrorBody, "description": "The key has ended."},
    422: {"model": ErrorBody, "description": "A field is wrong; `param` names it."},
}
router = APIRouter(prefix="/v1/keys", tags=["keys"], responses=_ERRORS)
KeyId = Annotated[str, Path(description="Id of a key: its middle part.")]


def _known(key_id: str) -> str:
    """Text that no id can be never reaches the database."""
    if not KEY_ID.fullmatch(key_id):
        raise NotFoundError("no such key; GET /v1/keys lists them", param="key_id")
    return key_id


@router.get("")
def list_keys(
    service: AdminService,
    limit: Limit = 20,
    after: Annotated[str | None, Query(description="Last id of the page before.")] = None,
) -> KeyList:
    """List keys by id, ended ones too."""
    found = service.keys.list(service.caller, limit=limit + 1, after=None if after is None else _known(after))
    views = [key_view(record) for record in found[:limit]]
    return KeyList(
        data=views,
        first_id=views[0].id if views else None,
        last_id=views[-1].id if views else None,
        has_more=len(found) > limit,
    )


@router.post("", status_code=201)
def create_key(service: AdminService, body: KeyBody) -> NewKeyView:
    """Make a key. The answer is the only place where it is shown, so a lost answer means a new key."""
    tenant = body.tenant or service.caller.home
    record, token = service.keys.create(
        service.caller,
        tenant=None if body.platform else tenant,
        role=Role(body.role),
        name=body.name,
        scopes=body.scopes,
        lifetime=None if body.expires_in_seconds is None else timedelta(seconds=body.expires_in_seconds),
        rate_per_minute=body.rate_per_minute,
    )
    return _new(record, token)


@router.get("/{key_id}")
def get_key(service: AdminService, key_id: KeyId) -> KeyView:
    """One key."""
    return key_view(service.keys.get(service.caller, _known(key_id)))


@router.post("/{key_id}/rotate", status_code=201)
def rotate_key(service: AdminService, key_id: KeyId, body: RotateBody | None = None) -> NewKeyView:
    """Make a key that may what this one may; the old one lives on for the overlap."""
    overlap = timedelta(seconds=(body or RotateBody()).overlap_seconds)
    return _new(*service.keys.rotate(service.caller, _known(key_id), overlap=overlap))


@router.delete("/{key_id}")
def revoke_key(service: AdminService, key_id: KeyId) -> KeyView:
    """End a key now; every server refuses it within two seconds."""
    return key_view(service.keys.revoke(service.caller, _known(key_id)))


def _new(record: KeyRecord, token: str) -> NewKeyView:
    return NewKeyView(**key_view(record).model_dump(), key=token)
