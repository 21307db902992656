"""Where a job's tenant may read and write, looked up when a step of it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.jobs.caller import Caller
from batchinfer.jobs.installed_roots import InstalledRoots
from batchinfer.jobs.tenants import Tenants

if TYPE_CHECKING:
    from batchinfer.dataset.roots import Roots
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.records import JobRecord
    from batchinfer.settings import Settings


def roots_of(ledger: Ledger, settings: Settings, job: JobRecord) -> Roots:
    """The roots of the job's tenant. A job of the default tenant that was let in is not held up for want of roots."""
    return roots_of_tenant(ledger, settings, job.tenant_id)


def roots_of_tenant(ledger: Ledger, settings: Settings, tenant_id: str) -> Roots:
    """The same by the tenant's id."""
    installed = InstalledRoots(settings.input_roots, settings.output_roots, settings.model_roots, settings.files_folder)
    return installed.of(Tenants(ledger.engine).get(Caller.operator(), tenant_id), has_key=False)
