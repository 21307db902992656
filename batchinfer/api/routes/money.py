"""Prices, usage, budgets."""

from datetime import date
from decimal import Decimal
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import AwareDatetime, Field

from batchinfer.api.deps import Service, plain_text
from batchinfer.api.schemas import Body, ErrorBody
from batchinfer.errors import NotFoundError
from batchinfer.jobs.money_views import (
    BudgetList,
    BudgetView,
    DevicePriceView,
    ModelPriceView,
    PriceBookView,
    UsageView,
)
from batchinfer.jobs.tenants import TENANT_ID
from batchinfer.jobs.usage import UsageQuery, parse_groups
from batchinfer.money import Price, usd_to_nanos

_ERRORS: dict[int | str, dict[str, Any]] = {
    403: {"model": ErrorBody, "description": "This needs an admin of the whole platform."},
    404: {"model": ErrorBody, "description": "No such tenant or budget."},
    422: {"model": ErrorBody, "description": "A field is wrong; `param` names it."},
}
router = APIRouter(prefix="/v1", tags=["money"], responses=_ERRORS)
Amount = Annotated[Decimal, Field(ge=0, max_digits=18, decimal_places=9)]
Name = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00]+$")]


class PriceBody(Body):
    """A model's list price, in dollars per million tokens."""

    model: Name
    """As jobs name it."""
    input_usd: Amount
    cached_input_usd: Amount | None = None
    """None: as ``input_usd``."""
    output_usd: Amount
    valid_from: AwareDatetime | None = None
    """None: now."""


class DevicePriceBody(Body):
    """What an hour of a kind of device costs."""

    device: Name
    """As workers name it: ``cpu``, ``cuda``, ``cuda:1``."""
    usd_per_hour: Amount
    valid_from: AwareDatetime | None = None
    """None: now."""


class BudgetBody(Body):
    """What a tenant may spend in a month."""

    tenant: Annotated[str, Field(pattern=f"^{TENANT_ID.pattern}$")]
    month: Annotated[str | None, Field(max_length=7)] = None
    """``2026-11``; None is every month without a budget of its own."""
    limit_usd: Amount


@router.get("/prices")
def get_prices(
    service: Service,
    model: Annotated[str | None, Query(max_length=1024, description="Only this model's.")] = None,
    device: Annotated[str | None, Query(max_length=1024, description="Only this device's.")] = None,
) -> PriceBookView:
    """The price book, the latest price of each model and device first."""
    return service.money.prices(model=plain_text(model), device=plain_text(device))


@router.put("/prices/models")
def set_model_price(service: Service, body: PriceBody) -> ModelPriceView:
    """Set a model's list price from a moment on; what ran before keeps its price."""
    cached = body.input_usd if body.cached_input_usd is None else body.cached_input_usd
    price = Price(usd_to_nanos(body.input_usd), usd_to_nanos(cached), usd_to_nanos(body.output_usd))
    return service.money.set_price(body.model, price, valid_from=body.valid_from)


@router.put("/prices/devices")
def set_device_price(service: Service, body: DevicePriceBody) -> DevicePriceView:
    """Set a device's hourly price from a moment on; shards that run keep theirs."""
    return service.money.set_device_price(body.device, body.usd_per_hour, valid_from=body.valid_from)


@router.get("/usage")
def get_usage(  # noqa: PLR0917 -- FastAPI passes them by name
    service: Service,
    group_by: Annotated[
        list[str] | None, Query(description="One or two of day, tenant, model, job, tag; also with a comma.")
    ] = None,
    first_day: Annotated[date | None, Query(alias="from", description="First UTC day.")] = None,
    last_day: Annotated[date | None, Query(alias="to", description="Last UTC day, included.")] = None,
    model: Annotated[str | None, Query(max_length=1024, description="Only this model.")] = None,
    tenant: Annotated[str | None, Query(max_length=40, description="Only this tenant.")] = None,
    after: Annotated[str | None, Query(max_length=4096, description="`next_after` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most lines of the page.")] = 100,
) -> UsageView:
    """What was run and what it cost: rows, tokens, metered and list price, by one or two groups."""
    query = UsageQuery(
        parse_groups(group_by or ["day"]), first_day, last_day, model=plain_text(model), tenant=plain_text(tenant)
    )
    return service.money.usage(query, after=after, limit=limit)


@router.get("/budgets")
def list_budgets(
    service: Service, tenant: Annotated[str | None, Query(max_length=40, description="Only this tenant's.")] = None
) -> BudgetList:
    """Monthly budgets of the caller's tenant, or of all for the platform, and how they stand."""
    return service.money.budgets(None if tenant is None else _known(tenant))


@router.put("/budgets")
def set_budget(service: Service, body: BudgetBody) -> BudgetView:
    """Set what a tenant may spend in a month, or in every month. The platform's admin may."""
    return service.money.set_budget(body.tenant, body.limit_usd, body.month)


@router.delete("/budgets/{tenant}", status_code=204)
def remove_budget(
    service: Service,
    tenant: Annotated[str, Path(description="Id of a tenant.")],
    month: Annotated[str | None, Query(max_length=7, description="`2026-11`; none: that of every month.")] = None,
) -> None:
    """Take a budget away. Jobs that it held wait for a resume. The platform's admin may."""
    service.money.remove_budget(_known(tenant), month)


def _known(tenant: str) -> str:
    """Text that no id can be never reaches the database."""
    if not TENANT_ID.fullmatch(tenant):
        raise NotFoundError("no such tenant", param="tenant")
    return tenant
