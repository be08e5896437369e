"""By which way a disk is read: VDDK, the datastore's files, an export lease; the first that can. No I/O."""

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from synvirt.live.vsphere.disks import OBJECT_STORES, chain, store_of

WayName = Literal["vddk", "datastore", "esxi", "lease"]

# As the operator reads them.
READ_BY: Final[dict[WayName, str]] = {
    "vddk": "VDDK, VMware's own transport",
    "datastore": "the datastore's files over HTTPS (/folder)",
    "esxi": "the datastore's files from an ESXi host itself, by a ticket of vCenter's for each request",
    "lease": "an export lease, which sends whole disks as compressed streams (ExportSnapshot)",
}


# The privilege that it takes.
EXPORT: Final = "VApp.Export"
# A lease is one stream, which the host compresses and which cannot be resumed: worth it where it saves most of a disk.
SPARED_BYTES_LEAST: Final = 1 << 30


def mostly_empty(capacity_bytes: int, allocated_bytes: int | None) -> bool:
    """Would a lease, which sends what is allocated alone, spare at least half of the disk?"""
    spared = 0 if allocated_bytes is None else capacity_bytes - allocated_bytes
    return spared >= SPARED_BYTES_LEAST and 2 * spared >= capacity_bytes


class Way(NamedTuple):
    """`why`: what forbids the ways before it; empty where nothing does. `chosen`: by the operator, whatever it forbids."""

    name: WayName
    why: str = ""
    chosen: bool = False

    @property
    def description(self) -> str:
        return READ_BY[self.name] + (f": {self.why}" if self.why else "")

    @property
    def no_deltas(self) -> str | None:
        """Why there can be no warm copy by this way, said of a disk; None: there can."""
        if self.name != "lease":
            return None
        return f"is read by an export lease, which has no deltas{f': {self.why}' if self.why else ''}"


def way(
    wished: Literal["auto"] | WayName,
    *,
    has_vddk: bool,
    disk: Any,
    store_types: Mapping[str, str],
    missing_privilege: str | None,
) -> Way:
    """Of one of the VM's disks. `missing_privilege`: one that our user lacks to read the datastores' files."""
    if wished != "auto":
        return Way(wished, chosen=True)
    if has_vddk:
        return Way("vddk")
    if missing_privilege is not None:
        return Way("lease", f"our user lacks the privilege {missing_privilege}")
    store = store_of(disk)
    if store_types.get(store) in OBJECT_STORES:
        return Way("lease", f"it lies in {store}, of type {store_types[store]}")
    if chain(disk.backing) is None:
        return Way("lease", "it is not kept in files that we read")
    return Way("datastore")
