"""Where what is made of models is kept."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/batchinfer``, by default ``~/.cache/batchinfer``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchinfer"
