"""What a replay is held against, how far cut-off rows had come, and how far answers drift from the reference."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("model_revision", sa.String(64), nullable=True))
    op.add_column("jobs", sa.Column("drift", sa.JSON(), nullable=True))
    op.add_column("attempts", sa.Column("progress_path", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("attempts", "progress_path")
    op.drop_column("jobs", "drift")
    op.drop_column("jobs", "model_revision")
