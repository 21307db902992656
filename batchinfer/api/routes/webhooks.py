"""Webhooks: who is told of what happens, and how each telling went. Changing them is for admins."""

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from batchinfer.api.deps import AdminService, Limit, Service
from batchinfer.api.schemas import ErrorBody, WebhookBody
from batchinfer.errors import NotFoundError
from batchinfer.jobs.service import JobService
from batchinfer.jobs.webhook_queue import WebhookQueue
from batchinfer.jobs.webhook_sender import WebhookSender
from batchinfer.jobs.webhook_views import DeliveryList, DeliveryView, NewWebhookView, WebhookList, WebhookView

_ID = re.compile(r"[\w-]{1,64}", re.ASCII)
_ERRORS: dict[int | str, dict[str, Any]] = {
    403: {"model": ErrorBody, "description": "The key is not an admin's."},
    404: {"model": ErrorBody, "description": "No such webhook or delivery."},
    409: {"model": ErrorBody, "description": "The tenant has too many webhooks."},
    422: {"model": ErrorBody, "description": "A field is wrong; `param` names it."},
}
router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"], responses=_ERRORS)


def get_webhook_id(webhook_id: Annotated[str, Path(description="Id of a webhook.")]) -> str:
    """The id of the path. Text that no id can be never reaches the database. Raises NotFoundError."""
    if not _ID.fullmatch(webhook_id):
        raise NotFoundError("no such webhook; GET /v1/webhooks lists them", param="webhook_id")
    return webhook_id


def get_delivery_id(delivery_id: Annotated[str, Path(description="Id of a delivery.")]) -> str:
    """The same of a delivery. Raises NotFoundError."""
    if not _ID.fullmatch(delivery_id):
        raise NotFoundError("no such delivery", param="delivery_id")
    return delivery_id


WebhookId = Annotated[str, Depends(get_webhook_id)]
DeliveryId = Annotated[str, Depends(get_delivery_id)]


@router.get("")
def list_webhooks(service: Service) -> WebhookList:
    """List webhooks and how they do; secrets are not shown."""
    return service.webhooks.list(service.caller)


@router.post("", status_code=201)
def add_webhook(service: AdminService, body: WebhookBody, request: Request, response: Response) -> NewWebhookView:
    """Add a webhook. The answer is the only place where its secret is shown, so a lost answer means a new one."""
    allowed = request.app.state.settings.allowed_networks
    view = service.webhooks.add(service.caller, body.url, events=body.events, allowed=allowed)
    response.headers["Location"] = f"/v1/webhooks/{view.id}"
    return view


@router.get("/{webhook_id}")
def get_webhook(service: Service, webhook_id: WebhookId) -> WebhookView:
    """One webhook."""
    return service.webhooks.get(service.caller, webhook_id)


@router.delete("/{webhook_id}")
def remove_webhook(service: AdminService, webhook_id: WebhookId) -> WebhookView:
    """Remove a webhook and the list of its deliveries."""
    return service.webhooks.remove(service.caller, webhook_id)


@router.post("/{webhook_id}/enable")
def enable_webhook(service: AdminService, webhook_id: WebhookId) -> WebhookView:
    """Send again to a webhook that was disabled or is failing; what waits for it is sent soon."""
    return service.webhooks.enable(service.caller, webhook_id)


@router.post("/{webhook_id}/test")
def test_webhook(service: AdminService, webhook_id: WebhookId, request: Request) -> DeliveryView:
    """Send `webhook.test` now, and say how that went."""
    delivery = service.webhooks.post_test(service.caller, webhook_id)
    return _send(service, request, webhook_id, delivery)


@router.get("/{webhook_id}/deliveries")
def list_deliveries(
    service: Service,
    webhook_id: WebhookId,
    limit: Limit = 20,
    state: Annotated[Literal["pending", "delivered", "failed"] | None, Query(description="Only these.")] = None,
    after: Annotated[str | None, Query(pattern=r"^[\w-]{1,64}$", description="Last id of the page before.")] = None,
) -> DeliveryList:
    """Deliveries of the last 30 days, newest first."""
    return service.webhooks.deliveries(service.caller, webhook_id, state=state, limit=limit, after=after)


@router.post("/{webhook_id}/deliveries/{delivery_id}/redeliver")
def redeliver(service: AdminService, webhook_id: WebhookId, delivery_id: DeliveryId, request: Request) -> DeliveryView:
    """Send a message again now, under its old `webhook-id`, and say how that went."""
    return _send(service, request, webhook_id, service.webhooks.redeliver(service.caller, webhook_id, delivery_id))


def _send(service: JobService, request: Request, webhook_id: str, delivery: DeliveryView) -> DeliveryView:
    sender = WebhookSender(WebhookQueue(service.engine), allowed=request.app.state.settings.allowed_networks)
    sender.send_now(delivery.id)
    return service.webhooks.delivery(service.caller, webhook_id, delivery.id)
