"""Usage by day, prices of devices, budgets, forecasts. What was spent before is counted, too."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

AMOUNTS = (
    "num_rows", "prompt_tokens", "cached_tokens", "completion_tokens",
    "metered_nanos", "overhead_nanos", "list_nanos", "saved_nanos", "device_ns",
)  # fmt: skip
MOMENT = sa.DateTime().with_variant(sa.DateTime(timezone=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "usage_days",
        sa.Column("dimension", sa.String(4), nullable=False),
        sa.Column("day", sa.String(10), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in AMOUNTS),
        sa.PrimaryKeyConstraint("dimension", "day", "tenant_id", "key", "model", name="pk_usage_days"),
    )
    op.create_index("ix_usage_days_key", "usage_days", ["dimension", "key", "day"])
    op.create_index("ix_usage_days_tenant_id", "usage_days", ["dimension", "tenant_id", "key", "day"])
    op.create_table(
        "device_prices",
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("valid_from", MOMENT, nullable=False),
        sa.Column("nanos_per_hour", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("device", "valid_from", name="pk_device_prices"),
    )
    op.create_table(
        "budgets",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("limit_nanos", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "month", name="pk_budgets"),
    )
    op.create_table(
        "forecasts",
        sa.Column("job_id", sa.String(30), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("scope", sa.String(64), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("predicted", sa.JSON(), nullable=False),
        sa.Column("outcome", sa.JSON(), nullable=True),
        sa.Column("finished_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("job_id", name="pk_forecasts"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_forecasts_job_id"),
    )
    op.create_index("ix_forecasts_scope", "forecasts", ["tenant_id", "scope", "finished_at"])
    op.create_index("ix_forecasts_model", "forecasts", ["tenant_id", "model", "finished_at"])
    _count_the_past()


def _count_the_past() -> None:
    connection = op.get_bind()
    is_sqlite = connection.dialect.name == "sqlite"
    day = "substr(e.created_at, 1, 10)" if is_sqlite else "to_char(e.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
    part = "CASE WHEN e.kind = 'rows' THEN CAST(substr(e.source_id, 6) AS BIGINT) END"
    from_part = ("num_rows", "prompt_tokens", "cached_tokens", "completion_tokens", "saved_nanos")
    sums = {name: f"coalesce(sum(p.{name}), 0)" for name in from_part} | {
        "metered_nanos": "coalesce(sum(CASE WHEN e.kind = 'rows' THEN e.nanos END), 0)",
        "overhead_nanos": "coalesce(sum(CASE WHEN e.kind <> 'rows' THEN e.nanos END), 0)",
        "list_nanos": "sum(e.list_nanos)",
        "device_ns": "sum(e.device_ns)",
    }
    for dimension, key, entries in (("all", "CAST('' AS TEXT)", "TRUE"), ("job", "e.job_id", "e.job_id IS NOT NULL")):
        tenant, model = "coalesce(j.tenant_id, '')", "coalesce(j.model, '')"
        connection.execute(
            sa.text(
                f"INSERT INTO usage_days (dimension, day, tenant_id, key, model, {', '.join(AMOUNTS)})"  # noqa: S608 -- our words alone
                f" SELECT '{dimension}', {day}, {tenant}, {key}, {model}, {', '.join(sums[name] for name in AMOUNTS)}"
                f" FROM ledger_entries e LEFT JOIN jobs j ON j.id = e.job_id LEFT JOIN parts p ON p.id = {part}"
                f" WHERE {entries} GROUP BY {day}, {tenant}, {key}, {model}"
            )
        )
    add = sa.text(
        f"INSERT INTO usage_days (dimension, day, tenant_id, key, model, {', '.join(AMOUNTS)})"  # noqa: S608 -- our words alone
        f" SELECT 'tag', day, tenant_id, CAST(:tag AS TEXT), model, {', '.join(AMOUNTS)} FROM usage_days"
        " WHERE dimension = 'job' AND key = :job ON CONFLICT (dimension, day, tenant_id, key, model) DO UPDATE SET "
        + ", ".join(f"{name} = usage_days.{name} + excluded.{name}" for name in AMOUNTS)
    )
    after = ""
    query = sa.text("SELECT id, tags FROM jobs WHERE id > :after ORDER BY id LIMIT 1000")
    while found := connection.execute(query, {"after": after}).all():
        for job, tags in found:
            known = json.loads(tags) if isinstance(tags, str) else tags
            for tag in sorted(f"{name}={value}" for name, value in known.items()):
                plain = tag.replace("\0", "\ufffd").encode(errors="replace").decode()
                connection.execute(add, {"tag": plain, "job": job})
        after = found[-1][0]


def downgrade() -> None:
    for table in ("forecasts", "budgets", "device_prices", "usage_days"):
        op.drop_table(table)
