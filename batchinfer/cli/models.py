"""``models``: what lies on this machine, fetching more, and names that stand for one commit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchinfer.cli.connect import load_settings, open_service
from batchinfer.cli.console import MISSING, print_fields, print_json, print_table, size
from batchinfer.cli.options import json_option
from batchinfer.errors import InvalidSpecError, ModelError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable

    from batchinfer.jobs.model_pins import ModelPin
    from batchinfer.jobs.model_views import LocalModelView, PinView
    from batchinfer.jobs.service import JobService
    from batchinfer.settings import Settings


@click.group("models")
def models_command() -> None:
    """List, fetch and pin models of this machine.

    Workers fetch a hub model when they first need it; `pull` does it before. A pin lets a name stand for one commit:
    jobs that name it get exactly that, whatever becomes of the branch.
    """


@models_command.command("ls")
@json_option
def ls_command(as_json: bool) -> None:
    """List models on this machine, with what uses them, and pins."""
    from batchinfer.jobs.model_views import LocalModelList

    settings = load_settings()
    with open_service(settings) as service:
        pins = service.pins.list()
        found = _local_models(settings, service, pins)
    if as_json:
        print_json(LocalModelList(data=found, pins=[_pin_view(pin) for pin in pins]))
        return
    if not found:
        click.echo("no model is on this machine yet: `batchinfer models pull org/name`", err=True)
    else:
        titles = ("MODEL", "REVISION", "SIZE", "PINNED AS", "JOBS", "WORKERS", "PATH")
        print_table(titles, [_row(view) for view in found])
    if pins:
        print_table(("PIN", "MODEL"), [(pin.name, pin.model) for pin in pins])


def _row(view: LocalModelView) -> tuple[str, ...]:
    refs = f" ({', '.join(view.refs)})" if view.refs else ""
    return (
        view.name,
        view.revision[:12] + refs,
        size(view.num_bytes),
        ", ".join(view.pinned_as) or MISSING,
        str(view.num_jobs),
        str(view.num_workers),
        view.path,
    )


def _local_models(settings: Settings, service: JobService, pins: Iterable[ModelPin]) -> list[LocalModelView]:
    jobs, workers = service.model_use()
    named = {*jobs, *workers, *settings.models.values()}
    return [*_hub_models(pins, jobs, workers), *_path_models(settings, named, jobs, workers)]


def _hub_models(pins: Iterable[ModelPin], jobs: Counter[str], workers: Counter[str]) -> list[LocalModelView]:
    from batchinfer.jobs.model_views import LocalModelView
    from batchinfer.models.hub import cached_models

    found = []
    for model in cached_models():
        # jobs may name it by its commit, by a branch, or by nothing, which is the main branch
        names = [f"{model.repo}@{end}" for end in (model.revision, *model.refs)]
        names += [model.repo] if "main" in model.refs else []
        found.append(
            LocalModelView(
                name=model.repo,
                kind="hub",
                revision=model.revision,
                refs=list(model.refs),
                num_bytes=model.num_bytes,
                path=str(model.folder),
                fetched_at=model.fetched_at,
                pinned_as=[pin.name for pin in pins if (pin.repo, pin.revision) == (model.repo, model.revision)],
                num_jobs=sum(jobs[name] for name in names),
                num_workers=sum(workers[name] for name in names),
            )
        )
    return found


def _path_models(
    settings: Settings, named: set[str], jobs: Counter[str], workers: Counter[str]
) -> list[LocalModelView]:
    """GGUF files and folders that jobs, workers or settings name, and those that lie in the folders for models."""
    from batchinfer.engine.model_identity import model_revision
    from batchinfer.jobs.model_views import LocalModelView

    paths = {str(Path(name).expanduser()) for name in named if name.startswith(("/", "~"))}
    for root in settings.model_roots:
        paths |= {str(path) for path in Path(root).glob("*.gguf")}
        paths |= {str(path.parent) for path in Path(root).glob("*/config.json")}
    found = []
    for path in sorted(paths):
        where = Path(path)
        revision = model_revision(path) if where.exists() else None
        if revision is None:
            continue
        files = [where] if where.is_file() else [file for file in where.iterdir() if file.is_file()]
        found.append(
            LocalModelView(
                name=path,
                kind="gguf" if where.is_file() else "folder",
                revision=revision,
                refs=[],
                num_bytes=sum(file.stat().st_size for file in files),
                path=path,
                fetched_at=None,
                pinned_as=[],
                num_jobs=jobs[path],
                num_workers=workers[path],
            )
        )
    return found


@models_command.command("pull")
@click.argument("model", metavar="ID[@REVISION]")
@click.option("--revision", metavar="TEXT", help="A branch, a tag or a commit (default: main).")
@json_option
def pull_command(model: str, revision: str | None, as_json: bool) -> None:
    """Fetch a hub model into the cache: weights in safetensors, tokenizer, configs.

    Files that are there are not fetched again, and one that broke off is taken up. Pickled weights and code are never
    fetched. HF_TOKEN, HF_HOME and HF_ENDPOINT mean what they mean elsewhere.
    """
    if revision is not None:
        if "@" in model:
            raise InvalidSpecError("a revision is given twice: after the @ and with --revision")
        model = f"{model}@{revision}"
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from batchinfer.models.hub import download, is_hub_id

    if not is_hub_id(model):
        raise InvalidSpecError(f"{model!r} is no hub id, such as org/name or org/name@revision", param="model")
    folder = download(model, None)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{model} has no weights in safetensors, so no worker can run it: choose another one")
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    repo = model.partition("@")[0]
    if as_json:
        print_json({"model": repo, "revision": folder.name, "path": str(folder), "num_bytes": num_bytes})
        return
    print_fields([("model", repo), ("revision", folder.name), ("size", size(num_bytes)), ("path", str(folder))])


@models_command.command("pin")
@click.argument("pin", metavar="NAME=ID[@REVISION]")
@json_option
def pin_command(pin: str, as_json: bool) -> None:
    """Let a name stand for one commit of a hub model.

    Jobs that name it from now on, scheduled ones too, run on exactly that commit; it stands in their spec. A branch or
    a tag is looked up at the hub now; a commit of 40 digits needs no network.
    """
    from batchinfer.models.hub import commit_of

    name, equals, model = pin.partition("=")
    if not equals:
        raise InvalidSpecError(f"{pin!r} is not NAME=ID@REVISION, such as small=org/name@main")
    repo, commit = commit_of(model)
    with open_service() as service:
        made = service.pins.set(name, repo, commit)
    if as_json:
        print_json(_pin_view(made))
    else:
        click.echo(f"{made.name} is {made.model}")


@models_command.command("unpin")
@click.argument("name", metavar="NAME")
@json_option
def unpin_command(name: str, as_json: bool) -> None:
    """Let a name stand for itself again; jobs that were submitted keep their commit."""
    with open_service() as service:
        gone = service.pins.remove(name)
    if as_json:
        print_json(_pin_view(gone))
    else:
        click.echo(f"{gone.name} is no longer {gone.model}")


def _pin_view(pin: ModelPin) -> PinView:
    from batchinfer.jobs.model_views import PinView

    return PinView(name=pin.name, model=pin.model, created_at=pin.created_at)
