"""The API's facts of a VM, as a VmManifest. No I/O; all of them come from outside.

A disk's key is its key in the configuration (`scsi0`), which also names QEMU's devices.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal
from uuid import UUID

from synvirt.live.proxmox import config as settings
from synvirt.live.proxmox.concerns import concerns
from synvirt.live.proxmox.config import Drive
from synvirt.live.proxmox.seen import Seen, Volume
from synvirt.machines import smbios
from synvirt.machines.concerns import snapshots_present
from synvirt.model.machine import Disk, GuestOs, Nic, Snapshot, VmManifest
from synvirt.sizes import MIB

# snapshot-access came with 7.0; a copy-before-write that never hinders the guest (on-cbw-error, cbw-timeout) came with 7.1.
LEAST_QEMU: Final = (7, 1)
# Before, an NBD export of a disk in an I/O thread may crash QEMU: client_close ran outside the main loop (found on 7.2.22).
LEAST_QEMU_IOTHREAD: Final = (9, 0)

# The values of `ostype` in qm(1).
_OS_NAMES: Final = {
    "l24": "Linux 2.4",
    "l26": "Linux",
    "solaris": "Solaris",
    "other": "",
    "w2k": "Windows 2000",
    "w2k3": "Windows Server 2003",
    "w2k8": "Windows Server 2008",
    "wvista": "Windows Vista",
    "wxp": "Windows XP",
    "win7": "Windows 7, Server 2008 R2",
    "win8": "Windows 8, Server 2012",
    "win10": "Windows 10, Server 2016, 2019",
    "win11": "Windows 11, Server 2022, 2025",
}


def manifest(seen: Seen) -> VmManifest:
    """The VM as a VmManifest, with the reasons why it cannot be copied warm."""
    config = seen.config
    of_all = untracked_vm(seen)
    drives = list(settings.drives(config))
    reasons = [*of_all, *(reason for drive in drives if (reason := untracked(drive, seen)) is not None)]
    uefi = config.get("bios") == "ovmf"
    efi = settings.volume_of(config, "efidisk0") if uefi else None  # it stays there when the firmware is changed back
    cores = max(settings.number(config.get("cores"), 1), 1)
    snapshots = tuple(_snapshots(seen))
    sockets = max(settings.number(config.get("sockets", config.get("smp")), 1), 1)
    return VmManifest(
        vm_id=seen.vm_id,
        name=str(config.get("name") or seen.row.get("name") or f"VM {seen.vm_id}"),
        uuid=_uuid(config),
        serial=_serial(config),
        host=str(seen.row.get("node", "")),
        power_state=seen.power_state,
        chipset=settings.chipset(seen.config),
        firmware="uefi" if uefi else "bios",
        secure_boot=efi is not None and efi.is_on("pre-enrolled-keys"),
        tpm="tpmstate0" in config,
        cpu_count=settings.number(config.get("vcpus"), 0) or cores * sockets,
        cores_per_socket=cores,
        memory_bytes=settings.number(settings.options(config.get("memory", 512), "current").get("current"), 512) * MIB,
        guest_os=guest_os(config, seen.os_info),
        cbt_available=not reasons,
        cbt_reason="; ".join(reasons) or None,
        disks=tuple(_disk(drive, seen, of_all) for drive in drives),
        nics=tuple(_nics(seen)),
        snapshots=snapshots,
        concerns=(*concerns(seen, drives), *([snapshots_present(len(snapshots))] if snapshots else [])),
    )


# ── change tracking ──────────────────────────────────────────────────────────────────────────────────────────────────


def untracked_vm(seen: Seen) -> list[str]:
    """Why no changes of this VM can be tracked."""
    if seen.no_reading is not None:
        return [seen.no_reading]
    if seen.power_state != "on":
        return [f"it is {seen.power_state}: QEMU tracks changes only while the guest runs"]
    if seen.qemu and seen.qemu < LEAST_QEMU:
        return [f"it runs in QEMU {_version(seen.qemu)}, and {_version(LEAST_QEMU)} is the first that reads a running guest so"]
    return []


def untracked(drive: Drive, seen: Seen) -> str | None:
    """Why the changes of this disk cannot be tracked."""
    in_thread = drive.is_on("iothread") and drive.bus in ("scsi", "virtio")
    if in_thread and seen.power_state == "on" and seen.qemu and seen.qemu < LEAST_QEMU_IOTHREAD:
        return (
            f"disk {drive.key} has an I/O thread, and in QEMU {_version(seen.qemu)} to read such a disk may end the guest "
            f"({_version(LEAST_QEMU_IOTHREAD)} and later are safe)"
        )
    return None


def _version(numbers: Sequence[int]) -> str:
    return ".".join(str(number) for number in numbers)


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _disk(drive: Drive, seen: Seen, of_all: list[str]) -> Disk:
    volume = seen.volumes.get(drive.volume)
    order = settings.boot_order(seen.config)
    own = untracked(drive, seen)
    return Disk(
        key=drive.key,
        label=drive.key,
        capacity_bytes=volume.size_bytes if volume is not None and volume.size_bytes else drive.size_bytes,
        used_bytes=None if volume is None or volume.used_bytes is None else min(volume.used_bytes, volume.size_bytes),
        format=disk_format(drive, volume),
        bus=drive.bus,
        controller=str(seen.config.get("scsihw", "lsi")) if drive.bus == "scsi" else "",
        unit=drive.unit,
        boot_order=order.index(drive.key) + 1 if drive.key in order else None,
        source_path=drive.volume,
        serial=drive.serial,
        cbt_enabled=drive.key in seen.tracked,
        cbt_reason="; ".join([*of_all, *([own] if own is not None else [])]) or None,
    )


def disk_format(drive: Drive, volume: Volume | None) -> str:
    """From the storage, else by the volume's name, as in Proxmox VE itself."""
    if volume is not None and volume.format:
        return volume.format
    suffix = drive.volume.rpartition(".")[2]
    return suffix if suffix in ("qcow2", "vmdk") else "raw"


def _nics(seen: Seen) -> Iterator[Nic]:
    addresses: dict[str, list[str]] = {}
    for one in seen.interfaces:
        found = one.get("ip-addresses")
        for address in found if isinstance(found, list) else ():
            if isinstance(address, dict) and "ip-address" in address:
                addresses.setdefault(str(one.get("hardware-address", "")).lower(), []).append(str(address["ip-address"]))
    for key, card in settings.nets(seen.config):
        mac = card.get("macaddr", "").lower() or None
        tag = card.get("tag", "")
        yield Nic(
            key=key,
            mac=mac,
            model=card.get("model", ""),
            network=card.get("bridge", "") + (f".{tag}" if tag else ""),
            connected=not settings.is_on(card.get("link_down")),
            linux_name=settings.linux_name(key, seen.config),
            ip_addresses=tuple(addresses.get(mac or "", ())),
        )


def _snapshots(seen: Seen) -> Iterator[Snapshot]:
    for one in seen.snapshots:
        name = str(one.get("name", ""))
        if name and name != "current":  # «current» is the VM itself
            made = settings.number(one.get("snaptime"), 0)
            yield Snapshot(id=name, name=name, created_at=datetime.fromtimestamp(made, UTC) if made else None)


def guest_os(config: Mapping[str, Any], os_info: Mapping[str, Any]) -> GuestOs:
    """By the agent, else by `ostype`, which was chosen when the VM was made."""
    kind = str(config.get("ostype", "other"))
    if os_info.get("id"):
        windows = os_info["id"] == "mswindows"
        name = str(os_info.get("pretty-name") or os_info.get("name") or "")
        return GuestOs(family="windows" if windows else "linux", id=str(os_info["id"]), name=name or _OS_NAMES.get(kind, kind))
    family: Literal["windows", "linux", "other"] = "other"
    if kind.startswith("w"):
        family = "windows"
    elif kind.startswith("l2"):
        family = "linux"
    return GuestOs(family=family, id=kind, name=_OS_NAMES.get(kind, kind))


def _uuid(config: Mapping[str, Any]) -> str | None:
    try:
        return str(UUID(_firmware_values(config).get("uuid", "")))
    except ValueError:
        return None


def _serial(config: Mapping[str, Any]) -> str | None:
    values = _firmware_values(config)
    written = values.get("serial", "")
    if settings.is_on(values.get("base64")):
        try:
            written = base64.b64decode(written, validate=True).decode()
        except ValueError:
            return None
    return smbios.serial_of(written)


def _firmware_values(config: Mapping[str, Any]) -> dict[str, str]:
    return settings.options(config.get("smbios1", ""), "uuid")
