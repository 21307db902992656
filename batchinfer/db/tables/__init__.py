"""The tables. Money in nano-dollars, device time in ns, times aware and UTC. No rules live here.

Every module of tables is imported here, so that ``Base.metadata`` is the whole schema.
"""

from batchinfer.db.tables.base import Base
from batchinfer.db.tables.files import HAS_EXPIRY, Batch, FileUse, StoredFile
from batchinfer.db.tables.jobs import (
    CLAIMABLE,
    HAS_OPEN_DEADLINE,
    RUNNING,
    WAITS_FOR_MANIFEST,
    WAITS_FOR_PLAN,
    Attempt,
    Job,
    JobEventRow,
    JobTag,
    LedgerEntry,
    Part,
    PriceRow,
    RowErrorRow,
    Shard,
    Worker,
)
from batchinfer.db.tables.models import ModelPinRow
from batchinfer.db.tables.money import BudgetRow, DevicePriceRow, ForecastRow, UsageRow
from batchinfer.db.tables.reuse import KeyIndexRow
from batchinfer.db.tables.schedules import ScheduleRow, ScheduleRunRow
from batchinfer.db.tables.tenants import ApiKeyRow, TenantRow, TenantService
from batchinfer.db.tables.webhooks import WebhookDeliveryRow, WebhookMessageRow, WebhookRow

__all__ = [
    "CLAIMABLE",
    "HAS_EXPIRY",
    "HAS_OPEN_DEADLINE",
    "RUNNING",
    "WAITS_FOR_MANIFEST",
    "WAITS_FOR_PLAN",
    "ApiKeyRow",
    "Attempt",
    "Base",
    "Batch",
    "BudgetRow",
    "DevicePriceRow",
    "FileUse",
    "ForecastRow",
    "Job",
    "JobEventRow",
    "JobTag",
    "KeyIndexRow",
    "LedgerEntry",
    "ModelPinRow",
    "Part",
    "PriceRow",
    "RowErrorRow",
    "ScheduleRow",
    "ScheduleRunRow",
    "Shard",
    "StoredFile",
    "TenantRow",
    "TenantService",
    "UsageRow",
    "WebhookDeliveryRow",
    "WebhookMessageRow",
    "WebhookRow",
    "Worker",
]
