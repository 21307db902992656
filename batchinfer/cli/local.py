"""The nouns of one's own database, with the verbs that :class:`batchinfer.client.Client` has for a server's."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from batchinfer.jobs.caller import DEFAULT_TENANT, Caller, Role
from batchinfer.jobs.present import key_view
from batchinfer.jobs.schedules import ScheduleService
from batchinfer.jobs.usage import UsageQuery, parse_groups
from batchinfer.jobs.views import KeyList, KeyView, NewKeyView, QueueView, WorkerList
from batchinfer.jobs.webhook_queue import WebhookQueue
from batchinfer.jobs.webhook_sender import WebhookSender
from batchinfer.money import Price, usd_to_nanos

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import date, datetime
    from decimal import Decimal

    from batchinfer.jobs.money_views import (
        BudgetList,
        BudgetView,
        DevicePriceView,
        ModelPriceView,
        PriceBookView,
        UsageView,
    )
    from batchinfer.jobs.service import JobService
    from batchinfer.jobs.webhook_views import DeliveryList, DeliveryView, NewWebhookView, WebhookList, WebhookView
    from batchinfer.settings import Settings


class LocalDoor:
    """Everything beside jobs, in the configured database."""

    def __init__(self, service: JobService, settings: Settings) -> None:
        self._service = service
        self.schedules = ScheduleService.of(service)
        self.webhooks = LocalWebhooks(service, settings)
        self.keys = LocalKeys(service)
        self.budgets = LocalBudgets(service)
        self.prices = LocalPrices(service)
        self.usage = LocalUsage(service)
        self.workers = LocalWorkers(service)

    def num_workers(self) -> int | None:
        """Workers alive."""
        return self._service.num_workers()


class LocalWebhooks:
    """See :class:`batchinfer.client.webhooks.Webhooks`."""

    def __init__(self, service: JobService, settings: Settings) -> None:
        self._service, self._allowed = service, settings.allowed_networks

    def add(self, url: str, *, events: Sequence[str] = (), tenant: str = DEFAULT_TENANT) -> NewWebhookView:
        """Add a webhook of a tenant."""
        service = self._service
        service.tenants.get(service.caller, tenant)
        return service.webhooks.add(Caller.operator(tenant), url, events=events, allowed=self._allowed)

    def list(self) -> WebhookList:
        """All webhooks."""
        return self._service.webhooks.list(self._service.caller)

    def remove(self, webhook_id: str) -> WebhookView:
        """Remove a webhook."""
        return self._service.webhooks.remove(self._service.caller, webhook_id)

    def enable(self, webhook_id: str) -> WebhookView:
        """Send again to one that was disabled."""
        return self._service.webhooks.enable(self._service.caller, webhook_id)

    def test(self, webhook_id: str) -> DeliveryView:
        """Send ``webhook.test`` now."""
        return self._send(self._service.webhooks.post_test(self._service.caller, webhook_id))

    def redeliver(self, webhook_id: str, delivery_id: str) -> DeliveryView:
        """Send a message again now."""
        return self._send(self._service.webhooks.redeliver(self._service.caller, webhook_id, delivery_id))

    def deliveries(
        self, webhook_id: str, *, state: str | None = None, limit: int = 20, after: str | None = None
    ) -> DeliveryList:
        """A page of deliveries."""
        service = self._service
        return service.webhooks.deliveries(service.caller, webhook_id, state=state, limit=limit, after=after)

    def _send(self, delivery: DeliveryView) -> DeliveryView:
        service = self._service
        WebhookSender(WebhookQueue(service.engine), allowed=self._allowed).send_now(delivery.id)
        return service.webhooks.delivery(service.caller, delivery.webhook, delivery.id)


class LocalKeys:
    """See :class:`batchinfer.client.keys.Keys`."""

    def __init__(self, service: JobService) -> None:
        self._keys, self._caller = service.keys, service.caller

    def create(
        self,
        *,
        tenant: str | None = None,
        platform: bool = False,
        role: str = Role.SUBMITTER,
        name: str | None = None,
        scopes: Sequence[str] = (),
        expires_in_seconds: int | None = None,
        rate_per_minute: int | None = None,
    ) -> NewKeyView:
        """Make a key."""
        lifetime = None if expires_in_seconds is None else timedelta(seconds=expires_in_seconds)
        record, token = self._keys.create(
            self._caller, tenant=None if platform else tenant or DEFAULT_TENANT, role=Role(role), name=name,
            scopes=scopes, lifetime=lifetime, rate_per_minute=rate_per_minute,
        )  # fmt: skip
        return NewKeyView(**key_view(record).model_dump(), key=token)

    def list(self, *, limit: int = 20, after: str | None = None) -> KeyList:
        """A page of keys."""
        found = self._keys.list(self._caller, limit=limit + 1, after=after)
        views = [key_view(record) for record in found[:limit]]
        return KeyList(
            data=views,
            first_id=views[0].id if views else None,
            last_id=views[-1].id if views else None,
            has_more=len(found) > limit,
        )

    def rotate(self, key_id: str, *, overlap_seconds: int = 86400) -> NewKeyView:
        """Make a key in the place of another one."""
        record, token = self._keys.rotate(self._caller, key_id, overlap=timedelta(seconds=overlap_seconds))
        return NewKeyView(**key_view(record).model_dump(), key=token)

    def revoke(self, key_id: str) -> KeyView:
        """End a key."""
        return key_view(self._keys.revoke(self._caller, key_id))


class LocalBudgets:
    """See :class:`batchinfer.client.money.Budgets`."""

    def __init__(self, service: JobService) -> None:
        self._money = service.money

    def list(self, tenant: str | None = None) -> BudgetList:
        """Budgets and how they stand."""
        return self._money.budgets(tenant)

    def set(self, tenant: str, limit_usd: Decimal, month: str | None = None) -> BudgetView:
        """Set a budget."""
        return self._money.set_budget(tenant, limit_usd, month)

    def remove(self, tenant: str, month: str | None = None) -> None:
        """Take a budget away."""
        self._money.remove_budget(tenant, month)


class LocalPrices:
    """See :class:`batchinfer.client.money.Prices`."""

    def __init__(self, service: JobService) -> None:
        self._money = service.money

    def list(self, *, model: str | None = None, device: str | None = None) -> PriceBookView:
        """The price book."""
        return self._money.prices(model=model, device=device)

    def set(
        self,
        model: str,
        *,
        input_usd: Decimal,
        output_usd: Decimal,
        cached_input_usd: Decimal | None = None,
        valid_from: datetime | None = None,
    ) -> ModelPriceView:
        """Set a list price."""
        cached = input_usd if cached_input_usd is None else cached_input_usd
        price = Price(usd_to_nanos(input_usd), usd_to_nanos(cached), usd_to_nanos(output_usd))
        return self._money.set_price(model, price, valid_from=valid_from)

    def set_device(self, device: str, usd_per_hour: Decimal, *, valid_from: datetime | None = None) -> DevicePriceView:
        """Set a device's hourly price."""
        return self._money.set_device_price(device, usd_per_hour, valid_from=valid_from)


class LocalUsage:
    """See :class:`batchinfer.client.money.Usage`."""

    def __init__(self, service: JobService) -> None:
        self._money = service.money

    def get(
        self,
        group_by: Sequence[str] = ("day",),
        *,
        first_day: date | None = None,
        last_day: date | None = None,
        model: str | None = None,
        tenant: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> UsageView:
        """A page of usage."""
        query = UsageQuery(parse_groups(group_by), first_day, last_day, model=model, tenant=tenant)
        return self._money.usage(query, after=after, limit=limit)


class LocalWorkers:
    """See :class:`batchinfer.client.fleet.Workers`."""

    def __init__(self, service: JobService) -> None:
        self._service = service

    def list(self) -> WorkerList:
        """All workers."""
        return self._service.workers()

    def queue(self, *, target_seconds: float = 600) -> QueueView:
        """What waits and runs."""
        return self._service.queue(target_seconds=target_seconds)
