"""Pinned models: jobs that name one get exactly that commit, today and next year."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, insert, select

from batchinfer.db.tables import ModelPinRow
from batchinfer.errors import InvalidSpecError, NotFoundError
from batchinfer.jobs.ledger_base import LedgerBase

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection, Row

    from batchinfer.jobs.spec import JobSpec

_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)
_REPO = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class ModelPin:
    """What a name stands for."""

    name: str
    repo: str
    revision: str
    """A commit: 40 hexadecimal digits."""
    created_at: datetime

    @property
    def model(self) -> str:
        """As jobs have it once they are submitted: ``owner/name@commit``."""
        return f"{self.repo}@{self.revision}"


class ModelPins(LedgerBase):
    """The pins of a database; they hold for all of its tenants."""

    def set(self, name: str, repo: str, revision: str) -> ModelPin:
        """Pin a name, or pin it anew; jobs that were submitted keep what they got. Raises InvalidSpecError."""
        if not _NAME.fullmatch(name):
            raise InvalidSpecError(f"{name[:100]!r} is no name for a model, such as small or org/small", param="name")
        if not _REPO.fullmatch(repo):
            raise InvalidSpecError(f"{repo[:100]!r} is no hub id, such as org/small", param="model")
        if not _COMMIT.fullmatch(revision):
            raise InvalidSpecError(f"{revision[:100]!r} is no commit of 40 hexadecimal digits", param="revision")

        def work(connection: Connection, now: datetime) -> ModelPin:
            connection.execute(delete(ModelPinRow).where(ModelPinRow.name == name))
            connection.execute(insert(ModelPinRow).values(name=name, repo=repo, revision=revision, created_at=now))
            return ModelPin(name, repo, revision, now)

        return self._write(work)

    def list(self) -> list[ModelPin]:
        """All of them, by name."""
        query = select(ModelPinRow).order_by(ModelPinRow.name)
        return self._read(lambda connection, _now: [_pin(row) for row in connection.execute(query)])

    def remove(self, name: str) -> ModelPin:
        """Let a name stand for itself again. Raises NotFoundError."""

        def work(connection: Connection, _now: datetime) -> ModelPin:
            row = connection.execute(select(ModelPinRow).where(ModelPinRow.name == name)).one_or_none()
            if row is None:
                raise NotFoundError(f"no model is pinned as {name[:100]!r}; `batchinfer models ls` lists pins")
            connection.execute(delete(ModelPinRow).where(ModelPinRow.name == name))
            return _pin(row)

        return self._write(work)

    def resolve(self, spec: JobSpec) -> JobSpec:
        """The spec with what its model is pinned to; as it was where that name is not pinned."""
        if not _NAME.fullmatch(spec.model):
            return spec
        query = select(ModelPinRow).where(ModelPinRow.name == spec.model)
        row = self._read(lambda connection, _now: connection.execute(query).one_or_none())
        return spec if row is None else spec.model_copy(update={"model": _pin(row).model})


def _pin(row: Row[Any]) -> ModelPin:
    return ModelPin(row.name, row.repo, row.revision, row.created_at)
