"""Webhooks on a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.client.noun import Noun
from batchinfer.jobs.webhook_views import DeliveryList, DeliveryView, NewWebhookView, WebhookList, WebhookView

if TYPE_CHECKING:
    from collections.abc import Sequence

_PATH = "/v1/webhooks"


class Webhooks(Noun):
    """``client.webhooks``: who is told of what happens. Changing them needs an admin's key."""

    def add(self, url: str, *, events: Sequence[str] = ()) -> NewWebhookView:
        """Add a webhook; the answer is the only place where its secret is shown."""
        return self._send(NewWebhookView, "POST", _PATH, {"url": url, "events": list(events)})

    def list(self) -> WebhookList:
        """All webhooks, and how they do."""
        return self._get(WebhookList, _PATH)

    def get(self, webhook_id: str) -> WebhookView:
        """One webhook."""
        return self._get(WebhookView, f"{_PATH}/{webhook_id}")

    def remove(self, webhook_id: str) -> WebhookView:
        """Remove a webhook and the list of its deliveries."""
        return self._send(WebhookView, "DELETE", f"{_PATH}/{webhook_id}", again=False)

    def enable(self, webhook_id: str) -> WebhookView:
        """Send again to one that was disabled or is failing."""
        return self._send(WebhookView, "POST", f"{_PATH}/{webhook_id}/enable", again=True)

    def test(self, webhook_id: str) -> DeliveryView:
        """Send ``webhook.test`` now, and say how that went."""
        return self._send(DeliveryView, "POST", f"{_PATH}/{webhook_id}/test")

    def deliveries(
        self, webhook_id: str, *, state: str | None = None, limit: int = 20, after: str | None = None
    ) -> DeliveryList:
        """A page of deliveries of the last 30 days, newest first."""
        return self._get(DeliveryList, f"{_PATH}/{webhook_id}/deliveries", state=state, limit=limit, after=after)

    def redeliver(self, webhook_id: str, delivery_id: str) -> DeliveryView:
        """Send a message again now, and say how that went."""
        return self._send(DeliveryView, "POST", f"{_PATH}/{webhook_id}/deliveries/{delivery_id}/redeliver")
