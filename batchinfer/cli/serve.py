"""``serve``: the REST API."""

from __future__ import annotations

import gc
import signal
import socket
from typing import TYPE_CHECKING

import click

from batchinfer import tracing
from batchinfer.cli.connect import load_settings, log_format_option, open_service, set_up_logs
from batchinfer.cli.request_log import requests_logged_together
from batchinfer.errors import UserError

if TYPE_CHECKING:
    from batchinfer.api.access import Access
    from batchinfer.jobs.service import JobService
    from batchinfer.settings import Settings

DRAIN_SECONDS = 10
"""How long a stopping server waits for running requests."""


@click.command("serve")
@click.option("--host", help="Address to listen on (default: BATCHINFER_HOST or 127.0.0.1).")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port (default: BATCHINFER_PORT or 8000; 0 takes a free one)."
)
@click.option("--insecure", is_flag=True, help="Let everybody in who reaches the port, without any key.")
@log_format_option
def serve_command(host: str | None, port: int | None, insecure: bool, log_format: str | None) -> None:
    """Serve the REST API.

    On the loopback address nobody needs a key until the first one is made (`batchinfer keys create`). Other addresses
    need keys, unless --insecure says that something else keeps strangers out.
    """
    settings = load_settings(host=host, port=port, log_format=log_format)
    set_up_logs(settings.log_level, settings.log_format)
    tracing.start(settings.otlp_endpoint, "batchinfer-api")
    with open_service(settings) as service:
        access = choose_access(service, settings.host, is_insecure=insecure)
        with bind(settings.host, settings.port) as listener:
            _serve(settings, service, listener, access)


def choose_access(service: JobService, host: str, *, is_insecure: bool) -> Access:
    """Who needs a key. Raises UserError for an address that other machines reach while there are no keys."""
    from batchinfer.api.access import Access
    from batchinfer.api.middleware import is_loopback

    if is_insecure:
        return Access.INSECURE
    if is_loopback(host):
        return Access.LOOPBACK
    if not service.keys.exist():
        raise UserError(
            f"--host {host} lets other machines in and there are no keys; make one with `batchinfer keys create`, "
            "keep 127.0.0.1, or add --insecure if a proxy or firewall keeps strangers out",
            param="host",
        )
    return Access.KEYS


def bind(host: str, port: int) -> socket.socket:
    """Listen. Raises UserError if the address is taken or not ours."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family, backlog=2048)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port", param="port"
        ) from None


def _serve(settings: Settings, service: JobService, listener: socket.socket, access: Access) -> None:
    import uvicorn

    from batchinfer.api.app import create_app
    from batchinfer.cli.device_speeds import device_speeds

    address = settings.host if ":" not in settings.host else f"[{settings.host}]"
    url = f"http://{address}:{listener.getsockname()[1]}"
    click.echo(f"batchinfer serves {url}/v1/jobs, documentation at {url}/docs; Ctrl-C stops it", err=True)
    app = create_app(settings, service=service, access=access, device_speeds=device_speeds)
    # log_config None: uvicorn's lines go where ours go, to stderr
    config = uvicorn.Config(
        app, log_config=None, server_header=False, lifespan="on", timeout_graceful_shutdown=DRAIN_SECONDS
    )
    # uvicorn stops in order at a signal, and then raises it again; having stopped in order is success
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    # what is there now stays: looking through all of it for garbage holds up requests for a tenth of a second
    gc.freeze()
    with requests_logged_together():
        uvicorn.Server(config).run(sockets=[listener])
