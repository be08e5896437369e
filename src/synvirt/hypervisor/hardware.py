"""The hardware that the guest gets here: its ladder of disk buses, its machine type, its cards. Pure.

A guest boots from a bus only if it has a driver for it, and only a try shows that for sure. So the buses form a ladder: first
the best one that the guest should be able to boot from; each next one needs less of the guest.

    virtio   every Linux since 2008, unless its initramfs was made without; Windows, after drivers were installed
    scsi     virtio-scsi: other drivers of the same family, and the names (sda) that an old fstab may expect
    sata     AHCI: every system since 2008, without our drivers
    ide      the chipset of 1996: for older systems, and for a Linux whose initramfs has drivers for nothing else
"""

import hashlib
import re
from dataclasses import dataclass
from uuid import UUID

from synvirt.hypervisor.machine import Machine
from synvirt.machines.disk_drivers import first_bus
from synvirt.machines.disk_names import OTHER_SERIAL_CHARS, SCSI_SERIAL_CHARS, are_as_scsi, disk_serial
from synvirt.model.machine import Chipset, Disk, DiskBus, Nic, VmManifest
from synvirt.sizes import MIB

# A manifest without memory has 0, which libvirt refuses. Nothing boots with less than 64 MiB.
LEAST_MEMORY_BYTES = 64 * MIB
# libvirt defines no guest with more of them without an IOMMU, and ours have none.
VCPUS_MAX = 255

# An odd first octet is multicast: no card has that. Zeros stand for an address that is still to be chosen.
_MAC = re.compile(r"(?!00(:00){5})[0-9a-f][02468ace](:[0-9a-f]{2}){5}")
# UUIDs of firmware without its own: many machines have them.
_NO_UUIDS = frozenset({UUID(int=0), UUID(int=(1 << 128) - 1)})


@dataclass(frozen=True, slots=True)
class Bus:
    """`prefix`: of its disks' names in libvirt; `card`: the network card of a guest that boots from it; `needs`: what a guest
    needs for it; `any_sectors`: whether its disks can have sectors of another size than 512 bytes. q35 has no IDE, so that bus
    comes with the older chipset, i440fx, which libvirt calls pc."""

    prefix: str
    card: str
    needs: str
    chipset: Chipset = "q35"
    controller: str | None = None
    any_sectors: bool = False


BUSES: dict[DiskBus, Bus] = {
    "virtio": Bus("vd", "virtio", "the fastest; the guest has its drivers", any_sectors=True),
    "scsi": Bus("sd", "virtio", "virtio-scsi needs the guest's virtio drivers too", controller="virtio-scsi", any_sectors=True),
    "sata": Bus("sd", "e1000e", "every system since 2008 has a driver for it"),
    "ide": Bus("hd", "e1000", "even the oldest systems have a driver for it", chipset="pc"),
}
LADDER: tuple[DiskBus, ...] = tuple(BUSES)
# Of a guest whose own files name its disks sda, sdb …: the buses by which they are called so come first.
LADDER_OF_SCSI_NAMES: tuple[DiskBus, ...] = ("scsi", "sata", "virtio", "ide")
# Sectors that a disk can have by some buses, besides those of 512 bytes.
_LARGE_SECTORS = frozenset({1024, 2048, 4096, 8192, 16384, 32768})
# What a guest whose family is not known should be able to boot from, best guess first.
LADDER_OF_UNKNOWN: tuple[DiskBus, ...] = ("sata", "virtio", "scsi", "ide")
# One controller, two channels, a master and a slave on each: what does not fit goes to SATA.
IDE_DISKS_MAX = 4

# Systems without drivers for AHCI or PCI Express: Windows before Vista, Linux before 2.6.25, DOS and similar ones. VMware
# writes «CentOS 4/5 or later» when it does not know.
_OLD = re.compile(
    r"win(dows)?[ _-]?(xp|2000|2003|2k3|2k\b|net|nt|95|98|me\b)|windows server 2003|\bdos\b|netware|os/?2\b"
    r"|(rhel|red ?hat|centos|oracle)\D{0,24}[234](_64)?(guest)?\b(?!/)"
    r"|(sles\D{0,24}(8|9|10)|debian\D{0,12}[34])(_64)?(guest)?\b(?!/)",
    re.IGNORECASE,
)

# Cards that QEMU emulates, by the names that sources use. If the guest has used one, it needs no new driver for it.
_SAME_CARD = {
    "e1000": "e1000",
    "e1000e": "e1000e",
    "rtl8139": "rtl8139",
    "vlance": "pcnet",
    "pcnet": "pcnet",
    "pcnet32": "pcnet",
}


def is_old(manifest: VmManifest) -> bool:
    return _OLD.search(f"{manifest.guest_os.id} | {manifest.guest_os.name}") is not None


def has_virtio(machine: Machine) -> bool:
    """Whether the guest surely has virtio drivers: Linux, except the oldest, and Windows with installed drivers."""
    manifest = machine.manifest
    match manifest.guest_os.family:
        case "linux":
            return not is_old(manifest)
        case "windows":
            return machine.has_drivers
        case _:
            return False


def ladder(machine: Machine) -> tuple[DiskBus, ...]:
    """The buses to try, in this order; only one, if the plan names it."""
    manifest, wanted = machine.manifest, machine.target.disk_bus
    rungs: tuple[DiskBus, ...]
    if wanted in BUSES:
        rungs = (wanted,)
    elif has_virtio(machine):
        named = LADDER_OF_SCSI_NAMES if are_as_scsi(manifest) else LADDER
        rungs = tuple(sorted(named, key=lambda bus: bus != first_bus(manifest)))
    elif is_old(manifest):
        rungs = ("ide", "sata")
    else:
        boot = _boot_disk(manifest)
        known = boot.bus if boot is not None and boot.bus in ("virtio", "sata", "ide") else "sata"
        rungs = (known, *(bus for bus in LADDER_OF_UNKNOWN if bus != known))
    if wanted not in BUSES and any(
        disk.sector_bytes in _LARGE_SECTORS for disk in manifest.disks if disk.key not in machine.skipped
    ):
        rungs = tuple(bus for bus in LADDER if BUSES[bus].any_sectors)
    if manifest.firmware == "uefi" and (manifest.secure_boot or not _by_ide(machine)):
        rungs = tuple(bus for bus in rungs if bus != "ide") or ("sata",)
    return rungs


def _by_ide(machine: Machine) -> bool:
    """Whether IDE is asked for, or needed. Nothing that boots by UEFI is so old that it would be worth a try otherwise."""
    return "ide" in (machine.target.disk_bus, first_bus(machine.manifest))


def bus_now(machine: Machine) -> DiskBus:
    """The bus of the machine's present rung."""
    return machine.attempts[-1].disk_bus if machine.attempts else ladder(machine)[0]


def chipset_of(machine: Machine) -> Chipset:
    """The bus's; or the source's older one, where a guest boots from the bus by it too. Secure Boot needs the newer one."""
    if machine.manifest.chipset == "pc" and not machine.manifest.secure_boot:
        return "pc"
    return BUSES[bus_now(machine)].chipset


def bus_of(number: int, bus: DiskBus) -> DiskBus:
    """The bus of the domain's disk of that number, counted from 0."""
    return "sata" if bus == "ide" and number >= IDE_DISKS_MAX else bus


def large_sectors(disk: Disk, bus: DiskBus) -> str | None:
    """The size of the disk's sectors here, on that bus, where it is not 512 bytes."""
    return str(disk.sector_bytes) if disk.sector_bytes in _LARGE_SECTORS and BUSES[bus].any_sectors else None


def why_bus(machine: Machine) -> str:
    """Why the guest gets its present disk bus, as a sentence."""
    bus = bus_now(machine)
    failed = [attempt for attempt in machine.attempts if attempt.trouble is not None]
    if failed:
        return f"the guest did not boot from {failed[-1].disk_bus}; {BUSES[bus].needs}"
    if machine.target.disk_bus == bus:
        return "target.disk_bus asks for it"
    if machine.target.disk_bus is not None and machine.target.disk_bus not in BUSES:
        return f"this hypervisor has no {machine.target.disk_bus} disks, which target.disk_bus asks for; {BUSES[bus].needs}"
    if first_bus(machine.manifest) == bus:
        return "the guest's initramfs has a driver for it, and none for virtio"
    if are_as_scsi(machine.manifest) and BUSES[bus].prefix == "sd":
        return "the guest itself names its disks as they are called by it"
    return BUSES[bus].needs


def card(machine: Machine, nic: Nic) -> str:
    """virtio for a guest that boots with virtio; else the card it had, if QEMU has it; else one of its time and chipset."""
    bus = bus_now(machine)
    if BUSES[bus].card == "virtio" and (has_virtio(machine) or nic.model.lower().startswith("virtio")):
        return "virtio"
    if (same := _SAME_CARD.get(nic.model.lower())) and not (same == "e1000e" and chipset_of(machine) == "pc"):
        return same
    if is_old(machine.manifest):
        return "rtl8139"
    # e1000e is a card of PCI Express.
    return "e1000" if chipset_of(machine) == "pc" else "e1000e"


# ── identity, processors, memory ─────────────────────────────────────────────────────────────────────────────────────


def uuid_of(machine: Machine) -> UUID:
    """The source's UUID as its guest reads it, because licences and cloud-init use that; a new one, where the source has none
    or it is not to be kept."""
    manifest = machine.manifest
    if _is_itself(machine):
        try:
            known = UUID(manifest.uuid or "")
        except ValueError:
            return machine.id
        if known in _NO_UUIDS:
            return machine.id
        # QEMU's SMBIOS is later than 2.5: every guest reads the domain's UUID as it is.
        return UUID(bytes_le=known.bytes) if manifest.guest_os.family in manifest.uuid_reversed_for else known
    return machine.id


def serial_of(machine: Machine) -> str | None:
    """The serial number that the guest's firmware shows, which licences and inventories use as well."""
    return machine.manifest.serial if _is_itself(machine) else None


def _is_itself(machine: Machine) -> bool:
    """Whether its guest is the source's, and not a copy of it with an identity of its own."""
    return machine.target.identity == "keep" and not machine.rehearsed


def macs(machine: Machine) -> dict[str, str]:
    """Each card's MAC address, by its key: the source's; a new one, where that is missing, comes twice or is not to be kept."""
    given: dict[str, str] = {}
    for nic in machine.manifest.nics:
        mac = (nic.mac or "").strip().lower().replace("-", ":")
        kept = machine.target.identity == "keep" and _MAC.fullmatch(mac) and mac not in given.values()
        given[nic.key] = mac if kept else own_mac(machine.id, nic.key)
    return given


def own_mac(job_id: UUID, key: str) -> str:
    """A MAC address with QEMU's usual prefix, 52:54:00. The rest depends on job and card, so that it stays the same."""
    digest = digest_of(job_id, "nic", key)
    return ":".join(("52:54:00", digest[:2], digest[2:4], digest[4:6]))


def disk_serials(machine: Machine) -> dict[str, str]:
    """Each disk's serial number, by its key: the source's, by which a guest may find it (/dev/disk/by-id), a copy's guest too;
    one of our own, where it has none, or another disk has the same."""
    chars = SCSI_SERIAL_CHARS if bus_now(machine) == "scsi" else OTHER_SERIAL_CHARS
    given: dict[str, str] = {}
    for disk in machine.manifest.disks:
        own = (disk_serial(disk.serial) or "")[:chars]
        given[disk.key] = own if own and own not in given.values() else digest_of(machine.id, disk.key)[:OTHER_SERIAL_CHARS]
    return given


def processors(machine: Machine) -> tuple[int, int]:
    """The sockets, and the cores of each socket: the source's cores, if the count can be divided by them."""
    manifest = machine.manifest
    count = max(machine.target.cpu_count or manifest.cpu_count, 1)
    cores = manifest.cores_per_socket
    if cores < 1 or count % cores:
        cores = 1
    return count // cores, cores


def memory_bytes(machine: Machine) -> int:
    """The memory in whole MiB, as QEMU takes no other: libvirt would round it up by itself, unseen."""
    wanted = machine.target.memory_bytes or machine.manifest.memory_bytes
    return max(-(-wanted // MIB) * MIB, LEAST_MEMORY_BYTES)


def digest_of(job_id: UUID, *parts: str) -> str:
    return hashlib.sha256("\0".join((str(job_id), *parts)).encode("utf-8", "surrogatepass")).hexdigest()


def _boot_disk(manifest: VmManifest) -> Disk | None:
    ordered = sorted(manifest.disks, key=lambda disk: disk.boot_place)
    return next(iter(ordered), None)
