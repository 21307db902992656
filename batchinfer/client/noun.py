"""What the groups of the client share: ask, leave out what was not given, read the answer as a view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from batchinfer.jobs.views import View

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchinfer.client.transport import Transport

_V = TypeVar("_V", bound=View)


def given(**fields: Any) -> dict[str, Any]:
    """Those fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


class Noun:
    """A group of verbs on one noun of the API. Errors are those of :mod:`batchinfer.errors`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def _get(self, kind: type[_V], path: str, **params: Any) -> _V:
        return kind.model_validate_json(self._transport.ask("GET", path, params=given(**params)).content)

    def _send(
        self,
        kind: type[_V],
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        again: bool | None = None,
    ) -> _V:
        """``again``: the request may be sent a second time; see :meth:`Transport.ask`."""
        options = {} if body is None else {"json": dict(body)}
        return kind.model_validate_json(self._transport.ask(method, path, is_repeatable=again, **options).content)
