"""OpenTelemetry traces: one a job, from its submission to its manifest.

Until :func:`start` is called nothing of it is imported here, and a span costs a test of one name. While a span
is open, lines of the log have its ``trace_id`` and ``span_id``.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from batchinfer.errors import UserError
from batchinfer.log_context import bound

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

PREFIX = "batchinfer."
"""What the names of a span's attributes begin with."""
_HEADER = "traceparent"
_tracer: Any = None


def start(endpoint: str, service: str) -> None:
    """Send spans to an OTLP collector over HTTP from now on; with no ``endpoint``, or the second time, do nothing.

    ``service`` names this process in the traces, unless ``OTEL_SERVICE_NAME`` does. What is not sent yet goes out when the process ends.

    Raises:
        UserError: ``tracing_not_installed``: the extra is missing.
    """
    if not endpoint or _tracer is not None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 -- only here
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415 -- see above
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 -- see above
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 -- see above
    except ImportError as error:
        raise UserError(
            f"traces are asked for, but {error.name} is not installed: pip install 'batchinfer[otel]', or unset "
            "BATCHINFER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_ENDPOINT",
            code="tracing_not_installed",
        ) from None
    name = os.environ.get("OTEL_SERVICE_NAME") or service
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")))
    use(provider)


def use(provider: Any) -> None:
    """Make spans with an OpenTelemetry tracer provider; with None, make no more of them."""
    global _tracer  # noqa: PLW0603 -- tracing is the process's, like logging
    _tracer = None if provider is None else provider.get_tracer("batchinfer")


def span(name: str, parent: str | None = None, **attributes: str | int | None) -> AbstractContextManager[None]:
    """A span around a block, below ``parent`` (a ``traceparent``), or else below the span that is open.

    An error that leaves the block is recorded. Attributes that are None are left out.
    """
    return nullcontext() if _tracer is None else _span(name, parent, attributes)


def note(**attributes: str | int) -> None:
    """Add attributes to the span that is open."""
    if _tracer is not None:
        _current().set_attributes({PREFIX + key: value for key, value in attributes.items()})


def note_error(error: BaseException) -> None:
    """Say of the span that is open that it failed, where the error does not leave its block."""
    if _tracer is not None:
        from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 -- only with tracing

        _current().record_exception(error)
        _current().set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))


def traceparent() -> str | None:
    """The span that is open as a W3C ``traceparent``, to go on from elsewhere; None without one."""
    if _tracer is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415 -- see above

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(_HEADER)


def below(parent: str | None) -> AbstractContextManager[None]:
    """Spans of the block belong below ``parent``, a caller's ``traceparent``; one that is malformed counts for nothing."""
    return nullcontext() if _tracer is None or not parent else _below(parent)


def _current() -> Any:
    from opentelemetry.trace import get_current_span  # noqa: PLC0415 -- only with tracing

    return get_current_span()


@contextmanager
def _below(parent: str) -> Iterator[None]:
    from opentelemetry import context  # noqa: PLC0415 -- only with tracing
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415 -- see above

    token = context.attach(TraceContextTextMapPropagator().extract({_HEADER: parent}))
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def _span(name: str, parent: str | None, attributes: dict[str, str | int | None]) -> Iterator[None]:
    given = {PREFIX + key: value for key, value in attributes.items() if value is not None}
    with below(parent), _tracer.start_as_current_span(name, attributes=given) as opened:
        ids = opened.get_span_context()
        with bound(trace_id=f"{ids.trace_id:032x}", span_id=f"{ids.span_id:016x}"):
            yield
