"""The wheel has all that an installation needs: sources of the kernels, migrations, type marks; and it runs."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_wheel_has_everything_that_the_checkout_has(installed):
    """Every tracked file of the three packages and of the migrations is in the wheel."""
    tracked = subprocess.run(
        ["git", "ls-files", "batchinfer", "kernels", "workers", "migrations"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert len(tracked) > 150
    for name in tracked:
        place = (
            name.removeprefix("kernels/").removeprefix("workers/").replace("migrations/", "batchinfer/_migrations/", 1)
        )
        assert (installed / place).is_file(), name


def test_wheel_has_no_folder_that_would_shadow_another_package(installed):
    """An import package named `kernels` or `workers` would hide others' of that name."""
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"batchinfer", "batchinfer_kernels", "batchinfer_workers"}


def test_an_installation_upgrades_its_database(installed, tmp_path):
    """Outside of a checkout the migrations are found inside the package."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("BATCHINFER_", "PYTEST_"))
    } | {"PYTHONPATH": str(installed), "BATCHINFER_HOME": str(tmp_path / "home")}
    program = (
        "import batchinfer; print(batchinfer.__file__); from batchinfer.cli.main import main; main(['db', 'upgrade'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(installed) in done.stdout
    assert (tmp_path / "home" / "batchinfer.db").is_file()
