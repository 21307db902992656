"""The variables in a schedule's paths: ``s3://b/in/date={{ logical_date }}/*.parquet``."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchinfer.errors import InvalidSpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchinfer.jobs.cron import Calendar

MAX_TEXT = 4096
MAX_DAYS = 36_600
VARIABLES = ("logical_date", "previous_logical_date", "next_logical_date", "run_id", "schedule")
# No loops, operators or subscripts: a path needs none, and none of the rest can take time or memory.
_ALLOWED = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Const, nodes.Getattr, nodes.Filter, nodes.Call,
    nodes.Neg, nodes.EvalContext,
)  # fmt: skip
_WIDE = re.compile(r"%[^a-zA-Z%]*\d")
_ATTRIBUTES = frozenset({"year", "month", "day", "hour", "minute", "strftime", "isoformat"})


class LogicalDate:
    """A logical date in the schedule's zone. As text it is the day: ``2026-03-29``."""

    def __init__(self, moment: datetime) -> None:
        self._moment = moment
        self.year, self.month, self.day = moment.year, moment.month, moment.day
        self.hour, self.minute = moment.hour, moment.minute

    def __str__(self) -> str:
        return self._moment.date().isoformat()

    def strftime(self, form: str) -> str:
        """The moment in a form of one's own. Raises ValueError for one that pads."""
        if _WIDE.search(form) or len(form) > 200:
            raise ValueError(f"the format {form[:60]!r} is longer or wider than a path needs")
        return self._moment.strftime(form)

    def isoformat(self) -> str:
        """Date, time and offset."""
        return self._moment.isoformat()

    def plus(self, days: int) -> LogicalDate:
        """The same time of day, ``days`` later."""
        if abs(int(days)) > MAX_DAYS:
            raise ValueError(f"{days} days are more than {MAX_DAYS}")
        return LogicalDate(self._moment + timedelta(days=int(days)))


_FILTERS = {
    "ds": str,
    "ds_nodash": lambda date: date.strftime("%Y%m%d"),
    "ts": lambda date: date.isoformat(),
    "ts_nodash": lambda date: date.strftime("%Y%m%dT%H%M%S"),
    "days": lambda date, days: date.plus(days),
}


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False)  # a path is no HTML
    environment.globals.clear()
    environment.filters.clear()
    environment.filters.update(_FILTERS)
    environment.tests.clear()
    return environment


def check_template(text: str, param: str) -> None:
    """Refuse a text that cannot be rendered.

    Raises:
        InvalidSpecError: wrong syntax, an unknown variable or filter, or more than names, filters and calls.
    """
    if len(text) > MAX_TEXT:
        raise InvalidSpecError(f"{param} is longer than {MAX_TEXT} characters", param=param)
    try:
        tree = _environment().parse(text)
        _check_nodes(tree, text, param)
        # only now: compiling works out constant expressions, of whatever size
        _environment().compile(tree)
    except jinja2.TemplateError as error:
        raise InvalidSpecError(f"{param} {text!r}: {error.message}", param=param) from None


def _check_nodes(tree: nodes.Template, text: str, param: str) -> None:
    for node in tree.find_all(nodes.Node):
        if not isinstance(node, _ALLOWED):
            raise InvalidSpecError(
                f"{param} {text!r} may have variables, filters and calls only, such as {{{{ logical_date | days(-1) }}}}",
                param=param,
            )
        if isinstance(node, nodes.Getattr) and node.attr not in _ATTRIBUTES:
            raise InvalidSpecError(
                f"{param} {text!r}: a date has no {node.attr!r}; it has {', '.join(sorted(_ATTRIBUTES))}", param=param
            )
    if unknown := sorted(meta.find_undeclared_variables(tree) - set(VARIABLES)):
        raise InvalidSpecError(
            f"{param} {text!r} uses {', '.join(unknown)}; there are {', '.join(VARIABLES)}", param=param
        )


def variables(calendar: Calendar, logical_date: datetime, *, run_id: str, schedule: str) -> dict[str, Any]:
    """What the templates of one run may use."""
    return {
        "logical_date": LogicalDate(calendar.local(logical_date)),
        "previous_logical_date": LogicalDate(calendar.local(calendar.before(logical_date))),
        "next_logical_date": LogicalDate(calendar.local(calendar.after(logical_date))),
        "run_id": run_id,
        "schedule": schedule,
    }


def render(text: str, values: Mapping[str, Any], param: str) -> str:
    """Fill in the variables.

    Raises:
        InvalidSpecError: it cannot be rendered.
    """
    if "{" not in text:
        return text
    check_template(text, param)
    try:
        return _environment().from_string(text).render(values)
    except Exception as error:  # noqa: BLE001 -- whatever a template raises, it is the template that is wrong
        raise InvalidSpecError(f"{param} {text!r}: {type(error).__name__}: {error}", param=param) from None
