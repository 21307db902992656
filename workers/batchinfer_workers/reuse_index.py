"""The index of a finished job's rows, so that later jobs find what they need not compute."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pyarrow as pa

from batchinfer.dataset.key_index import KeyIndexWriter
from batchinfer.dataset.reused_rows import iter_keys
from batchinfer_workers.reuse import scope_of

if TYPE_CHECKING:
    from batchinfer.dataset.layout import OutputLayout
    from batchinfer.dataset.manifest import Manifest
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.records import JobRecord

_log = logging.getLogger(__name__)


def write_key_index(ledger: Ledger, job: JobRecord, layout: OutputLayout, manifest: Manifest) -> None:
    """Write the index beside the manifest and note it. A failure costs later jobs their copies, this one nothing."""
    scope = scope_of(job)
    if scope is None:
        return
    where = layout.key_index
    folder = layout.output.parent if layout.is_single_file else layout.output
    try:
        with KeyIndexWriter(where) as writer:
            for entry in manifest.files:
                for keys, positions in iter_keys(folder.child(entry.name).uri, manifest.prefix):
                    writer.add(keys, positions + entry.row_start)
        ledger.add_key_index(job, scope, where.uri, writer.num_rows)
    except (OSError, KeyError, pa.ArrowException) as error:
        _log.warning("job %s has no index, later jobs copy nothing from it: %s", job.id, error)
