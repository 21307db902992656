"""The ``batchinfer`` program: commands load when they are called, errors become one sentence and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from batchinfer import __version__
from batchinfer.cli import exit_codes
from batchinfer.cli.exit_codes import ExitCode
from batchinfer.errors import BatchInferError

if TYPE_CHECKING:
    from collections.abc import Sequence

# name -> (module, what `batchinfer --help` says); a test compares the text with the command's own.
COMMANDS: dict[str, tuple[str, str]] = {
    "estimate": ("estimate", "Say what a job would be: rows, tokens, time and cost, with intervals."),
    "explain": ("estimate", "Show an input as the engine will see it, and what would make it cheaper."),
    "run": ("run", "Run a job here and now, and show its first results."),
    "submit": ("submit", "Hand a job to the workers and print its id."),
    "worker": ("worker", "Work on jobs until stopped."),
    "serve": ("serve", "Serve the REST API."),
    "ls": ("jobs", "List jobs, newest first: those to which all that is asked for applies."),
    "status": ("jobs", "Show one job: state, rows, speed, cost."),
    "watch": ("jobs", "Follow a job until it stands still or ends."),
    "cancel": ("control", "Cancel a job; finished rows are kept."),
    "pause": ("control", "Pause a job; finished rows are kept."),
    "resume": ("control", "Resume a paused job, or one whose budget is used up."),
    "retry": ("control", "Run the rows of a finished job again that did not succeed."),
    "change": ("change", "Change a job's name, tags, priority, deadline or budget."),
    "clone": ("change", "Submit a job like another one, and print its id."),
    "results": ("results", "Say where a job's results are, and show the first rows."),
    "rows": ("look", "Show result rows in input order, also while the job runs."),
    "errors": ("results", "Show the error rows of a job by code, with what to do."),
    "cost": ("results", "Show what a job has cost, metered and at list price."),
    "forecast": ("forecast", "Show what was expected of a job, beside how it came out."),
    "verify": ("results", "Prove that every input row has exactly one outcome."),
    "replay": ("replay", "Run one row of a job again, alone, and say whether the bytes are equal."),
    "quality": ("quality", "Hold answers against the reference precision and say where they differ."),
    "schedule": ("schedule", "Run jobs by the clock, each moment exactly once."),
    "events": ("look", "Show what happened to a job, oldest first."),
    "workers": ("look", "List workers: where they run, with which model, and whether they give signs of life."),
    "convert": ("convert", "Convert between OpenAI batch files and Parquet, without loss."),
    "models": ("models", "List, fetch and pin models of this machine."),
    "price": ("price", "Set and show list prices of models and hourly prices of devices."),
    "usage": ("usage", "Show what was run and what it cost, by day, tenant, model, job or tag."),
    "budget": ("budget", "Limit what tenants may spend in a month."),
    "keys": ("keys", "Make, list, rotate and revoke API keys."),
    "tenants": ("tenants", "Add, list and change tenants."),
    "webhooks": ("webhooks", "Tell a URL when jobs end or schedules fail, signed and retried."),
    "doctor": ("doctor", "Check this installation and say how to mend what is wrong."),
    "db": ("db", "Create, upgrade and inspect the database."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported only when they are called, so that ``--help`` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- click's signature
        """Names in the order of a job's life, not of the alphabet."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 -- click's signature
        """Import the module of one command and return it."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"batchinfer.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 -- click's
        """Write the list of commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"batchinfer {__version__}")
        ctx.exit()


CONTEXT_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_HELP = """Run millions of prompts from Parquet files through a model, none lost, none twice.

\b
batchinfer run prompts.parquet --model model.gguf     here and now
batchinfer submit prompts.parquet --model model.gguf  hand it to `batchinfer worker`

Settings are environment variables that begin with BATCHINFER_; `batchinfer doctor` shows and checks them.
"""


@click.group(
    cls=LazyGroup,
    name="batchinfer",
    context_settings=CONTEXT_SETTINGS,
    help=_HELP,
    epilog=exit_codes.epilog(),
    no_args_is_help=True,
)
@click.option("--debug", is_flag=True, envvar="BATCHINFER_DEBUG", help="Show tracebacks and debug logs.")
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show the version."
)
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Run millions of prompts from Parquet files through a model."""
    ctx.obj = {"debug": debug}


def _fail(message: str, code: ExitCode) -> NoReturn:
    click.echo(f"Error: {message}", err=True)
    sys.exit(code)


def _one_sentence(error: Exception) -> str:
    """Say what an unforeseen error is, without its traceback."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    hint = "add --debug for the traceback"
    if type(error).__module__.startswith(("sqlalchemy", "alembic")):
        return f"the database refused: {first_line} -- `batchinfer doctor` checks it, {hint}"
    return f"{type(error).__name__}: {first_line or 'no message'} -- {hint}"


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the program and exit with one of :mod:`batchinfer.cli.exit_codes`."""
    arguments = list(sys.argv[1:] if args is None else args)
    if "--debug" in arguments:  # wherever it stands: people add it to the end of the line that failed
        arguments.remove("--debug")
        arguments.insert(0, "--debug")
    debug = arguments[:1] == ["--debug"] or bool(os.environ.get("BATCHINFER_DEBUG"))
    try:
        result = cli.main(args=arguments, prog_name="batchinfer", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # the reader of a pipe went away (`batchinfer ls | head`): nothing to say, and nobody to say it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.OK)
    except BatchInferError as error:
        if debug:
            raise
        _fail(str(error), exit_codes.of_error(error))
    except Exception as error:
        if debug:
            raise
        _fail(_one_sentence(error), ExitCode.FAILED)
    sys.exit(result if isinstance(result, int) else ExitCode.OK)
