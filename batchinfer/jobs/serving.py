"""What a worker says it serves, and why a job waits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from batchinfer.jobs.needs import DEFAULT_POOL, needs_of, offers_of

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Serves:
    """Models (None: any), pools and kinds of hardware of a worker. ``job_id``: it is there for this job alone."""

    models: tuple[str, ...] | None = None
    pools: tuple[str, ...] = (DEFAULT_POOL,)
    device_kinds: tuple[str, ...] = ()
    job_id: str | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """All needs that it can serve, see :mod:`~batchinfer.jobs.needs`."""
        return offers_of(self.pools, self.device_kinds)

    @property
    def home(self) -> str:
        """The plainest of them."""
        return needs_of(self.pools[0] if self.pools else None, None)

    def can_serve(self, model: str, needs: str) -> bool:
        """Whether it may run shards of this model with these needs."""
        return self.job_id is None and (self.models is None or model in self.models) and needs in self.needs

    def to_json(self) -> dict[str, Any]:
        """For the database."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Self:
        """From the database; a worker of an older version serves what it did then: anything."""
        if not data:
            return cls()
        models = data.get("models")
        return cls(
            models=None if models is None else tuple(models),
            pools=tuple(data.get("pools") or (DEFAULT_POOL,)),
            device_kinds=tuple(data.get("device_kinds") or ()),
            job_id=data.get("job_id"),
        )
