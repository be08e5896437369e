"""Files that hold several VMs, one of which is selected: a package with a VirtualSystemCollection (DSP0243 clause 9)."""

from typing import Protocol, runtime_checkable

from synvirt.errors import BadRequest
from synvirt.offline import OfflineImporter


@runtime_checkable
class Several(Protocol):
    """An importer of a kind that may hold several VMs. `of`: the importer of the one with that name or id."""

    def of(self, vm: str) -> OfflineImporter: ...


def choosing(importer: OfflineImporter, vm: str | None) -> OfflineImporter:
    """The importer of the VM `vm` of a file; of its only one, where that is None. BadRequest, for a kind with only one VM."""
    if vm is None:
        return importer
    if not isinstance(importer, Several):
        raise BadRequest(f"vm: a file of kind {importer.kind} holds one VM, so {vm[:100]!r} cannot be chosen")
    return importer.of(vm)
