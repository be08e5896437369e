"""A libvirt domain as a VmManifest: libvirt.org/formatdomain.html. Its XML comes from another host and is hostile.

A disk's key is its target (`vda`): no two disks of a domain share one, and libvirt's own backups name disks by it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal
from xml.etree.ElementTree import Element

from synvirt import xml_document
from synvirt.errors import Internal
from synvirt.kvm.foreign_domain import rebuilt
from synvirt.live.libvirt.card_places import chipset_of, linux_name
from synvirt.live.libvirt.settings import not_taken_over
from synvirt.machines import smbios
from synvirt.machines.concerns import left_out, of_sectors, settings_left_out, snapshots_present
from synvirt.machines.disk_names import disk_serial
from synvirt.model.machine import Concern, Disk, DiskBus, GuestOs, Nic, Snapshot, VmManifest
from synvirt.sizes import GIB, KIB, MIB, SECTOR_BYTES, TIB

# libvirt itself refuses more than 4 MiB over its own protocol (VIR_NET_MESSAGE_MAX is 32 MiB, strings 4 MiB).
AGENT_CHANNEL = "org.qemu.guest_agent.0"
_UNITS = {"": KIB, "b": 1, "bytes": 1, "KB": 1000, "k": KIB, "KiB": KIB, "MB": 10**6, "M": MIB, "MiB": MIB}
_UNITS |= {"GB": 10**9, "G": GIB, "GiB": GIB, "TB": 10**12, "T": TIB, "TiB": TIB}
# In the names of files with UEFI's firmware: OVMF.fd, edk2-x86_64-code.fd.
_UEFI_FILES = ("ovmf", "edk2")
_BUSES: dict[str, DiskBus] = {"virtio": "virtio", "scsi": "scsi", "sata": "sata", "ide": "ide", "usb": "sata", "sd": "sata"}

PowerState = Literal["on", "off", "suspended", "unknown"]


@dataclass(frozen=True, slots=True)
class DiskSize:
    """A disk's size, and how much of it is allocated, in bytes."""

    capacity_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Seen:
    """Facts beyond the XML: the sizes by target, the power state, the tracked disks, the guest agent's facts, and other things.
    `why_off_unknown`: it is off, and libvirt does not know why. `too_old`, `unreadable`: why its host cannot track changes, or
    cannot have disks read at all."""

    sizes: dict[str, DiskSize]
    power_state: PowerState
    persistent: bool = True
    why_off_unknown: bool = False
    saved: bool = False
    tracked: frozenset[str] = frozenset()
    guest: dict[str, str] | None = None
    addresses: dict[str, tuple[str, ...]] | None = None
    snapshots: tuple[Snapshot, ...] = ()
    too_old: str | None = None
    unreadable: str | None = None


def parse(xml: str) -> Element:
    """Internal, where libvirt would not write such XML."""
    return xml_document.parse(xml, "libvirt's XML", wrong=Internal)


def data_disks(domain: Element) -> Iterator[tuple[str, Element]]:
    """The VM's own disks: (target, element). No CD-ROMs, no floppies, no empty drives."""
    for disk in domain.iterfind("devices/disk"):
        target = disk.find("target")
        if disk.get("device", "disk") in ("disk", "lun") and target is not None and disk.find("source") is not None:
            yield target.get("dev", ""), disk


def backed_up_disks(domain: Element) -> Iterator[tuple[str, Element]]:
    """The disks that a backup job can freeze: not the host's own SCSI devices, which are passed through."""
    return ((key, disk) for key, disk in data_disks(domain) if disk.get("device") != "lun")


def untracked(domain: Element) -> dict[str, str]:
    """The reason for each disk, by key, whose changes cannot be tracked: only qcow2 has persistent bitmaps."""
    reasons = {}
    for key, disk in data_disks(domain):
        kind = disk_format(disk)
        if disk.get("device") == "lun":
            reasons[key] = f"disk {key} is a device of its host, which libvirt cannot back up"
        elif kind != "qcow2":
            reasons[key] = f"disk {key} is {kind}, which cannot hold a bitmap of its changes (qcow2 can)"
        elif disk.find("transient") is not None or disk.find("readonly") is not None:
            kind = "transient" if disk.find("transient") is not None else "read-only"
            reasons[key] = f"disk {key} is {kind}: libvirt does not track changes of such disks"
    return reasons


def disk_format(disk: Element) -> str:
    """The format of a disk in its domain; `raw` where it has none."""
    driver = disk.find("driver")
    return (driver.get("type") if driver is not None else None) or "raw"


def agent_connected(domain: Element) -> bool:
    """Whether the guest agent of a running domain is connected, by the domain's XML."""
    return any(
        target.get("name") == AGENT_CHANNEL and target.get("state") == "connected"
        for target in domain.iterfind("devices/channel/target")
    )


def manifest(domain: Element, seen: Seen) -> VmManifest:
    """The domain as a VmManifest, with the reasons why it cannot be copied warm."""
    of_all = [seen.too_old] if seen.too_old else []
    if not seen.persistent:
        of_all.append("the domain is transient: its checkpoints would be lost when it stops")
    of_disks = untracked(domain)
    reasons = [*of_all, *of_disks.values()]
    uefi, secure_boot = _firmware(domain)
    topology = domain.find("cpu/topology")
    threads = _number(topology.get("threads")) if topology is not None else 1
    uuid = _text(domain, "uuid")
    return VmManifest(
        vm_id=uuid,
        name=_text(domain, "name"),
        uuid=uuid,
        serial=_serial(domain),
        power_state=seen.power_state,
        chipset=chipset_of(domain),
        firmware="uefi" if uefi else "bios",
        secure_boot=secure_boot,
        tpm=domain.find("devices/tpm") is not None,
        cpu_count=_processors(domain),
        cores_per_socket=max(_number(topology.get("cores")) * max(threads, 1), 1) if topology is not None else 1,
        memory_bytes=_memory(domain),
        guest_os=guest_os(domain, seen.guest or {}),
        cbt_available=not reasons,
        cbt_reason="; ".join(reasons) or None,
        disks=tuple(_disks(domain, seen, of_all, of_disks)),
        nics=tuple(_nics(domain, seen.addresses or {})),
        snapshots=seen.snapshots,
        concerns=tuple(_concerns(domain, seen)),
    )


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _text(element: Element, path: str) -> str:
    found = element.find(path)
    return (found.text or "").strip() if found is not None else ""


def _number(text: str | None) -> int:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,12}", text) else 0


def _firmware(domain: Element) -> tuple[bool, bool]:
    """(UEFI?, Secure Boot?). Where libvirt chooses the firmware, versions before 9.2 name it only while the domain runs; what
    it is chosen by is always there. A firmware in one file, as the loader of a BIOS, is known by its name alone."""
    loader = domain.find("os/loader")
    kind, path = (loader.get("type"), (loader.text or "").lower()) if loader is not None else (None, "")
    uefi = domain.find("os[@firmware='efi']") is not None or kind == "pflash" or any(name in path for name in _UEFI_FILES)
    wanted = domain.find("os/firmware/feature[@name='secure-boot'][@enabled='yes']") is not None
    return uefi, uefi and (wanted or (loader is not None and loader.get("secure") == "yes"))


def _processors(domain: Element) -> int:
    """Those that the guest has; it may have got fewer than the most that can be plugged in."""
    vcpu = domain.find("vcpu")
    present = _number(vcpu.get("current")) if vcpu is not None else 0
    return present or max(_number(_text(domain, "vcpu")), 1)


def _serial(domain: Element) -> str | None:
    if domain.find("os/smbios[@mode='sysinfo']") is None:
        return None
    return smbios.serial_of(_text(domain, "sysinfo/system/entry[@name='serial']"))


def _memory(domain: Element) -> int:
    """The guest's present memory; `memory` is the most that it may get."""
    for path in ("currentMemory", "memory"):
        found = domain.find(path)
        if found is not None:
            return _number((found.text or "").strip()) * _UNITS.get(found.get("unit", ""), KIB)
    return 0


def guest_os(domain: Element, reported: dict[str, str]) -> GuestOs:
    """By the agent, else by libosinfo's mark, which was chosen when the domain was made."""
    if reported:
        windows = reported.get("id") == "mswindows"
        name = reported.get("pretty-name") or reported.get("name") or ("Windows" if windows else "Linux")
        return GuestOs(family="windows" if windows else "linux", id=reported.get("id", ""), name=name)
    mark = domain.find(".//{http://libosinfo.org/xmlns/libvirt/domain/1.0}os")
    known = mark.get("id", "") if mark is not None else ""
    if not known:
        return GuestOs()
    family: Literal["windows", "other", "linux"] = "linux"
    if "microsoft.com/" in known:
        family = "windows"
    elif re.search(r"bsd|solaris|apple|haiku|novell|reactos|oracle\.com/solaris", known, re.IGNORECASE):
        family = "other"
    return GuestOs(family=family, id=known, name=known.rstrip("/").split("/", 3)[-1])


def _disks(domain: Element, seen: Seen, of_all: list[str], of_disks: dict[str, str]) -> Iterator[Disk]:
    boots = [boot.get("dev") for boot in domain.iterfind("os/boot")]
    # Without any order libvirt boots the first disk; a domain with an order of devices has no other one.
    boots_first = "hd" in boots or (not boots and domain.find("devices/*/boot") is None)
    for number, (key, disk) in enumerate(data_disks(domain)):
        size = seen.sizes.get(key, DiskSize(0, 0))
        target, address, boot = disk.find("target"), disk.find("address"), disk.find("boot")
        order = _number(boot.get("order")) if boot is not None else 0
        if not order and number == 0 and boots_first:
            order = 1
        yield Disk(
            key=key,
            label=key,
            capacity_bytes=size.capacity_bytes,
            used_bytes=size.used_bytes,
            format=disk_format(disk),
            bus=_BUSES.get(target.get("bus", "") if target is not None else "", "scsi"),
            controller=address.get("controller", "") if address is not None else "",
            unit=_number(address.get("unit")) if address is not None else 0,
            boot_order=order or None,
            source_path=path_of(disk),
            serial=_serial_of_disk(disk),
            sector_bytes=_sector_bytes(disk),
            cbt_enabled=key in seen.tracked,
            cbt_reason="; ".join([*of_all, *([of_disks[key]] if key in of_disks else [])]) or None,
        )


def _serial_of_disk(disk: Element) -> str | None:
    """What the guest reads: of a disk on SCSI without a serial number, libvirt's name for the drive (`device_id`)."""
    given, address = disk.findtext("serial"), disk.find("address[@type='drive']")
    if given is None and address is not None and disk.find("target[@bus='scsi']") is not None:
        return "drive-scsi" + "-".join(address.get(part, "0") for part in ("controller", "bus", "target", "unit"))
    return disk_serial(given)


def _sector_bytes(disk: Element) -> int:
    blocks = disk.find("blockio")
    return max(_number(blocks.get("logical_block_size")), SECTOR_BYTES) if blocks is not None else SECTOR_BYTES


def path_of(disk: Element) -> str:
    """Where its image lies; empty, where it has no path."""
    source = disk.find("source")
    if source is None:
        return ""
    if source.get("pool") is not None:
        return f"{source.get('pool')}/{source.get('volume')}"
    return next((value for name in ("file", "dev", "name", "dir") if (value := source.get(name))), "")


def _nics(domain: Element, addresses: dict[str, tuple[str, ...]]) -> Iterator[Nic]:
    for number, card in enumerate(domain.iterfind("devices/interface")):
        source, model, mac, link = (card.find(tag) for tag in ("source", "model", "mac", "link"))
        address = mac.get("address") if mac is not None else None
        network = next((value for tag in ("network", "bridge", "dev") if source is not None and (value := source.get(tag))), "")
        yield Nic(
            key=f"nic-{number}",
            mac=address,
            model=model.get("type", "") if model is not None else "",
            network=network,
            connected=link is None or link.get("state") != "down",
            linux_name=linux_name(domain, card),
            ip_addresses=addresses.get((address or "").lower(), ()),
        )


# The concerns of a domain's state: when each applies.
_OF_STATE: Final[tuple[tuple[Callable[[Seen], bool], Concern], ...]] = (
    (
        lambda seen: not seen.persistent,
        Concern(
            id="transient-domain",
            category="Critical",
            label="Transient domain",
            assessment="it is gone from its host as soon as it is shut down, and could not be powered on again",
            remedy="Make it persistent first: virsh dumpxml NAME > x.xml; virsh define x.xml.",
        ),
    ),
    (
        lambda seen: seen.saved,
        Concern(
            id="saved-memory",
            category="Critical",
            label="Saved memory",
            assessment="its memory was saved to a file (managed save), and the disks alone are not the whole VM",
            remedy="Start it and shut it down, or drop the saved memory: virsh managedsave-remove NAME.",
        ),
    ),
    (
        lambda seen: seen.power_state == "unknown",
        Concern(
            id="elsewhere",
            category="Critical",
            label="Migrated to another host",
            assessment="it was live-migrated, or is being migrated, to another host, and stays defined on this one: its guest "
            "runs there, on the same disks; or its libvirtd was restarted while it ran, and does not know what became of it",
            remedy="Add that host as a source, and move the VM from there; if it runs nowhere, start it here first.",
        ),
    ),
    (
        lambda seen: seen.power_state != "unknown" and seen.why_off_unknown,
        Concern(
            id="off-unknown",
            category="Information",
            label="Off for an unknown reason",
            assessment="it is off, and libvirt does not know why: its libvirtd was restarted since, or it was never started; "
            "a guest that was live-migrated to another host, and stays defined on this one, looks the same",
            remedy="Make sure that it runs on no other host, on the same disks.",
        ),
    ),
    (
        lambda seen: seen.power_state == "suspended",
        Concern(
            id="suspended",
            category="Critical",
            label="Suspended VM",
            assessment="what it has in its memory is not moved, and is lost when it is powered off for the cut-over",
            remedy="Resume it, or shut it down, at the source first.",
        ),
    ),
)


def _concerns(domain: Element, seen: Seen) -> Iterator[Concern]:
    if seen.unreadable:
        yield Concern(
            id="host-unreadable",
            category="Critical",
            label="Disks cannot be read",
            assessment=seen.unreadable,
            remedy="Upgrade libvirt there, or import the VM's files: synvirt import PATH.",
        )
    yield from (concern for applies, concern in _OF_STATE if applies(seen))
    if seen.snapshots:
        yield snapshots_present(len(seen.snapshots))
    for key, disk in data_disks(domain):
        yield from _concerns_of_disk(key, disk, seen)
    yield from _attached_twice(domain)
    if domain.find("devices/hostdev") is not None:
        yield Concern(
            id="host-devices",
            category="Warning",
            label="Devices of the host",
            assessment="it uses devices of its host (hostdev), which are not migrated",
            remedy="Give it such devices here after the migration.",
        )
    # Devices of the host, passed through or as disks, have concerns of their own above.
    harmless = rebuilt(domain)
    items = [one for one in harmless.left_out if not one.startswith(("devices/hostdev", "devices/disk@device=lun"))]
    if items:
        yield left_out(items)
    windows = guest_os(domain, seen.guest or {}).family == "windows"
    if settings := not_taken_over(harmless.root, windows=windows):
        yield settings_left_out(settings)


def _attached_twice(domain: Element) -> Iterator[Concern]:
    """Of disks that the domain has by another target, too: each but the first."""
    first: dict[tuple[str | None, str], str] = {}
    for key, disk in data_disks(domain):
        place = (disk.get("type"), path_of(disk))
        # Of network disks the name alone is not their place.
        if disk.get("type") != "network" and place[1] and first.setdefault(place, key) != key:
            yield Concern(
                id=f"disk-twice:{key}",
                category="Critical",
                label="Disk that is attached twice",
                assessment=f"disk {key} is the same as disk {first[place]}: here they would be two disks, and a guest that "
                "takes both for one would damage its files",
                remedy="Name it in skip_disks: the guest then has one path to the disk.",
            )


def _concerns_of_disk(key: str, disk: Element, seen: Seen) -> Iterator[Concern]:
    if seen.sizes.get(key, DiskSize(0, 0)).capacity_bytes == 0:
        yield Concern(
            id=f"disk-unknown-size:{key}",
            category="Critical",
            label="Disk of unknown size",
            assessment=f"libvirt does not say how large disk {key} is",
            remedy="Name the disk in skip_disks, or start the VM and inspect it again.",
        )
    yield from of_sectors(key, _sector_bytes(disk))
    if disk.find("shareable") is not None:
        yield Concern(
            id=f"disk-shared:{key}",
            category="Warning",
            label="Shared disk",
            assessment=f"disk {key} is shared with other VMs, which would go on writing to the old one",
            remedy="Move the VMs that share it together, or name it in skip_disks.",
        )
    if disk.find("transient") is not None:
        yield Concern(
            id=f"disk-forgets:{key}",
            category="Warning",
            label="Disk that discards its changes",
            assessment=f"disk {key} loses what the guest wrote when the VM stops (transient), and does not do so here",
            remedy="Nothing, if the guest may keep what it writes.",
        )
    another = disk.find("serial") is not None and _serial_of_disk(disk) is None
    if another or any(disk.find(tag) is not None for tag in ("wwn", "vendor", "product")):
        yield Concern(
            id=f"disk-number:{key}",
            category="Information",
            label="Serial number of a disk",
            assessment=f"disk {key} has a serial number or name of its own, and another one here",
            remedy="Where the guest finds its disks by /dev/disk/by-id, have it find them by UUID.",
        )
    if disk.find("encryption") is not None or disk.find("source/encryption") is not None:
        yield Concern(
            id=f"disk-decrypted:{key}",
            category="Warning",
            label="Disk that is encrypted by its host",
            assessment=f"disk {key} is encrypted by its host (LUKS): it is read as its guest sees it, and is in the clear here",
            remedy="Choose a destination that is encrypted itself, if it must be.",
        )
    if disk.get("device") == "lun":
        yield Concern(
            id=f"disk-passed-through:{key}",
            category="Critical",
            label="SCSI device of the host",
            assessment=f"disk {key} is a device of its host, which libvirt cannot back up",
            remedy="Name it in skip_disks and copy it separately.",
        )
