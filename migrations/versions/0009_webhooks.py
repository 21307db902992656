"""Webhooks, their messages and deliveries."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

PENDING = sa.text("state = 'pending'")


def moment() -> sa.types.TypeEngine:
    return sa.DateTime().with_variant(sa.DateTime(timezone=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(30), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("events", sa.JSON(), nullable=False),
        sa.Column("failures", sa.BigInteger(), nullable=False),
        sa.Column("failing_since", moment(), nullable=True),
        sa.Column("open_until", moment(), nullable=True),
        sa.Column("disabled_at", moment(), nullable=True),
        sa.Column("disabled_reason", sa.Text(), nullable=True),
        sa.Column("created_at", moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    op.create_index("ix_webhooks_tenant_id", "webhooks", ["tenant_id", "id"])
    op.create_table(
        "webhook_messages",
        sa.Column("id", sa.String(30), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("event", sa.String(40), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_messages"),
    )
    op.create_index("ix_webhook_messages_created_at", "webhook_messages", ["created_at"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(30), nullable=False),
        sa.Column("webhook_id", sa.String(30), nullable=False),
        sa.Column("message_id", sa.String(30), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("num_attempts", sa.BigInteger(), nullable=False),
        sa.Column("next_at", moment(), nullable=True),
        sa.Column("last_at", moment(), nullable=True),
        sa.Column("last_status", sa.BigInteger(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("created_at", moment(), nullable=False),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name="fk_webhook_deliveries_webhook_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["message_id"], ["webhook_messages.id"], name="fk_webhook_deliveries_message_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_deliveries"),
    )
    op.create_index(
        "ix_webhook_deliveries_next_at", "webhook_deliveries", ["next_at"],
        sqlite_where=PENDING, postgresql_where=PENDING,
    )  # fmt: skip
    op.create_index("ix_webhook_deliveries_webhook_id", "webhook_deliveries", ["webhook_id", "id"])
    op.create_index("ix_webhook_deliveries_message_id", "webhook_deliveries", ["message_id"])


def downgrade() -> None:
    op.drop_table("webhook_deliveries")
    op.drop_table("webhook_messages")
    op.drop_table("webhooks")
