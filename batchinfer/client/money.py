"""Prices, budgets and usage on a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.client.noun import Noun, given
from batchinfer.jobs.money_views import (
    BudgetList,
    BudgetView,
    DevicePriceView,
    ModelPriceView,
    PriceBookView,
    UsageView,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import date, datetime
    from decimal import Decimal


class Budgets(Noun):
    """``client.budgets``: what tenants may spend in a month. Setting them needs an admin's key of the platform."""

    def list(self, tenant: str | None = None) -> BudgetList:
        """Budgets of the caller's tenant, or of all for the platform, and how they stand."""
        return self._get(BudgetList, "/v1/budgets", tenant=tenant)

    def set(self, tenant: str, limit_usd: Decimal, month: str | None = None) -> BudgetView:
        """Set or raise a budget for a month such as ``2026-11``, or for every month."""
        body = given(month=month) | {"tenant": tenant, "limit_usd": str(limit_usd)}
        return self._send(BudgetView, "PUT", "/v1/budgets", body, again=True)

    def remove(self, tenant: str, month: str | None = None) -> None:
        """Take a budget away; jobs that it held wait for a resume."""
        self._transport.ask("DELETE", f"/v1/budgets/{tenant}", params=given(month=month), is_repeatable=False)


class Prices(Noun):
    """``client.prices``: the price book. Setting prices needs an admin's key of the platform."""

    def list(self, *, model: str | None = None, device: str | None = None) -> PriceBookView:
        """All prices, the latest of each model and device first."""
        return self._get(PriceBookView, "/v1/prices", model=model, device=device)

    def set(
        self,
        model: str,
        *,
        input_usd: Decimal,
        output_usd: Decimal,
        cached_input_usd: Decimal | None = None,
        valid_from: datetime | None = None,
    ) -> ModelPriceView:
        """Set a model's list price, in dollars per million tokens, from now on or from a moment on."""
        cached = None if cached_input_usd is None else str(cached_input_usd)
        body = {"model": model, "input_usd": str(input_usd), "output_usd": str(output_usd)}
        body |= given(cached_input_usd=cached, valid_from=_moment(valid_from))
        return self._send(ModelPriceView, "PUT", "/v1/prices/models", body)

    def set_device(self, device: str, usd_per_hour: Decimal, *, valid_from: datetime | None = None) -> DevicePriceView:
        """Set what an hour of a kind of device costs, from now on or from a moment on."""
        body = {"device": device, "usd_per_hour": str(usd_per_hour)} | given(valid_from=_moment(valid_from))
        return self._send(DevicePriceView, "PUT", "/v1/prices/devices", body)


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


class Usage(Noun):
    """``client.usage``: what was run and what it cost."""

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
        """A page of usage by one or two of day, tenant, model, job, tag; days are UTC, both ends included."""
        days = {"from": first_day and first_day.isoformat(), "to": last_day and last_day.isoformat()}
        return self._get(
            UsageView,
            "/v1/usage",
            group_by=list(group_by),
            model=model,
            tenant=tenant,
            after=after,
            limit=limit,
            **days,
        )
