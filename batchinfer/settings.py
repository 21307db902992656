"""Settings of a process, from ``BATCHINFER_*`` environment variables. Only the entry points read them."""

from __future__ import annotations

import os
import re
from decimal import Decimal
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from batchinfer.errors import UserError
from batchinfer.money import usd_to_nanos

ENV_PREFIX = "BATCHINFER_"
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
LogLevel = Literal["debug", "info", "warning", "error"]


class Settings(BaseSettings):
    """What differs between machines. What differs between jobs is in the job's spec, stored with the job.

    Use :meth:`load`, which turns a bad value into one sentence that names its variable.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )

    home: Path = Path("~/.batchinfer")
    """Folder of the embedded database and of fetched models."""
    database_url: str = ""
    """SQLAlchemy URL; empty is SQLite in ``home``."""
    broker_url: str = "memory://"
    """Celery broker; ``memory://`` needs no server: the worker finds work in the database."""
    visibility_seconds: Seconds = 6 * 3600
    """A message that was not acknowledged for this long is delivered again; leases make that harmless."""
    log_level: LogLevel = "info"
    """Least severe message that is logged."""
    log_format: Literal["text", "json"] = "text"
    """``json`` writes an object a line, with the ids of request, job, shard and attempt."""
    otlp_endpoint: Annotated[str, Field(pattern=r"^(https?://.+)?$")] = Field(
        default_factory=lambda: os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    )
    """Base URL of an OpenTelemetry collector, such as ``http://localhost:4318``, that gets traces; by default
    ``OTEL_EXPORTER_OTLP_ENDPOINT``, else there are none."""
    host: str = "127.0.0.1"
    """Address that ``batchinfer serve`` listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port that ``batchinfer serve`` listens on."""

    rate_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Most requests a minute of an API key that has no rate of its own; None is no limit."""

    metrics_host: str = "127.0.0.1"
    """Address on which a worker answers Prometheus."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the same, one for each worker of a machine; 0: it does not. The API has ``/metrics`` on its own port."""

    input_roots: Annotated[tuple[str, ...], NoDecode] = ()
    """Folders or URIs, with commas between them, below which inputs must lie of tenants that have no roots of their own;
    with none, only the default tenant reads, and only without a key."""
    output_roots: Annotated[tuple[str, ...], NoDecode] = ()
    """The same for outputs."""
    model_roots: Annotated[tuple[str, ...], NoDecode] = ()
    """Folders below which models lie that tenants may name by their path, besides their input roots."""
    files_root: str = ""
    """Folder or URI (``s3://bucket/prefix``) of uploaded files and of results of uploaded inputs, which workers must
    reach as well; empty is ``files`` in ``home``."""
    max_file_bytes: Annotated[int, Field(ge=1)] = 5 * 2**30
    """Largest file that may be uploaded."""
    models: dict[str, str] = {}
    """JSON object of model names that OpenAI clients may use, to GGUF files, safetensors folders or hub ids."""

    webhook_networks: Annotated[tuple[str, ...], NoDecode] = ()
    """Networks such as ``10.0.0.0/8``, with commas between them, whose addresses webhooks may reach besides the public
    internet, and with plain ``http``."""

    usd_per_hour: Annotated[Decimal, Field(ge=0, le=1_000_000)] = Decimal("0.10")
    """What an hour of this worker's device costs. The default is an assumption: set your own."""

    pools: Annotated[tuple[str, ...], NoDecode] = ("default",)
    """Pools that a worker is in, with commas between them: it runs jobs that ask for one of them; ``default`` are jobs
    that ask for none."""
    device_kinds: Annotated[tuple[str, ...], NoDecode] = ()
    """Names of the worker's hardware that jobs may ask for, with commas between them, such as ``h200``; the kind of
    ``device`` is one by itself."""

    engine_factory: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] = "batchinfer.engine.engine:create_engine"
    """``module:callable`` that makes the engine from its configuration, in the engine's process."""
    reference_factory: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] = "batchinfer.engine.reference:create_engine"
    """``module:callable`` that makes the engine which holds answers against the reference precision."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Most rows in one engine step; None is the engine's default."""
    max_num_batched_tokens: Annotated[int, Field(ge=16)] | None = None
    """Most tokens in one engine step; None is what was measured when a model was first loaded here."""
    calibrate: bool = True
    """Measure, two or three seconds long, when a model is first loaded on a machine; ``false`` takes defaults, and jobs
    do not say what share of the device's limit they reached."""
    num_kv_blocks: Annotated[int, Field(ge=1)] | None = None
    """Blocks of the KV cache; None sizes it to the device's memory."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory for weights, the largest step and the KV cache together; None is the engine's default."""
    enforce_eager: bool | None = None
    """Capture no CUDA graphs; None is the engine's default."""
    enable_prefix_caching: bool | None = None
    """Share the KV cache of equal prefixes; None is the engine's default."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] | None = None
    """Devices of a worker over which a model is divided, a process each; None is 1."""
    device: str | None = None
    """Torch device of the engine, such as ``cpu`` or ``cuda:0``; None takes the best there is."""

    lease_seconds: Seconds = 60
    """A worker that is silent, or makes no progress, for this long loses its shard."""
    heartbeat_seconds: Seconds = 5
    """Time between two renewals of a lease; also how soon a cancel is noticed."""
    stall_seconds: Seconds = 300
    """An engine with work that makes no step for this long is restarted."""
    load_seconds: Seconds = 3600
    """A model that takes longer to load than this fails its attempt."""
    checkpoint_rows: Annotated[int, Field(ge=1)] = 256
    """Finished rows are committed when there are this many of them, ..."""
    checkpoint_seconds: Seconds = 30
    """... or when the oldest of them has waited this long."""
    checkpoint_pause_seconds: Annotated[float, Field(ge=0, le=3600)] = 1
    """Least time between two commits of a shard: a fast engine shall not spend its time on them."""
    shards_in_flight: Annotated[int, Field(ge=1, le=64)] = 2
    """Shards a worker feeds to its engine at once, so that the batch never drains at a shard's end."""
    window_rows: Annotated[int, Field(ge=1)] = 512
    """Most unfinished rows that a shard has handed to the engine."""
    window_bytes: Annotated[int, Field(ge=1)] = 64 * 2**20
    """Most characters of prompts that a shard has handed to the engine."""
    tick_seconds: Seconds = 1
    """Time between two looks at the database for work, expired leases and deadlines."""

    @field_validator("pools", "device_kinds")
    @classmethod
    def _names_fit(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,39}", name):
                raise ValueError(f"{name!r} is not 1 to 40 of a-z, 0-9, '.', '_' and '-', such as h200")
        return value

    @field_validator(
        "input_roots", "output_roots", "model_roots", "webhook_networks", "pools", "device_kinds", mode="before"
    )
    @classmethod
    def _roots_have_commas_between_them(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("webhook_networks")
    @classmethod
    def _networks_are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ip_network(network)
        return value

    @field_validator("home")
    @classmethod
    def _home_may_begin_with_a_tilde(cls, value: Path) -> Path:
        return value.expanduser()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heartbeat_seconds * 2 > self.lease_seconds:
            raise ValueError(
                f"heartbeat_seconds ({self.heartbeat_seconds:g}) must be at most half of lease_seconds "
                f"({self.lease_seconds:g}), or one late heartbeat loses the lease"
            )
        return self

    @classmethod
    def load(cls, **overrides: object) -> Self:
        """Read the environment; ``overrides`` win.

        Raises:
            UserError: a value does not fit; the message names the variable.
        """
        try:
            return cls(**overrides)  # type: ignore[arg-type]  # pydantic checks the values' types
        except ValidationError as error:
            raise UserError(_sentence(error), code="invalid_settings") from None

    @property
    def allowed_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """``webhook_networks``, read."""
        return tuple(ip_network(network) for network in self.webhook_networks)

    @property
    def sqlalchemy_url(self) -> str:
        """The database's URL, with the embedded default filled in."""
        return self.database_url or f"sqlite:///{self.home.absolute() / 'batchinfer.db'}"

    @property
    def files_folder(self) -> str:
        """Where uploaded files go, with the embedded default filled in."""
        return self.files_root or str(self.home.absolute() / "files")

    @property
    def nanos_per_hour(self) -> int:
        """Price of the device in nano-dollars an hour."""
        return usd_to_nanos(self.usd_per_hour)

    @property
    def is_embedded(self) -> bool:
        """Whether messages stay inside one process."""
        return self.broker_url.startswith("memory://")


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    reason = str(first["msg"]).removeprefix("Value error, ")
    if not first["loc"]:
        return f"The settings do not fit together: {reason}."
    name = f"{ENV_PREFIX}{first['loc'][0]}".upper()
    return f"{name}={first['input']} is not valid: {reason}."
