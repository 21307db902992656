"""The fields of a job that people may change after they submitted it."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from batchinfer.jobs.spec import parse_deadline
from batchinfer.money import usd_to_nanos


class JobChanges(BaseModel):
    """What is given is changed; null takes a name, deadline or budget away. Words and rules are the spec's."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str | None, Field(max_length=200)] = None
    """A name for people."""
    tags: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=256)]] = {}
    """Labels, key to value; replaces all that were there."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Higher runs earlier."""
    deadline: datetime | None = None
    """Rows not started by then end as ``expired``."""
    budget_usd: Annotated[Decimal | None, Field(gt=0, max_digits=18, decimal_places=9)] = None
    """Stop before the next dispatch once this much metered cost is reached."""

    @field_validator("deadline", mode="before")
    @classmethod
    def _deadline_may_be_a_duration(cls, value: object) -> object:
        return parse_deadline(value, datetime.now(UTC)) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.deadline is not None and self.deadline.tzinfo is None:
            raise ValueError("the deadline has no time zone")
        if not self.model_fields_set:
            raise ValueError(f"nothing to change; give one of {', '.join(type(self).model_fields)}")
        return self

    def columns(self) -> dict[str, Any]:
        """The changes as the ledger takes them."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if "deadline" in given:
            given["deadline_at"] = given.pop("deadline")
        if "budget_usd" in given:
            budget = given.pop("budget_usd")
            given["budget_nanos"] = None if budget is None else usd_to_nanos(budget)
        return given
