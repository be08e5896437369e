"""By which way a VM's disks are read: VDDK, the datastore's files, an export lease; the first that can. No I/O."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from synvirt.live.vim_machines import OBJECT_STORES, chain, label, store_of, virtual_disks

WayName = Literal["vddk", "datastore", "lease"]

# As the operator reads them.
READ_BY: Final[dict[WayName, str]] = {
    "vddk": "VDDK, VMware's own transport",
    "datastore": "the datastore's files over HTTPS (/folder)",
    "lease": "an export lease, which sends whole disks as compressed streams (ExportSnapshot)",
}


class Way(NamedTuple):
    """`why`: what forbids the ways before it; empty where nothing does, or the operator chose."""

    name: WayName
    why: str = ""

    @property
    def told(self) -> str:
        return READ_BY[self.name] + (f": {self.why}" if self.why else "")

    @property
    def no_deltas(self) -> str | None:
        """Why there can be no warm copy by this way; None: there can."""
        if self.name != "lease":
            return None
        return f"its disks are read by an export lease, which has no deltas{f' ({self.why})' if self.why else ''}"


def way(
    wished: Literal["auto"] | WayName,
    *,
    has_vddk: bool,
    devices: Sequence[Any],
    store_types: Mapping[str, str],
    missing_privilege: str | None,
) -> Way:
    """`missing_privilege`: one that our user lacks to read the datastores' files."""
    if wished != "auto":
        return Way(wished)
    if has_vddk:
        return Way("vddk")
    if missing_privilege is not None:
        return Way("lease", f"our user lacks the privilege {missing_privilege}")
    for disk in virtual_disks(devices):
        store = store_of(disk)
        if store_types.get(store) in OBJECT_STORES:
            return Way("lease", f"{label(disk)} lies in {store}, of type {store_types[store]}")
        if chain(disk.backing) is None:
            return Way("lease", f"{label(disk)} is not kept in files that we read")
    return Way("datastore")
