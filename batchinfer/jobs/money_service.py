"""Prices, usage and budgets as the CLI and the REST API ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.jobs.money_views import (
    BudgetList,
    BudgetView,
    DevicePriceView,
    ModelPriceView,
    PriceBookView,
    UsageLine,
    UsageView,
)
from batchinfer.jobs.usage import export_usage, usage_sums
from batchinfer.money import nanos_to_usd, usd_to_nanos

if TYPE_CHECKING:
    from datetime import datetime
    from decimal import Decimal

    from batchinfer.jobs.budgets import BudgetRecord
    from batchinfer.jobs.caller import Caller
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.prices import DevicePrice, ModelPrice
    from batchinfer.jobs.tenants import Tenants
    from batchinfer.jobs.usage import UsageQuery, UsageSum
    from batchinfer.money import Price


class MoneyService:
    """What a caller may know and set. Prices and budgets are set by the platform's admin; a tenant reads its own."""

    def __init__(self, ledger: Ledger, tenants: Tenants, caller: Caller) -> None:
        self._ledger = ledger
        self._tenants = tenants
        self._caller = caller

    # -- prices -------------------------------------------------------------------------------------------------------
    def prices(self, *, model: str | None = None, device: str | None = None) -> PriceBookView:
        """The price book, or one model's or device's part of it."""
        models = [] if device is not None and model is None else self._ledger.model_prices(model=model)
        devices = [] if model is not None and device is None else self._ledger.device_prices(device=device)
        return PriceBookView(
            models=[model_price_view(price) for price in models],
            devices=[device_price_view(price) for price in devices],
        )

    def set_price(self, model: str, price: Price, *, valid_from: datetime | None = None) -> ModelPriceView:
        """Set a list price. Raises ForbiddenError."""
        self._caller.check_platform_admin()
        return model_price_view(self._ledger.set_price(model, price, valid_from=valid_from))

    def set_device_price(
        self, device: str, usd_per_hour: Decimal, *, valid_from: datetime | None = None
    ) -> DevicePriceView:
        """Set an hourly price. Raises ForbiddenError."""
        self._caller.check_platform_admin()
        nanos = usd_to_nanos(usd_per_hour)
        return device_price_view(self._ledger.set_device_price(device, nanos, valid_from=valid_from))

    # -- usage --------------------------------------------------------------------------------------------------------
    def usage(self, query: UsageQuery, *, after: str | None = None, limit: int = 100) -> UsageView:
        """A page of usage. Raises InvalidSpecError."""
        sums, next_after = usage_sums(self._ledger.engine, query, self._caller, after=after, limit=limit)
        return UsageView(
            group_by=[str(name) for name in query.group_by],
            data=[usage_line(query, found) for found in sums],
            has_more=next_after is not None,
            next_after=next_after,
        )

    def export_usage(self, query: UsageQuery, path: str) -> int:
        """Write all of it to a Parquet file; return the number of lines. Raises OSError."""
        return export_usage(self._ledger.engine, query, self._caller, path)

    # -- budgets ------------------------------------------------------------------------------------------------------
    def budgets(self, tenant: str | None = None) -> BudgetList:
        """Budgets of the caller's tenant, or of all for the platform. Raises NotFoundError."""
        if tenant is not None:
            tenant = self._tenants.get(self._caller, tenant).id
        found = self._ledger.list_budgets(tenant or self._caller.tenant)
        return BudgetList(data=[budget_view(record) for record in found])

    def set_budget(self, tenant: str, limit_usd: Decimal, month: str | None = None) -> BudgetView:
        """Set a budget. Raises NotFoundError, ForbiddenError, InvalidSpecError."""
        found = self._tenants.get(self._caller, tenant)
        self._caller.check_platform_admin()
        record = self._ledger.set_budget(found.id, usd_to_nanos(limit_usd), month)
        self._ledger.hold_overspent()
        return budget_view(record)

    def remove_budget(self, tenant: str, month: str | None = None) -> None:
        """Take a budget away. Raises NotFoundError, ForbiddenError, InvalidSpecError."""
        found = self._tenants.get(self._caller, tenant)
        self._caller.check_platform_admin()
        self._ledger.remove_budget(found.id, month)


def model_price_view(price: ModelPrice) -> ModelPriceView:
    """The view of a list price."""
    return ModelPriceView(
        model=price.model,
        valid_from=price.valid_from,
        input_usd=nanos_to_usd(price.price.input_nanos),
        cached_input_usd=nanos_to_usd(price.price.cached_input_nanos),
        output_usd=nanos_to_usd(price.price.output_nanos),
    )


def device_price_view(price: DevicePrice) -> DevicePriceView:
    """The view of a device's price."""
    usd = nanos_to_usd(price.nanos_per_hour)
    return DevicePriceView(device=price.device, valid_from=price.valid_from, usd_per_hour=usd)


def usage_line(query: UsageQuery, found: UsageSum) -> UsageLine:
    """The view of one group's sums."""
    return UsageLine(
        **{str(name): value for name, value in zip(query.group_by, found.group, strict=True)},
        num_rows=found.num_rows,
        prompt_tokens=found.prompt_tokens,
        cached_tokens=found.cached_tokens,
        completion_tokens=found.completion_tokens,
        metered_usd=nanos_to_usd(found.metered_nanos),
        overhead_usd=nanos_to_usd(found.overhead_nanos),
        total_usd=nanos_to_usd(found.metered_nanos + found.overhead_nanos),
        list_usd=nanos_to_usd(found.list_nanos),
        saved_usd=nanos_to_usd(found.saved_nanos),
        device_seconds=found.device_ns / 10**9,
    )


def budget_view(record: BudgetRecord) -> BudgetView:
    """The view of a budget."""
    left = record.limit_nanos - record.spent_nanos
    return BudgetView(
        tenant=record.tenant_id,
        month=record.month,
        limit_usd=nanos_to_usd(record.limit_nanos),
        spent_month=record.spent_month,
        spent_usd=nanos_to_usd(record.spent_nanos),
        in_flight_usd=nanos_to_usd(record.in_flight_nanos),
        remaining_usd=nanos_to_usd(max(0, left)),
        overrun_usd=nanos_to_usd(max(0, -left)),
        is_spent=left <= 0,
        held_jobs=list(record.held_jobs),
    )
