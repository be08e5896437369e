"""What may go wrong with a Hyper-V VM, by inspect.ps1's answer; those of every source are in machines/concerns. No I/O."""

from collections.abc import Iterator, Mapping
from pathlib import PureWindowsPath
from typing import Any, Final

from synvirt.machines import concerns as shared
from synvirt.machines.texts import clean
from synvirt.model.machine import Concern, GuestOs
from synvirt.sizes import MIB, SECTOR_BYTES

# Ids of integration services, the same in all languages: the device part of VMIntegrationComponent.Id.
SHUTDOWN: Final = "9F8233AC-BE49-4C79-8EE3-E7E1985B2077"
VSS: Final = "5CED1297-4598-4915-A5FC-AD21BB4D02A4"
CHECKPOINTS_DISABLED: Final = 2
SAVED_STATES: Final = frozenset({6, 9, 32773, 32776, 32779, 32780, 32783, 32788, 32789, 32792, 32793, 32795, 32796})
_PMEM: Final = 2
_ACCESS, _TRUNK, _PRIVATE = 1, 2, 3
# Not all versions have VMReplicationMode; a state other than Disabled means that there is replication.
_NO_REPLICATION: Final = 0


def _warning(id_: str, label: str, assessment: str, remedy: str) -> Concern:
    return Concern(id=id_, category="Warning", label=label, assessment=assessment, remedy=remedy)


def _critical(id_: str, label: str, assessment: str, remedy: str) -> Concern:
    return Concern(id=id_, category="Critical", label=label, assessment=assessment, remedy=remedy)


def _information(id_: str, label: str, assessment: str, remedy: str) -> Concern:
    return Concern(id=id_, category="Information", label=label, assessment=assessment, remedy=remedy)


def of_machine(found: Mapping[str, Any], guest: GuestOs) -> Iterator[Concern]:
    """The concerns of a VM as a whole. `found`: the answer of inspect.ps1."""
    yield from shared.of_machine(
        uefi=int(found["generation"]) == 2,
        secure_boot=bool(found["firmware"]["secure_boot"]),
        tpm=bool(found["security"]["tpm"]),
        guest=guest,
        snapshots=len(found["checkpoints"]),
    )
    if found["security"]["shielded"]:
        yield shared.shielded()
    if found["memory_dynamic"]:
        sizes = [int(found[key] or 0) // MIB for key in ("memory", "memory_least", "memory_most")]
        yield shared.dynamic_memory(*sizes)
    if int(found["fibre_channel"] or 0):
        yield shared.passthrough_device("Fibre Channel by its name")
    # Recordings of older versions have neither.
    for key, what in (("pci", "a PCI Express device"), ("gpus", "a GPU")):
        if count := int(found.get(key) or 0):
            yield shared.passthrough_device(what if count == 1 else f"{what} ({count} times)")
    if found["ports"]:
        yield shared.left_out([clean(f"{port}: a named pipe of the host") for port in found["ports"][:8]])
    if media := [*(found["dvds"] or ()), *(found.get("floppies") or ())]:
        yield shared.removable_media_left_out(tuple(clean(PureWindowsPath(str(one)).name) for one in media[:8]))
    if not found["drives"]:
        yield shared.no_disks()
    if int(found["state"]) in SAVED_STATES:
        yield _critical(
            "hyperv.suspended", "Saved or paused VM",
            "What it has in its memory is not moved, and is lost when it is switched off for the cut-over.",
            "Start or resume it, or shut it down, at the source first.",
        )  # fmt: skip
    if int(found["checkpoint_type"]) == CHECKPOINTS_DISABLED:
        yield _warning(
            "hyperv.checkpoints_disabled", "Checkpoints are disabled",
            "Hyper-V makes no recovery snapshot of it, so it can only be moved cold.",
            "Set-VM -CheckpointType Production on the host, to move it warm.",
        )  # fmt: skip
    if int(found["replication"]) != _NO_REPLICATION:
        yield _warning(
            "hyperv.replication", "Hyper-V Replica",
            "The VM is replicated. Replication continues at the source, and is not migrated.",
            "Move the primary VM, and end its replication after the cut-over.",
        )  # fmt: skip
    yield from _of_services(found)
    yield from _of_nics(found)


def _of_services(found: Mapping[str, Any]) -> Iterator[Concern]:
    enabled = {str(one["id"]).upper().rpartition("\\")[2]: bool(one["enabled"]) for one in found["services"]}
    if enabled.get(VSS) is False:
        yield _warning(
            "hyperv.no_vss", "Snapshots are as after a power failure",
            "The integration service «Backup (volume shadow copy)» is off: the guest is not quiesced. The copy of the "
            "cut-over is made of a VM that is off, and is not affected.",
            "Enable the service in the VM's settings, if a test of a running copy needs quiet databases.",
        )  # fmt: skip
    if enabled.get(SHUTDOWN) is False:
        yield _warning(
            "hyperv.no_shutdown", "The guest cannot be asked to shut down",
            "The integration service for shutting down is off: at the cut-over the VM is switched off like by a power failure.",
            "Enable the service, or shut the guest down yourself before the cut-over.",
        )  # fmt: skip


def _of_nics(found: Mapping[str, Any]) -> Iterator[Concern]:
    tagged = [one for one in found["nics"] if int(one["vlan_mode"] or 0) in (_ACCESS, _TRUNK, _PRIVATE)]
    if tagged:
        vlans = ", ".join(
            f"{one['switch'] or 'no switch'} VLAN {one['vlan']}"
            if int(one["vlan_mode"]) == _ACCESS
            else f"{one['switch']} (several)"
            for one in tagged[:8]
        )
        yield _information(
            "hyperv.vlan", "VLANs",
            f"Adapters are in VLANs by their settings: {vlans}. Here the network decides on VLANs.",
            "Map each to a network of this host that is in that VLAN (target.network_map).",
        )  # fmt: skip


def sector_bytes(drive: Mapping[str, Any]) -> int:
    """The size of the disk's sectors for its guest."""
    return max(int(drive["chain"][0].get("sector") or 0) if drive["chain"] else 0, SECTOR_BYTES)


def of_disk(key: str, drive: Mapping[str, Any]) -> Iterator[Concern]:
    """The concerns of one disk. `drive`: its part of the answer of inspect.ps1."""
    if drive["physical"]:
        yield _critical(
            f"disk-physical:{key}", "Pass-through disk",
            f"Disk {key} is a disk of the host itself: Hyper-V makes no snapshot of it, and it is not in a file.",
            "Skip it and move its data by the storage's own means, or convert it: New-VHD -SourceDisk.",
        )  # fmt: skip
    if drive["shared"] or str(drive["path"] or "").lower().endswith(".vhds"):
        yield _critical(
            f"disk-shared:{key}", "Shared disk",
            f"Disk {key} is shared by several VMs: Hyper-V takes no snapshot of it, and the writes of the others would not "
            "reach the copy.",
            "Shut the guest cluster down and move it together, or skip the disk.",
        )  # fmt: skip
    yield from shared.of_sectors(key, sector_bytes(drive))
    if int(drive["bus"]) == _PMEM:
        yield _warning(
            f"disk-pmem:{key}", "Persistent memory",
            f"Disk {key} is a persistent memory device for the guest. Here it is an ordinary disk.",
            "Check that the guest finds its file systems by their UUIDs or labels.",
        )  # fmt: skip
