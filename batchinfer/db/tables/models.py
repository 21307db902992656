"""Table of pinned models. No rules live here."""

from datetime import datetime

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from batchinfer.db.tables.base import Base


class ModelPinRow(Base):
    """What a model's name stands for: a hub id at one commit."""

    __tablename__ = "model_pins"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    repo: Mapped[str] = mapped_column(String(200))
    revision: Mapped[str] = mapped_column(String(40))
    created_at: Mapped[datetime]
