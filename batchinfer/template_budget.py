"""What a row's template may cost: a budget of work, and a largest size of each value.

Counting is exact, so that a template which fits on one machine fits on every other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jinja2

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_CHARS = 8 << 20
"""Longest text that a template may make, in one piece or as a whole."""
MAX_ITEMS = 1 << 17
"""Most elements of a list or dict, those inside it included, as often as they appear."""
MAX_WORK = 4_000_000
"""Most work of one row, about a quarter of a microsecond each: some seconds at worst."""
LOOP_UNITS = 2
CALL_UNITS = 8
CHARS_A_UNIT = 64
"""Text costs little to copy; kept text costs :data:`KEPT_CHARS_A_UNIT`."""
KEPT_CHARS_A_UNIT = 8
MAX_INTEGER_BITS = 4096
MAX_JSON_INDENT = 64
MAX_WIDTH = 100_000
"""Largest number that a filter takes, most of which pad by it."""


class TooMuch(jinja2.TemplateRuntimeError):
    """The template does more than a row may cost."""


class Budget(threading.local):
    """Work that the row being rendered on this thread may still do."""

    left = MAX_WORK
    _is_open = False

    @contextmanager
    def of_a_row(self) -> Iterator[None]:
        """All that is rendered inside, by calls inside of calls, is one row's work."""
        if self._is_open:
            yield
            return
        self.left, self._is_open = MAX_WORK, True
        try:
            yield
        finally:
            self._is_open = False

    def charge(self, units: int) -> None:
        """Raises TooMuch once the row has used up its budget."""
        self.left -= units
        if self.left < 0:
            raise TooMuch("the template loops or computes too much for one row")


budget = Budget()


def weigh(value: Any) -> Any:
    """Charge for a value by its size, and return it; endless ones are counted as they go.

    Raises:
        TooMuch: it is too large, or was one too many.
    """
    if isinstance(value, str | bytes):
        check_length(len(value))
        budget.charge(1 + len(value) // CHARS_A_UNIT)
    elif isinstance(value, list | tuple | dict | set | frozenset):
        budget.charge(1 + _num_items(value))
    elif isinstance(value, Iterator):
        return counted(value, 1)
    return value


def check_length(length: int) -> None:
    """Raises TooMuch for a text of so many characters, before it is made."""
    if length > MAX_CHARS:
        raise TooMuch(f"the template makes a text longer than {MAX_CHARS:,} characters")


def _num_items(value: Any) -> int:
    """Elements at any depth, shared ones as often as they appear, for that is how often they are printed."""
    found, chars = 0, 0
    stack: list[Any] = [value]
    while stack:
        top = stack.pop()
        if isinstance(top, dict):
            found += len(top)
            stack += [part for pair in top.items() for part in pair if not isinstance(part, int | float | None)]
        elif isinstance(top, list | tuple | set | frozenset):
            found += len(top)
            stack += [part for part in top if not isinstance(part, int | float | None)]
        elif isinstance(top, str | bytes):
            chars += len(top)
        if found > MAX_ITEMS:
            raise TooMuch(f"the template makes a value of more than {MAX_ITEMS:,} elements")
        check_length(chars)
    return found + chars // CHARS_A_UNIT


def counted(values: Iterable[Any], weight: int) -> Iterator[Any]:
    """The values, each charged for when it is taken."""
    for value in values:
        budget.charge(weight)
        yield value
