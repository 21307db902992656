"""The help answers at once, and says everything."""

import subprocess
import sys

import click
import pytest

from batchinfer.cli.exit_codes import EXIT_CODES
from batchinfer.cli.main import COMMANDS, cli
from batchinfer.cli.options import flag_of
from batchinfer.cli.reference import PAGES, walk_commands
from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.status import JobState, Outcome
from batchinfer.types import ErrorCode, RowStatus
from tests.program import batchinfer

HEAVY = ("torch", "transformers", "pyarrow", "sqlalchemy", "celery", "fastapi", "rich", "alembic")
FLAGS_OF_RUN_AND_SUBMIT = [
    "--model", "--output", "--prompt-column", "--messages-column", "--template", "--system", "--id-column",
    "--max-tokens", "--temperature", "--top-p", "--top-k", "--seed", "--stop", "--ignore-eos", "--max-model-len",
    "--dtype", "--quantization", "--kv-cache-dtype", "--shard-rows", "--priority", "--deadline", "--budget", "--on-null", "--name", "--tag",
    "--json",
]  # fmt: skip
ALL = list(walk_commands(cli, "batchinfer"))


def command_of(name):
    return cli.get_command(click.Context(cli), name)


@pytest.mark.parametrize("args", [["--help"], [], ["--version"], ["run", "--help"], ["ls", "--help"]])
def test_help_loads_nothing_heavy(args):
    """Half a second is plenty for help, as long as no big library is imported for it."""
    code = (
        "import sys\n"
        "from batchinfer.cli.main import main\n"
        "try:\n    main(sys.argv[2:])\nexcept SystemExit:\n    pass\n"
        "print(sorted(set(sys.argv[1].split(',')) & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, ",".join(HEAVY), *args], capture_output=True, text=True, check=True
    )
    assert found.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_command_says_of_itself(name):
    """The list is a table, so that no command is imported for it: it must not drift from the commands."""
    assert command_of(name).help.splitlines()[0].removesuffix("\b") == COMMANDS[name][1]
    assert f"  {name} " in batchinfer("--help").stdout


@pytest.mark.parametrize(("name", "command"), ALL, ids=[name for name, _ in ALL])
def test_every_command_and_flag_is_documented(name, command):
    assert command.help
    for param in command.params:
        if isinstance(param, click.Option):
            assert param.help, f"{name} {param.opts}"
            assert param.help.endswith("."), f"{name} {param.opts}"


def test_exit_codes_are_in_the_help():
    for args in (["--help"], ["run", "--help"], ["submit", "--help"], ["watch", "--help"]):
        text = batchinfer(*args).stdout
        for code, meaning in EXIT_CODES.items():
            assert f"{code.value}  {meaning}" in text


@pytest.mark.parametrize("name", ["run", "submit"])
def test_run_and_submit_have_the_promised_flags(name):
    flags = {flag for param in command_of(name).params for flag in param.opts}
    assert flags.issuperset(FLAGS_OF_RUN_AND_SUBMIT)
    assert "--limit" in flags


@pytest.mark.parametrize("field", sorted(set(JobSpec.model_fields) - {"inputs"}))
def test_every_field_of_a_spec_has_a_flag(field):
    """What REST can ask for, the command line can too, under the same name."""
    params = {param.name: param for param in command_of("submit").params}
    assert flag_of(field) in params[field].opts


def test_the_reference_has_every_command():
    page = PAGES["cli.md"]()
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == [name for name, _ in ALL]


def test_the_codes_page_has_every_code_state_and_status():
    page = PAGES["errors.md"]()
    for word in (*ErrorCode, *JobState, *Outcome, *RowStatus):
        assert f"| `{word}` |" in page
    for code in EXIT_CODES:
        assert f"| {code.value} |" in page
