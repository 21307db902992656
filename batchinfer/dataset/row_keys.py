"""A row's identity: a digest of everything that decides its answer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from batchinfer.types import Request

if TYPE_CHECKING:
    from batchinfer.sampling_params import SamplingParams

KEY_BYTES = 16
"""128 bits: among a billion different rows two share a key with a chance of about 10**-21."""
_PARTS = tuple(field.name for field in fields(Request) if field.name not in ("request_id", "params"))


class RowKeys:
    """Makes keys within a ``scope``: what must be equal before rows are compared at all (spec, model, tenant)."""

    def __init__(self, scope: str) -> None:
        self._scope = scope.encode()
        self._params: SamplingParams | None = None
        self._params_text = b""

    def of(self, request: Request) -> bytes | None:
        """Key of a request with its final parameters, seed included; None where it holds what no JSON can."""
        parts = {name: getattr(request, name) for name in _PARTS}
        try:
            text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
        except (TypeError, ValueError, RecursionError):
            return None
        digest = hashlib.blake2b(self._scope, digest_size=KEY_BYTES)
        for piece in (self._text_of(request.params), text):
            digest.update(len(piece).to_bytes(8, "big"))
            digest.update(piece)
        return digest.digest()

    def _text_of(self, params: SamplingParams) -> bytes:
        # most rows of a job share one object
        if params is not self._params:
            self._params, self._params_text = params, params.model_dump_json().encode()
        return self._params_text


def make_scope(parts: dict[str, Any]) -> str:
    """SHA-256 in hex over JSON data: the scope of keys."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
