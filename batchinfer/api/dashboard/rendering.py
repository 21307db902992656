"""Templates become pages, and errors become pages as well."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined

from batchinfer import __version__
from batchinfer.api.dashboard import charts, words
from batchinfer.api.errors import status_of
from batchinfer.errors import InvalidSpecError, NotFoundError, UserError
from batchinfer.jobs.caller import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fastapi import Request, Response

    from batchinfer.jobs.caller import Caller

PAGE_HEADERS = {
    # nothing of another host, nothing inline: what a job's name or output holds can never run
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    # with no-referrer, which is the rest's, browsers send forms with the origin `null`, and access.py refuses that
    "Referrer-Policy": "same-origin",
}
TABS = (("/", "Jobs"), ("/schedules", "Schedules"), ("/usage", "Usage"), ("/workers", "Workers"))


@cache
def environment() -> Environment:
    """The templates, with everything escaped that is not markup of ours."""
    made = Environment(
        loader=PackageLoader("batchinfer.api.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in (
        "usd",
        "nanos",
        "count",
        "percent",
        "duration",
        "moment",
        "tone",
        "words",
        "short",
        "ago",
        "figure",
        "figure_name",
    ):
        made.filters[name] = getattr(words, name)
    made.globals.update(charts=charts, money=words.nanos_of, version=__version__)
    return made


def render(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """A page. Every template knows the ``caller``, what it ``may_write``, the ``tabs`` and the time ``now``."""
    caller: Caller = request.state.caller
    tabs = [tab for tab in TABS if caller.is_platform or tab[0] != "/workers"]
    text = (
        environment()
        .get_template(template)
        .render(
            caller=caller,
            may_write=caller.role.covers(Role.SUBMITTER),
            tabs=tabs,
            path=request.url.path,
            now=datetime.now(UTC),
            **values,
        )
    )
    # what a job's name holds may have no UTF-8
    return HTMLResponse(text.encode(errors="replace"), status_code=status, headers=PAGE_HEADERS)


class PageRoute(APIRoute):
    """A route whose errors are pages: a person sees a sentence and a way back."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with errors caught."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await inner(request)
            except UserError as error:
                return error_page(request, error)
            except RequestValidationError:
                return error_page(request, InvalidSpecError("an address like this has no page"))

        return handle


def error_page(request: Request, error: UserError) -> HTMLResponse:
    """An error in words."""
    title = "Not found" if isinstance(error, NotFoundError) else "That did not work"
    return render(request, "error.html", status=status_of(error), title=title, message=error.message)
