"""``serve``: the REST API."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING

import click

from batchinfer.cli.connect import load_settings, open_service, set_up_logs
from batchinfer.errors import UserError

if TYPE_CHECKING:
    from batchinfer.settings import Settings

DRAIN_SECONDS = 10
"""How long a stopping server waits for running requests."""


@click.command("serve")
@click.option("--host", help="Address to listen on (default: BATCHINFER_HOST or 127.0.0.1).")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port (default: BATCHINFER_PORT or 8000; 0 takes a free one)."
)
@click.option("--insecure", is_flag=True, help="Allow other machines in, without any key.")
def serve_command(host: str | None, port: int | None, insecure: bool) -> None:
    """Serve the REST API.

    There are no keys yet: whoever reaches the port may do everything. Hence only the loopback address is allowed
    unless --insecure says that something else keeps strangers out.
    """
    settings = load_settings(host=host, port=port)
    set_up_logs(settings.log_level)
    check_host(settings.host, is_insecure=insecure)
    with bind(settings.host, settings.port) as listener:
        _serve(settings, listener, only_loopback=not insecure)


def check_host(host: str, *, is_insecure: bool) -> None:
    """Refuse an address that other machines reach. Raises UserError."""
    from batchinfer.api.middleware import is_loopback

    if not is_insecure and not is_loopback(host):
        raise UserError(
            f"--host {host} lets other machines in and there are no keys; keep 127.0.0.1, or add --insecure "
            "if a proxy or firewall keeps strangers out",
            param="host",
        )


def bind(host: str, port: int) -> socket.socket:
    """Listen. Raises UserError if the address is taken or not ours."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family, backlog=2048)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port", param="port"
        ) from None


def _serve(settings: Settings, listener: socket.socket, *, only_loopback: bool) -> None:
    import uvicorn

    from batchinfer.api.app import create_app

    address = settings.host if ":" not in settings.host else f"[{settings.host}]"
    url = f"http://{address}:{listener.getsockname()[1]}"
    with open_service(settings) as service:
        click.echo(f"batchinfer serves {url}/v1/jobs, documentation at {url}/docs; Ctrl-C stops it", err=True)
        app = create_app(settings, service=service, only_loopback=only_loopback)
        # log_config None: uvicorn's lines go where ours go, to stderr
        config = uvicorn.Config(
            app, log_config=None, server_header=False, lifespan="on", timeout_graceful_shutdown=DRAIN_SECONDS
        )
        # uvicorn stops in order at a signal, and then raises it again; having stopped in order is success
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        uvicorn.Server(config).run(sockets=[listener])
