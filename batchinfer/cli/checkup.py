"""The checks of ``doctor``. Each looks at one thing and never raises."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.cli.console import count, size
from batchinfer.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine

    from batchinfer.settings import Settings

CONNECT_SECONDS = 3
MIN_FREE_BYTES = 5 * 2**30
WORKER_SILENCE = timedelta(minutes=2)
_CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


class CheckStatus(StrEnum):
    """What a check found."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; ``mend`` says what to do about it."""

    name: str
    status: CheckStatus
    detail: str
    mend: str | None = None


def _ok(name: str, detail: str) -> Check:
    return Check(name, CheckStatus.OK, detail)


def _warn(name: str, detail: str, mend: str) -> Check:
    return Check(name, CheckStatus.WARNING, detail, mend)


def _fail(name: str, detail: str, mend: str) -> Check:
    return Check(name, CheckStatus.FAILED, detail, mend)


def run_checks(storage: str | None = None) -> list[Check]:
    """Run all checks, the cheap ones first."""
    from batchinfer.settings import Settings

    try:
        settings = Settings.load()
    except UserError as error:
        return [_fail("settings", str(error), "correct or unset the variable"), check_python()]
    checks: list[Callable[[], Check]] = [
        check_python,
        lambda: check_price(settings),
        lambda: check_folder(settings.home),
        lambda: check_broker(settings.broker_url),
        check_cpu,
        check_memory,
        check_compiler,
        check_torch,
        check_gpu,
        check_transformers,
        lambda: check_engine(settings.engine_factory),
        lambda: check_model_cache(settings),
    ]
    if storage is not None:
        checks.append(lambda: check_storage(storage))
    return [*_check_database(settings), *(check() for check in checks)]


def _check_database(settings: Settings) -> list[Check]:
    from sqlalchemy.exc import SQLAlchemyError

    from batchinfer.db import migrate
    from batchinfer.db.session import create_db_engine

    try:
        engine = create_db_engine(settings.sqlalchemy_url)
    except (UserError, OSError) as error:
        return [_fail("database", str(error), "correct BATCHINFER_DATABASE_URL")]
    shown = engine.url.render_as_string(hide_password=True)
    try:
        found, needed = migrate.current(engine), migrate.head()
        checks = [_ok("database", shown), _migrations(engine, found, needed)]
        if found == needed:
            checks.append(_workers(engine, is_embedded=settings.is_embedded))
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        return [_fail("database", f"{shown}: {reason}", "start it, or correct BATCHINFER_DATABASE_URL")]
    finally:
        engine.dispose()
    return checks


def _migrations(engine: Engine, found: str | None, needed: str) -> Check:
    if found == needed:
        return _ok("migrations", f"at revision {needed}")
    if engine.dialect.name == "sqlite":
        return _ok("migrations", f"at revision {found or 'none'}; upgraded to {needed} at the first use")
    return _fail("migrations", f"at revision {found or 'none'}, this program needs {needed}", "batchinfer db upgrade")


def _workers(engine: Engine, *, is_embedded: bool) -> Check:
    from batchinfer.jobs.queries import workers_seen_since

    alive = workers_seen_since(engine, datetime.now(UTC) - WORKER_SILENCE)
    if alive or is_embedded:
        return _ok("workers", f"{alive} alive")
    return _warn("workers", "none alive: submitted jobs wait", "batchinfer worker")


def check_python() -> Check:
    """Python's version."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return _ok("python", text)


def check_price(settings: Settings) -> Check:
    """Whether somebody has said what an hour costs."""
    text = f"${settings.usd_per_hour}/h"
    if "usd_per_hour" in settings.model_fields_set:
        return _ok("price", text)
    return _warn("price", f"{text} is an assumption", "set BATCHINFER_USD_PER_HOUR to what this machine costs")


def check_folder(home: Path) -> Check:
    """Whether the home folder takes files."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=home) as file:
            file.write(b"batchinfer")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return _fail("home", f"{home}: {error.strerror}", "make it writable, or set BATCHINFER_HOME to another folder")
    free = shutil.disk_usage(home).free
    if free < MIN_FREE_BYTES:
        return _warn("home", f"{home}: only {size(free)} free", "free some disk, or move BATCHINFER_HOME")
    return _ok("home", f"{home}, {size(free)} free")


def check_broker(url: str) -> Check:
    """Whether the broker answers."""
    if url.startswith("memory://"):
        return _ok("broker", "inside the worker's process (memory://)")
    from kombu import Connection
    from kombu.utils.url import sanitize_url

    shown = str(sanitize_url(url))
    options = {"socket_connect_timeout": CONNECT_SECONDS, "socket_timeout": CONNECT_SECONDS}
    try:
        with Connection(url, connect_timeout=CONNECT_SECONDS, transport_options=options) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=CONNECT_SECONDS)
    except Exception as error:
        return _fail(
            "broker", f"{shown}: {error}", "start it, or correct BATCHINFER_BROKER_URL; jobs are safe meanwhile"
        )
    return _ok("broker", shown)


def check_cpu() -> Check:
    """Cores this process may use, and the vector instructions that the kernels care about."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    features = [name for name in _CPU_FEATURES if name in flags]
    return _ok("cpu", f"{cores} cores" + (f", {' '.join(features)}" if features else ""))


def check_memory() -> Check:
    """Memory of the machine."""
    import psutil

    memory = psutil.virtual_memory()
    return _ok("memory", f"{size(memory.available)} of {size(memory.total)} available")


def check_compiler() -> Check:
    """A C++ compiler builds the CPU kernels and Triton's launchers."""
    found = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    if found is None:
        return _warn(
            "compiler", "no C++ compiler", "install g++ (apt-get install g++) for the fast CPU kernels and Triton"
        )
    return _ok("compiler", found)


def check_torch() -> Check:
    """Whether torch loads, and is the release that the engine is proved with."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return _fail("torch", str(error), "reinstall it: pip install --force-reinstall torch")
    pinned = next((text for text in metadata.requires("batchinfer") or [] if text.startswith("torch==")), "")
    wanted = pinned.removeprefix("torch==")
    text = f"{torch.__version__}, {count(torch.get_num_threads())} threads"
    if wanted and torch.__version__.partition("+")[0] != wanted:
        return _warn("torch", text, f"tested with {wanted}: pip install torch=={wanted}")
    return _ok("torch", text)


def check_gpu() -> Check:
    """GPUs that torch sees; a driver without them is a mistake, a machine without a GPU is not."""
    try:
        import torch

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return _warn("gpu", str(error).splitlines()[0], "check the driver with nvidia-smi")
    if names:
        return _ok("gpu", ", ".join(names))
    if shutil.which("nvidia-smi"):
        return _warn("gpu", "nvidia-smi is here but torch sees no GPU", "install torch's CUDA build")
    return _ok("gpu", "none: the engine runs on the CPU")


def check_transformers() -> Check:
    """Whether transformers is installed; loading it takes seconds and tells no more."""
    try:
        return _ok("transformers", metadata.version("transformers"))
    except metadata.PackageNotFoundError:
        return _fail("transformers", "not installed", "pip install batchinfer")


def check_engine(factory: str) -> Check:
    """Whether the engine's module exists."""
    module = factory.partition(":")[0]
    try:
        found = find_spec(module) is not None
    except ImportError:
        found = False
    if not found:
        return _fail("engine", f"no module {module}", "correct or unset BATCHINFER_ENGINE_FACTORY")
    return _ok("engine", factory)


def check_model_cache(settings: Settings) -> Check:
    """Where hub models are kept, and the room there."""
    default = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    cache = Path(os.environ.get("HF_HUB_CACHE", default)).expanduser()
    models = sum(1 for _ in cache.glob("models--*")) if cache.is_dir() else 0
    place = next(folder for folder in (cache, *cache.parents, settings.home) if folder.exists())
    free = shutil.disk_usage(place).free
    text = f"{cache}: {count(models)} hub models, {size(free)} free"
    if free < MIN_FREE_BYTES:
        return _warn("model cache", text, "free some disk, or set HF_HOME to a larger one")
    return _ok("model cache", text)


def check_storage(uri: str) -> Check:
    """Whether a file can be written, read back and deleted under ``uri``."""
    from batchinfer.dataset.filesystem import Location

    try:
        folder = Location.parse(uri)
        folder.make_folder()
        probe = folder.child(f".batchinfer-doctor-{uuid.uuid4().hex}")
        with probe.filesystem.open_output_stream(probe.path) as stream:
            stream.write(b"batchinfer")
        is_same = probe.read_bytes() == b"batchinfer"
        probe.delete()
    except (OSError, UserError) as error:
        return _fail("storage", f"{uri}: {error}", "check the path and its permissions, or AWS_* for s3://")
    if not is_same:
        return _fail("storage", f"{uri}: what was read is not what was written", "do not use this storage")
    return _ok("storage", f"{uri} takes files")
