"""The ``batchinfer`` program inside the test process: quick, and with its output at hand."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any

from batchinfer.cli.main import main


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Stdout as one JSON document: fails if there is anything else."""
        return json.loads(self.stdout)


def batchinfer(*args: object, exit_code: int | None = 0) -> Result:
    """Run a command; ``exit_code`` None accepts any."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code: Any = None
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            main([str(arg) for arg in args])
        except SystemExit as end:
            code = end.code
    result = Result(int(code), stdout.getvalue(), stderr.getvalue())
    if exit_code is not None:
        assert result.exit_code == exit_code, result
    return result
