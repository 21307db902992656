"""Quantised weights on disk: calibrated and rounded once, read back in a fraction of a second.

One safetensors file a model, precision and recipe. It is written under another name and renamed, so that a reader sees
all of it or nothing; a damaged one is made again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file

from batchinfer.models.fused.kinds import kinds_of
from batchinfer.models.mapped_file import MappedFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from batchinfer.models.fused.linear import QuantizedLinear
    from batchinfer.models.fused.spec import LayerSpec, Projection
    from batchinfer_kernels.cpu import Ops

VERSION = 1
"""Raised when the same recipe gives other weights, so that older files are left alone."""
MAX_FILES = 8
"""The least recently written go when there are more."""
_log = logging.getLogger(__name__)


class QuantizedStore:
    """The folder of quantised models, and one model's file in it."""

    def __init__(self, folder: Path, revision: str, precision: str) -> None:
        """``revision`` is the hash of the model's content, ``precision`` what its weights are rounded from."""
        self._folder = folder
        self._key = f"{revision}-{precision}"

    def load(self, ops: Ops, recipe: str) -> StoredMaker | None:
        """What was kept under this recipe; None if nothing was, or it cannot be read."""
        path = self._path(recipe)
        if not path.exists():
            return None
        try:
            return StoredMaker(ops, path, recipe)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            _log.warning("quantised weights in %s cannot be read (%s) and are made again", path, error)
            return None

    def save(self, recipe: str, linears: Mapping[str, QuantizedLinear]) -> None:
        """Keep a model's linears; a disk that is full or read-only costs the next load time, no more."""
        tensors = {f"{name}.{part}": t for name, linear in linears.items() for part, t in linear.tensors().items()}
        rotations = {name: linear.rotation for name, linear in linears.items()}
        draft = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, draft = tempfile.mkstemp(prefix=".draft-", dir=self._folder)
            os.close(descriptor)
            save_file(tensors, draft, {"recipe": recipe, "rotations": json.dumps(rotations)})
            Path(draft).replace(self._path(recipe))
            self._prune()
        except (OSError, SafetensorError) as error:
            _log.warning("quantised weights cannot be kept in %s: %s", self._folder, error)
        finally:
            if draft:
                Path(draft).unlink(missing_ok=True)

    def _path(self, recipe: str) -> Path:
        return self._folder / f"{self._key}-{recipe}-{VERSION}.safetensors"

    def _prune(self) -> None:
        files = sorted(self._folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
        for path in files[:-MAX_FILES]:
            with contextlib.suppress(OSError):  # another process was faster
                path.unlink()


class StoredMaker:
    """Gives the linears of a file; the model's own weights are not read.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: it is damaged.
        ValueError: it is of another recipe.
    """

    def __init__(self, ops: Ops, path: Path, recipe: str) -> None:
        self._ops = ops
        self.recipe = recipe
        self._file = MappedFile(path)
        metadata = self._file.metadata
        self._rotations: dict[str, int] = json.loads(metadata["rotations"])
        if metadata["recipe"] != recipe:
            raise ValueError(f"it holds {metadata['recipe']}")

    def holds(self, projections: Mapping[str, Projection]) -> bool:
        """Whether it has exactly these projections, in their shapes."""
        return set(self._rotations) == set(projections) and all(
            f"{name}.weight" in self._file.names
            and self._file.shape(f"{name}.weight") == [p.in_features, p.out_features]
            for name, p in projections.items()
        )

    def begin_layer(self, layer: LayerSpec) -> None:
        """See :meth:`~batchinfer.models.fused.convert.LinearMaker.begin_layer`: nothing to do."""

    def begin_head(self) -> None:
        """See :meth:`~batchinfer.models.fused.convert.LinearMaker.begin_head`: nothing to do."""

    def __call__(self, projection: Projection) -> QuantizedLinear:
        """See :meth:`~batchinfer.models.fused.convert.LinearMaker.__call__`."""
        name = projection.name
        parts = [part for part in ("weight", "scale", "bias", "smoothing") if f"{name}.{part}" in self._file.names]
        # copies: aligned as kernels like it, and free of the file
        tensors: dict[str, torch.Tensor] = {part: self._file.get(f"{name}.{part}").clone() for part in parts}
        return kinds_of(self._ops).int8_of_tensors(self._ops, tensors, self._rotations[name])

    def finish(self) -> None:
        """See :meth:`~batchinfer.models.fused.convert.LinearMaker.finish`."""
        del self._file
