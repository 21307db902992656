"""Vectors of a row as OpenAI's list of embeddings."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import pyarrow as pa


def embedding_objects(vectors: pa.ListScalar, body: str | None) -> list[dict[str, Any]]:
    """``data`` of a response, in the ``encoding_format`` that the request's ``body`` (JSON) asks for.

    ``base64`` is that of little-endian float32.
    """
    as_base64 = body is not None and json.loads(body).get("encoding_format") == "base64"
    return [
        {"object": "embedding", "index": index, "embedding": _base64(vector) if as_base64 else vector.tolist()}
        for index, vector in enumerate(_arrays(vectors))
    ]


def _arrays(vectors: pa.ListScalar) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
    """One after the other, without Python's objects for their numbers."""
    for vector in vectors.values:
        yield vector.values.to_numpy(zero_copy_only=False)


def _base64(vector: np.ndarray[Any, np.dtype[np.float32]]) -> str:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode("ascii")
