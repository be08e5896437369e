"""The VM as its source describes it."""

from collections.abc import Callable, Collection, Iterable
from typing import Literal

from synvirt.model.values import Bytes, Model, Time
from synvirt.sizes import GIB, SECTOR_BYTES

DiskBus = Literal["virtio", "scsi", "sata", "ide", "nvme"]
# QEMU's: i440fx, which libvirt calls pc, with PCI; and q35, with PCI Express.
Chipset = Literal["q35", "pc"]


def chipset_named(machine: str) -> Chipset | None:
    """By QEMU's name of a machine: `pc-i440fx-7.2`, `pc-q35-7.2`, or `pc` and `q35`."""
    if machine == "q35" or machine.startswith("pc-q35"):
        return "q35"
    return "pc" if machine == "pc" or machine.startswith("pc-i440fx") else None


def letters(number: int) -> str:
    """0 is a, 25 is z, 26 is aa: as Linux names disks."""
    found = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        found = chr(ord("a") + letter) + found
    return found


Family = Literal["windows", "linux", "other"]


class GuestOs(Model):
    """The guest's system: its family, and the id and name that the source gives it."""

    family: Family = "other"
    id: str = ""
    name: str = ""


class Disk(Model):
    """A disk of the source VM. It is always named by its `key`, never by its place in a list."""

    key: str
    label: str
    capacity_bytes: Bytes
    used_bytes: Bytes | None = None
    format: str = "raw"
    bus: DiskBus = "scsi"
    controller: str = ""
    unit: int = 0
    boot_order: int | None = None
    source_path: str = ""
    # Its serial number as the guest reads it, a part of its name in /dev/disk/by-id. None: it has none, or the source does not
    # say.
    serial: str | None = None
    # The size of its sectors for the guest, by which that finds its partitions.
    sector_bytes: int = SECTOR_BYTES
    cbt_enabled: bool = False
    # Why its changes cannot be tracked or read. None: they can.
    cbt_reason: str | None = None
    # The way to read its bytes, where the platform has several (vSphere: vddk, datastore, esxi or lease).
    read_by: str | None = None

    @property
    def boot_place(self) -> tuple[bool, int]:
        """Sorts disks as they are booted from: those without an order come last."""
        return self.boot_order is None, self.boot_order or 0


class Nic(Model):
    """A network card. `key` is unique within its VM; `network`: the source's name for it."""

    key: str
    mac: str | None = None
    model: str = ""
    network: str = ""
    connected: bool = True
    # What a Linux calls it by its place there (systemd.net-naming-scheme(7)): ens192 in slot 192, enp0s3 in slot 3 of bus 0.
    # None: the source does not say.
    linux_name: str | None = None
    ip_addresses: tuple[str, ...] = ()


class Snapshot(Model):
    """A snapshot of the VM at its source."""

    id: str
    name: str = ""
    created_at: Time | None = None


class Concern(Model):
    """What may go wrong with this VM, seen before anything is copied."""

    id: str
    category: Literal["Critical", "Warning", "Information"]
    label: str
    assessment: str
    remedy: str


class VmManifest(Model):
    """A VM as its source describes it. Sizes are in bytes."""

    vm_id: str
    name: str
    uuid: str | None = None
    # Guests of these families read the bytes of each of its first three fields in reverse order (machines/smbios.py).
    uuid_reversed_for: tuple[Family, ...] = ()
    # The machine's serial number, as its firmware shows it. None: it has none, or the source does not say.
    serial: str | None = None
    # The platform's host that has the VM; empty where the platform is one host, or does not say.
    host: str = ""
    power_state: Literal["on", "off", "suspended", "unknown"] = "off"
    # None: it has another one, or the source does not say.
    chipset: Chipset | None = None
    firmware: Literal["bios", "uefi"] = "bios"
    secure_boot: bool = False
    tpm: bool = False
    cpu_count: int = 1
    cores_per_socket: int = 1
    memory_bytes: Bytes = GIB
    guest_os: GuestOs = GuestOs()
    cbt_available: bool = False
    cbt_reason: str | None = None
    disks: tuple[Disk, ...] = ()
    nics: tuple[Nic, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    concerns: tuple[Concern, ...] = ()

    def with_concerns(self, concerns: Iterable[Concern], *, in_place_of: Callable[[str], bool]) -> "VmManifest":
        """The manifest with these concerns, in place of those whose id `in_place_of` names."""
        others = (one for one in self.concerns if not in_place_of(one.id))
        return self.model_copy(update={"concerns": (*others, *concerns)})

    def cbt_reason_without(self, skipped: Collection[str]) -> str | None:
        """Why the VM cannot be copied warm without these disks; None: it can. A reason that concerns the whole VM is on each of
        its disks, or only in `cbt_reason`."""
        if self.cbt_available:
            return None
        if all(disk.cbt_reason is None for disk in self.disks):
            return self.cbt_reason or "its changes are not tracked"
        reasons = [disk.cbt_reason for disk in self.disks if disk.cbt_reason is not None and disk.key not in skipped]
        return "; ".join(dict.fromkeys(reasons)) or None
