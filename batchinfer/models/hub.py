"""Models by hub id: ``owner/name`` or ``owner/name@revision``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from batchinfer.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?")
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
    try:
        folder = fetch(
            match["repo"], revision=match["revision"], cache_dir=cache_dir, allow_patterns=list(NEEDED_FILES)
        )
    except GatedRepoError as error:
        raise ModelError(f"the hub gives {name} only to those it knows: accept its terms and set HF_TOKEN") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ModelError(f"there is no folder {name} here and no such model on the hub: check the name") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{name} is not in the local cache and the hub cannot be reached: give a model file or folder instead"
        ) from error
    return Path(folder)
