from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import textwrap

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.dataset.filesystem import Location, is_local, open_filesystem
from batchinfer.dataset.staged_file import StagedFile, write_file


def test_a_file_appears_whole_with_its_hash(tmp_path):
    target = tmp_path / "new" / "folder" / "x.bin"
    with StagedFile(Location.parse(str(target))) as staged:
        staged.write(b"half ")
        assert not target.exists()
        staged.write(memoryview(b"whole"))
    assert target.read_bytes() == b"half whole"
    assert staged.sha256 == hashlib.sha256(b"half whole").hexdigest()
    assert staged.num_bytes == 10
    assert [path.name for path in target.parent.iterdir()] == ["x.bin"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "x.bin"
    write_file(Location.parse(str(target)), b"old")
    with pytest.raises(RuntimeError), StagedFile(Location.parse(str(target))) as staged:
        staged.write(b"new")
        raise RuntimeError
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_writer_killed_in_mid_write_leaves_no_half_file_for_any_reader(tmp_path):
    """Kill -9 while row groups are being written; the folder stays a readable data set, and a sweep cleans it."""
    (tmp_path / "out").mkdir()
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "out" / "shard-00000.parquet")
    program = textwrap.dedent(
        """
        import sys
        import pyarrow as pa
        from batchinfer.dataset.filesystem import Location
        from batchinfer.dataset.row_groups import RowGroupWriter
        schema = pa.schema([("n", pa.int64())])
        with RowGroupWriter(Location.parse(sys.argv[1] + "/shard-00001.parquet"), schema) as writer:
            while True:
                writer.write(pa.record_batch([pa.array(range(70_000))], schema=schema))
                print("wrote", flush=True)
        """
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "out")], stdout=subprocess.PIPE)
    for _ in range(3):
        assert child.stdout.readline() == b"wrote\n"
    child.kill()
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(names) == 2  # the temporary file is there, but hidden
    assert names[0].startswith(".shard-00001")
    assert pq.read_table(tmp_path / "out").to_pydict() == {"n": [1, 2]}

    from batchinfer.dataset.layout import OutputLayout

    assert OutputLayout(str(tmp_path / "out"), "job_1").sweep_garbage() == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["shard-00000.parquet"]


@pytest.mark.parametrize(
    ("uri", "local"),
    [("/a/b", True), ("a/b", True), ("file:///a/b", True), ("s3://bucket/key", False), ("gs://bucket/key", False)],
)
def test_what_is_local_is_known_by_the_scheme(uri, local):
    assert is_local(uri) is local


def test_local_paths_become_absolute_and_home_is_the_users(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert open_filesystem("x.parquet")[1] == str(tmp_path / "x.parquet")
    assert open_filesystem("~/x.parquet")[1] == str(tmp_path / "me" / "x.parquet")
    assert open_filesystem("file:///x.parquet")[1] == "/x.parquet"
