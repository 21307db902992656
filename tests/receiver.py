"""A webhook's receiver on this machine: a real HTTP server that keeps what it gets and answers as it is told."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class Receiver:
    """Keeps ``(headers, body)`` of each request; answers with the next of ``statuses``, then 204."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], str]] = []
        self.statuses: list[int] = []
        self.headers: dict[str, str] = {}
        self._changed = threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                with outer._changed:
                    outer.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                    status = outer.statuses.pop(0) if outer.statuses else 204
                    outer._changed.notify_all()
                self.send_response(status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                """Tests read what came, not a log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/hook?token=mine"

    def wait_for(self, number: int) -> None:
        """Wait until so many requests have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.got) >= number, 60), self.got

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
