"""Which folder a row's ``adapter`` stands for, and whether the row's tenant may use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.adapter_config import not_found
from batchinfer.dataset.roots import Roots
from batchinfer.errors import InputError

if TYPE_CHECKING:
    from batchinfer.sampling_params import SamplingParams

_CACHE_SIZE = 1024


class AdapterPaths:
    """Turns adapters' names into absolute folders. ``folder`` is where names that are no absolute path are looked up."""

    def __init__(self, folder: str | None, roots: Roots | None) -> None:
        self._folder = folder
        self._roots = roots or Roots()
        self._known: dict[str, str] = {}

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Parameters with the adapter's folder; whether it is there is seen when the row runs.

        Raises:
            RowFailure: ``adapter_not_found``: a name without a folder to look in, or a path that is not allowed.
        """
        if params.adapter is None:
            return params
        path = self._known.get(params.adapter)
        if path is None:
            path = self._path(params.adapter)
            if len(self._known) < _CACHE_SIZE:
                self._known[params.adapter] = path
        return params if path == params.adapter else params.model_copy(update={"adapter": path})

    def _path(self, name: str) -> str:
        if "://" in name or "\0" in name:
            raise not_found(repr(name), "give a local folder")
        path = name
        if not name.startswith("/"):
            if self._folder is None:
                raise not_found(repr(name), "give an absolute path, or the folder of such names with --adapter-folder")
            if ".." in name.split("/"):
                raise not_found(repr(name), "a name below --adapter-folder has no '..'")
            path = f"{self._folder.rstrip('/')}/{name}"
        try:
            self._roots.check_adapter(path)
        except InputError as error:
            raise not_found(repr(name), error.message) from None
        return path
