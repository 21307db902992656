"""Where an installation lets its tenants read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchinfer.jobs.caller import DEFAULT_TENANT

if TYPE_CHECKING:
    from batchinfer.dataset.roots import Roots
    from batchinfer.jobs.tenants import TenantRecord


@dataclass(frozen=True, slots=True)
class InstalledRoots:
    """What counts for tenants without roots of their own. ``own`` is the folder of uploaded files."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    own: str | None = None

    def of(self, tenant: TenantRecord, *, has_key: bool) -> Roots:
        """The roots of a tenant.

        Without any, the default tenant is free: whoever uses it without a key has the machine itself. Everybody else
        then may go nowhere.
        """
        from batchinfer.dataset.roots import Roots  # noqa: PLC0415 -- the data set layer loads when it is used

        inputs, outputs = tenant.input_roots or self.inputs, tenant.output_roots or self.outputs
        if tenant.id == DEFAULT_TENANT and not has_key and not inputs and not outputs:
            return Roots()
        return Roots(inputs, outputs, (*self.models, *inputs), self.own)
