"""Alembic's entry point. It runs on the connection, and inside the transaction, that batchinfer.db.migrate gives it."""

from alembic import context

from batchinfer.db.tables import Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("run migrations with `batchinfer db upgrade`; Alembic's own command knows no database here")
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    compare_type=True,
    render_as_batch=connection.dialect.name == "sqlite",
    transactional_ddl=False,  # the caller's transaction holds all of it
)
context.run_migrations()
