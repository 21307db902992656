"""``change`` and ``clone``: a submitted job anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from batchinfer.cli.connect import open_jobs, server_options
from batchinfer.cli.console import print_json
from batchinfer.cli.options import given_fields, json_option, spec_error, spec_options


@click.command("change")
@click.argument("job_id", metavar="JOB")
@click.option("--name", metavar="TEXT", help="A name for people.")
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="May be repeated; replaces all tags.")
@click.option("--priority", type=int, help="Higher runs earlier, -100 to 100.")
@click.option("--deadline", metavar="TIME", help="6h, 90m, 2d or an ISO 8601 time with zone.")
@click.option("--budget", "budget_usd", metavar="USD", help="For the whole job.")
@click.option(
    "--clear", "cleared", multiple=True, type=click.Choice(["name", "tags", "deadline", "budget"]),
    help="Take it away; may be repeated.",
)  # fmt: skip
@server_options
@json_option
def change_command(job_id: str, cleared: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Change a job's name, tags, priority, deadline or budget.

    What runs goes on; a job whose budget was used up also needs `batchinfer resume`.
    """
    from batchinfer.jobs.changes import JobChanges

    empty: dict[str, tuple[str, Any]] = {
        "name": ("name", None), "tags": ("tags", {}), "deadline": ("deadline", None), "budget": ("budget_usd", None),
    }  # fmt: skip
    given = given_fields(flags) | dict(empty[field] for field in cleared)
    try:
        changes = JobChanges(**given)
    except ValidationError as error:
        raise spec_error(error) from None
    with open_jobs() as service:
        view = service.change(job_id, changes)
    if as_json:
        print_json(view)
    else:
        click.echo(f"{view.id} has changed: {', '.join(given)}")


@click.command("clone")
@click.argument("job_id", metavar="JOB")
@spec_options
@click.option("--limit", type=click.IntRange(1), help="Only the first rows of the input.")
@click.option("--idempotency-key", metavar="TEXT", help="The same key again gives the same job, not a second one.")
@server_options
@json_option
def clone_command(job_id: str, idempotency_key: str | None, as_json: bool, **flags: Any) -> None:
    """Submit a job like another one, and print its id.

    What is given is changed, INPUTS too; output and deadline are not taken over.
    """
    with open_jobs() as service:
        view, _ = service.clone(job_id, given_fields(flags), base=Path.cwd(), idempotency_key=idempotency_key)
    if as_json:
        print_json(view)
    else:
        click.echo(view.id)
