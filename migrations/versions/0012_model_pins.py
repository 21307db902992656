"""Names of models that stand for one commit of a hub model."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "model_pins",
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("repo", sa.String(200), nullable=False),
        sa.Column("revision", sa.String(40), nullable=False),
        sa.Column("created_at", sa.DateTime().with_variant(sa.DateTime(timezone=True), "postgresql"), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_model_pins"),
    )


def downgrade() -> None:
    op.drop_table("model_pins")
