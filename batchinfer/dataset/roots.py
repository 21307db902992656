"""Folders and prefixes below which a tenant's paths must lie. Checked at submit, and again where files are opened."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from batchinfer.errors import InputError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_MAGIC = re.compile(r"[*?\[]")
_TRICKS = re.compile(r"[?#@%\\]")


@dataclass(frozen=True, slots=True)
class Roots:
    """Where reading and writing is allowed; None is everywhere.

    Local paths are followed through every link before they are compared. What lies under ``own`` (uploaded files and
    their results) is allowed to those who name it so; who may name which file is checked at submit.
    """

    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    own: str | None = None

    def check_input(self, uri: str) -> None:
        """Raises InputError (``path_not_allowed``) for a path, glob or URI outside of the input roots."""
        self._check(uri, self.inputs, "inputs")

    def check_output(self, uri: str) -> None:
        """Raises InputError (``path_not_allowed``) for a path or URI outside of the output roots."""
        self._check(uri, self.outputs, "output")

    def check_model(self, model: str) -> None:
        """Raises InputError for a model that is a path or URI outside of the model roots; hub ids are no paths."""
        if model.startswith("/") or _SCHEME.match(model):
            self._check(model, self.models, "model")

    def check_adapter(self, folder: str) -> None:
        """Raises InputError for an adapter outside of the model roots."""
        self._check(folder, self.models, "adapter")

    def _check(self, uri: str, roots: tuple[str, ...] | None, param: str) -> None:
        if roots is None:
            return
        # as it is written: a link of the tenant's own that leads there is none of ours
        is_own = self.own is not None and uri.startswith(self.own.rstrip("/") + "/")
        allowed = (self.own,) if is_own and self.own is not None else roots
        if not any(is_below(uri, root) for root in allowed):
            where = ", ".join(roots) or "nowhere: an admin sets them with `batchinfer tenants set`"
            raise InputError(
                f"{param} {uri!r} lies outside of what this tenant may use ({where})",
                param=param,
                code="path_not_allowed",
            )


def is_below(uri: str, root: str) -> bool:
    """Whether a path, glob or URI lies below a root, links followed."""
    scheme, root_scheme = _scheme(uri), _scheme(root)
    if scheme != root_scheme or "\0" in uri:
        return False
    if scheme is None:
        return _is_below_locally(_plain(uri), _plain(root))
    prefix, target = _key(root), _key(_literal(uri))
    # other stores' URIs have options, which could lead to another server
    if scheme != "s3" and _TRICKS.search(uri):
        return False
    if any(part in (".", "..") for part in target.split("/")):
        return False
    return target == prefix or target.startswith(prefix + "/")


def _scheme(uri: str) -> str | None:
    match = _SCHEME.match(uri)
    scheme = match[1].lower() if match else None
    return None if scheme == "file" else scheme


def _plain(uri: str) -> str:
    return _SCHEME.sub("", uri, count=1)


def _key(uri: str) -> str:
    """``bucket/key`` without slashes at its ends."""
    return _plain(uri).strip("/")


def _literal(uri: str) -> str:
    """What stands before the first component with a wildcard."""
    match = _MAGIC.search(uri)
    return uri if match is None else uri[: uri.rfind("/", 0, match.start()) + 1]


def _is_below_locally(path: str, root: str) -> bool:
    if not path.startswith("/") or ".." in Path(path).parts:
        return False
    whole = Path(path)
    if _MAGIC.search(path) and not whole.exists():
        whole = Path(_literal(path))
    try:
        return whole.resolve().is_relative_to(Path(root).expanduser().resolve())
    except (OSError, RuntimeError):  # a loop of links
        return False
