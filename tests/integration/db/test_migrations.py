"""Migrations: up, down, equal to the models, and safe when many start at once."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect

from batchinfer.db.migrate import _config, current, downgrade, head, migrations_folder, upgrade
from batchinfer.db.session import create_db_engine
from batchinfer.db.tables import Base


@pytest.fixture
def empty(empty_database_url):
    engine = create_db_engine(empty_database_url)
    yield engine
    engine.dispose()


def tables(engine):
    return set(inspect(engine).get_table_names()) - {"alembic_version"}


def schema(engine):
    """All columns, indexes and constraints, as the database tells them."""
    inspector = inspect(engine)
    return {
        table: (
            sorted((c["name"], str(c["type"]), c["nullable"]) for c in inspector.get_columns(table)),
            sorted((i["name"], tuple(i["column_names"]), bool(i["unique"])) for i in inspector.get_indexes(table)),
            sorted(str(c["name"]) for c in inspector.get_check_constraints(table)),
            sorted(str(c["name"]) for c in inspector.get_foreign_keys(table)),
        )
        for table in tables(engine)
    }


def test_upgrade_makes_what_the_models_say(empty):
    """Compared twice: by Alembic, and by creating the models' tables in the place of the migrations'."""
    assert current(empty) is None
    upgrade(empty)
    assert current(empty) == head()
    with empty.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    migrated = schema(empty)
    downgrade(empty, "base")
    Base.metadata.create_all(empty)
    assert schema(empty) == migrated


def test_partial_indexes_keep_their_conditions(empty):
    """A comparison of names would not notice an index that lost its WHERE."""
    upgrade(empty)
    expected = {
        index.name: str(index.dialect_options["sqlite"]["where"])
        for table in Base.metadata.sorted_tables
        for index in table.indexes
        if index.dialect_options["sqlite"]["where"] is not None
    }
    assert len(expected) >= 6
    found = {}
    for table in tables(empty):
        for index in inspect(empty).get_indexes(table):
            where = index["dialect_options"].get(f"{empty.dialect.name}_where")
            if where is not None:
                found[index["name"]] = str(where)
    assert set(found) == set(expected)
    if empty.dialect.name == "sqlite":
        assert found == expected


def test_every_step_goes_down_and_up_again(empty):
    revisions = [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()]
    upgrade(empty)
    before = schema(empty)
    for _ in revisions:
        downgrade(empty, "-1")
    assert current(empty) is None
    assert tables(empty) == set()
    for revision in reversed(revisions):
        upgrade(empty, revision)
    assert schema(empty) == before


def test_upgrading_again_changes_nothing(empty):
    upgrade(empty)
    before = schema(empty)
    upgrade(empty)
    assert schema(empty) == before


def test_many_threads_may_upgrade_at_once(empty):
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: upgrade(empty), range(6)))
    assert current(empty) == head()


def test_many_processes_may_upgrade_at_once(empty):
    """Two shells start `batchinfer` on a new home in the same moment."""
    url = empty.url.render_as_string(hide_password=False)
    program = (
        "import sys\n"
        "from batchinfer.db.migrate import upgrade, current\n"
        "from batchinfer.db.session import create_db_engine\n"
        "engine = create_db_engine(sys.argv[1])\n"
        "upgrade(engine)\n"
        "print(current(engine))\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program, url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    results = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0] * 4, results
    assert {out.strip() for out, _ in results} == {head()}
    assert tables(empty) == {table.name for table in Base.metadata.sorted_tables}


def test_a_failed_upgrade_leaves_the_database_as_it_was(empty):
    """A migration is one transaction: no half schema, even on SQLite."""
    with empty.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE workers (id int)")
    with pytest.raises(Exception, match="workers"):
        upgrade(empty)
    assert current(empty) is None
    assert tables(empty) == {"workers"}


def test_the_migrations_are_found_in_a_checkout():
    assert (migrations_folder() / "env.py").is_file()
