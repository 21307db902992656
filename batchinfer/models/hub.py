"""Models by hub id: ``owner/name`` or ``owner/name@revision``."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi, scan_cache_dir, snapshot_download
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from batchinfer.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
NEEDED_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""What is fetched of a repository: no pickled weights, no code."""


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id."""
    return _HUB_ID.fullmatch(name) is not None


def download(name: str, cache_dir: str | None, *, fetch: Callable[..., str] = snapshot_download) -> Path:
    """Folder of the hub model ``name``, downloaded where it is not yet; the folder's name is the commit.

    Raises:
        ModelError: no such model, no access to it, or no network.
    """
    match = _HUB_ID.fullmatch(name)
    assert match is not None, name
    with _told(name):
        folder = fetch(
            match["repo"], revision=match["revision"], cache_dir=cache_dir, allow_patterns=list(NEEDED_FILES)
        )
    return Path(folder)


def commit_of(name: str) -> tuple[str, str]:
    """``(repository, commit)`` of ``owner/name@revision``; a commit is taken as it is, others are asked of the hub.

    Raises:
        ModelError: no such model or revision, or no network.
    """
    match = _HUB_ID.fullmatch(name)
    if match is None:
        raise ModelError(f"{name!r} is no hub id with a revision, such as org/name@main")
    if _COMMIT.fullmatch(match["revision"] or ""):
        return match["repo"], match["revision"]
    with _told(name):
        commit = HfApi().model_info(match["repo"], revision=match["revision"]).sha
    if commit is None:
        raise ModelError(f"the hub does not say which commit {name} is: give its 40 digits after the @")
    return match["repo"], commit


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A commit of a hub model that lies on this machine."""

    repo: str
    revision: str
    refs: tuple[str, ...]
    """Branches and tags that were it when it was fetched."""
    num_bytes: int
    fetched_at: datetime
    folder: Path


def cached_models(cache_dir: str | None = None) -> list[CachedModel]:
    """Hub models in the cache, by name and time."""
    try:
        info = scan_cache_dir(cache_dir)
    except CacheNotFound:
        return []
    found = [
        CachedModel(
            repo.repo_id,
            revision.commit_hash,
            tuple(sorted(revision.refs)),
            revision.size_on_disk,
            datetime.fromtimestamp(revision.last_modified, UTC),
            revision.snapshot_path,
        )
        for repo in info.repos
        if repo.repo_type == "model"
        for revision in repo.revisions
    ]
    return sorted(found, key=lambda model: (model.repo, model.fetched_at))


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Errors of the hub as ModelError, with what to do."""
    try:
        yield
    except GatedRepoError as error:
        raise ModelError(f"the hub gives {name} only to those it knows: accept its terms and set HF_TOKEN") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ModelError(f"there is no folder {name} here and no such model on the hub: check the name") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{name} is not in the local cache and the hub cannot be reached: give a model file or folder instead"
        ) from error
