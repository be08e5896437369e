"""How a disk is read: by VDDK, by the datastore's files or by an export lease; the first that works is taken. No I/O."""

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from synvirt.live.vsphere.disks import OBJECT_STORES, allocated_of, capacity_of, chain, store_of, virtual_disks

WayName = Literal["vddk", "datastore", "esxi", "lease"]

# The texts for the operator.
READ_BY: Final[dict[WayName, str]] = {
    "vddk": "VDDK, VMware's own transport",
    "datastore": "the datastore's files over HTTPS (/folder)",
    "esxi": "the datastore's files from an ESXi host itself, by a ticket of vCenter's for each request",
    "lease": "an export lease, which sends whole disks as compressed streams (ExportSnapshot)",
}

# The privilege that an export lease needs.
EXPORT: Final = "VApp.Export"
# A lease is one stream. The host compresses it, and it cannot be resumed: it is worth it only where it saves most of a disk.
SPARED_BYTES_LEAST: Final = 1 << 30


def mostly_empty(capacity_bytes: int, allocated_bytes: int | None) -> bool:
    """Whether a lease, which sends only what is allocated, would save at least half of the disk."""
    spared = 0 if allocated_bytes is None else capacity_bytes - allocated_bytes
    return spared >= SPARED_BYTES_LEAST and 2 * spared >= capacity_bytes


class Way(NamedTuple):
    """`why`: what forbids the ways that come first; empty where nothing does. `chosen`: the operator chose it."""

    name: WayName
    why: str = ""
    chosen: bool = False

    @property
    def description(self) -> str:
        return READ_BY[self.name] + (f": {self.why}" if self.why else "")

    @property
    def no_deltas(self) -> str | None:
        """Why this way allows no warm copy, as the end of a sentence about a disk. None: it allows one."""
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
    """The way to read `disk`. `missing_privilege`: the one that our user lacks to read the datastores' files."""
    if wished != "auto":
        return Way(wished, chosen=True)
    if has_vddk:
        return Way("vddk")
    if missing_privilege is not None:
        return Way("lease", f"our user lacks the privilege {missing_privilege}")
    store = store_of(disk, store_types)
    if store_types.get(store) in OBJECT_STORES:
        return Way("lease", f"it lies in {store}, of type {store_types[store]}")
    if chain(disk.backing) is None:
        return Way("lease", "it is not kept in files that we read")
    return Way("datastore")


def mostly_empty_disks(found: Mapping[str, Any], ways: Mapping[str, Way]) -> list[tuple[Any, int]]:
    """The mostly empty disks that are read by their files, each with its allocated bytes. Those that have a change id are left
    out: the platform lists which parts of them are allocated."""
    files = found.get("layoutEx.file") or ()
    disks = [
        disk for disk in virtual_disks(found.get("config.hardware.device") or ()) if ways[str(disk.key)].name == "datastore"
    ]
    allocated = [(disk, allocated_of(disk, files)) for disk in disks if not getattr(disk.backing, "changeId", None)]
    return [(disk, taken) for disk, taken in allocated if taken is not None and mostly_empty(capacity_of(disk), taken)]
