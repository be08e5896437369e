"""VirtualBox's own description of a machine: the Machine element of a .vbox file, and of the OVF that VirtualBox exports.

VirtualBox, «Machine settings» (src/VBox/Main/xml/VirtualBox-settings.xsd). Version 1.19 moved some elements from Machine into
Hardware, 1.20 some of Hardware into Platform, and those of BIOS into Firmware; all places are read.

    Machine
    ├── MediaRegistry/HardDisks/HardDisk: uuid, location     a HardDisk in a HardDisk differs from the outer one
    ├── Snapshot: name, timeStamp; Snapshots/Snapshot …      a tree
    ├── Hardware: CPU, Memory, Firmware, Network, …
    └── StorageControllers/StorageController/AttachedDevice/Image: uuid     the present state, the newest of each chain
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from xml.etree.ElementTree import Element

from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.machines import card_names, concerns, reaching, smbios
from synvirt.machines.guest_os import guest_os
from synvirt.machines.texts import clean, is_true, uuid_of, whole_number
from synvirt.model.machine import Concern, Disk, DiskBus, Nic, Snapshot, VmManifest
from synvirt.sizes import MIB
from synvirt.xml_document import attribute, child, children, local
from synvirt.xml_document import parse as parse_xml

_NIC_MODELS = {"am79c970a": "pcnet32", "am79c973": "pcnet32", "82540em": "e1000", "82543gc": "e1000", "82545em": "e1000"}
# The kinds of network attachment: the element's name, in the words that VirtualBox's own OVF export uses for the network.
_ATTACHMENTS = {
    "NAT": "NAT",
    "BridgedInterface": "Bridged",
    "HostOnlyInterface": "HostOnly",
    "InternalNetwork": "Internal",
    "NATNetwork": "NATNetwork",
    "HostOnlyNetwork": "HostOnlyNetwork",
    "GenericInterface": "Generic",
}
# Where a person gives its firmware's DMI values (manual, «Configuring the BIOS DMI information»).
_DMI = re.compile(r"VBoxInternal/Devices/(pcbios|efi)/0/Config/(Dmi\w+)")


# By the type of a StorageController; guests see a USB controller's disks as SCSI disks.
_BUSES: dict[str, DiskBus] = {"piix3": "ide", "piix4": "ide", "ich6": "ide", "ahci": "sata", "nvme": "nvme"}
# VirtualBox' own limit is 30 ports on SATA, 255 on NVMe.
_DISKS_MAX = 1000
_CPUS_MAX, _MEMORY_MAX_MIB = 1024, 64 << 20


@dataclass(frozen=True, slots=True)
class Medium:
    """A hard disk of the media registry. `location` is relative to the machine's folder, or absolute on its own host. `sort` is
    Normal, Writethrough, Shareable, …; the children of a medium have its sort. `parent` is the parent's UUID."""

    uuid: str
    location: str
    encrypted: bool = False
    sort: str = ""
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """A parsed .vbox: `attached` has the UUID of each disk's medium by the disk's key, `media` the registry by UUID."""

    manifest: VmManifest
    attached: Mapping[str, str]
    media: Mapping[str, Medium]


def parse(data: bytes, name: str) -> Machine:
    """A .vbox file as a Machine. MalformedArchive; UnsupportedFormat where it is encrypted."""
    root = parse_xml(data, name)
    if local(root.tag) != "VirtualBox":
        raise MalformedArchive(
            f"{name} is not a description of a VirtualBox machine: its root element is {local(root.tag)[:60]!r}"
        )
    machine = child(root, "Machine")
    if machine is None:
        if child(root, "MachineEncrypted") is not None:
            raise UnsupportedFormat(
                f"{name} is encrypted: the machine can be read with its password only",
                hint="Remove the machine's encryption in VirtualBox (Settings, General, Disk Encryption).",
            )
        raise MalformedArchive(f"{name} has no Machine: it may be VirtualBox' global file, which describes no machine")
    media = _media(machine, name)
    disks, attached = _disks(machine, name)
    sorts = {key: media[uuid].sort for key, uuid in attached.items() if uuid in media}
    return Machine(_manifest(machine, disks, _sort_concerns(sorts), sorts), attached, media)


def _sort_concerns(sorts: Mapping[str, str]) -> list[Concern]:
    found: list[Concern] = []
    for key, sort in sorts.items():
        if sort == "shareable":
            found.append(concerns.shared_disk(key))
        elif sort in ("writethrough", "immutable"):
            found.append(concerns.independent_disk(key, sort))
    return found


def _media(machine: Element, name: str) -> dict[str, Medium]:
    registry = child(child(machine, "MediaRegistry"), "HardDisks")
    media: dict[str, Medium] = {}
    waiting: list[tuple[Element, Medium | None]] = [] if registry is None else [(registry, None)]
    while waiting:
        outer, parent = waiting.pop()
        for element in children(outer, "HardDisk"):
            uuid = uuid_of(attribute(element, "uuid"))
            if uuid is None:
                raise MalformedArchive(f"{name}: a hard disk of the media registry has no UUID")
            if uuid in media:
                raise MalformedArchive(f"{name}: two hard disks have the UUID {uuid}")
            keys = (attribute(each, "name") for each in children(element, "Property"))
            media[uuid] = Medium(
                uuid,
                attribute(element, "location"),
                any(key.startswith("CRYPT/") for key in keys),
                parent.sort if parent else attribute(element, "type").lower(),
                parent.uuid if parent else None,
            )
            waiting.append((element, media[uuid]))
    return media


def _disks(machine: Element, name: str) -> tuple[tuple[Disk, ...], dict[str, str]]:
    disks: list[Disk] = []
    attached: dict[str, str] = {}
    numbers: dict[DiskBus, int] = {}
    for controller in _controllers(machine):
        bus = _BUSES.get(attribute(controller, "type").lower(), "scsi")
        number = numbers[bus] = numbers.get(bus, -1) + 1
        # They are written as they were attached; the firmware boots them by their places.
        for device in sorted(children(controller, "AttachedDevice"), key=_port):
            uuid = uuid_of(attribute(child(device, "Image"), "uuid"))
            if attribute(device, "type") != "HardDisk" or uuid is None:
                continue
            port, slave = _port(device)
            # The only VirtualBox IDE controller has two channels of two devices each; other buses have one disk per port.
            place = (f"ide{number * 2 + port}", slave) if bus == "ide" else (f"{bus}{number}", port)
            key = f"{place[0]}:{place[1]}"
            if key in attached or len(disks) >= _DISKS_MAX:
                raise MalformedArchive(f"{name}: two disks are attached at {key}, or over {_DISKS_MAX} in all")
            attached[key] = uuid
            label = f"{attribute(controller, 'name') or bus} {port}" + (f"-{slave}" if bus == "ide" else "")
            disks.append(
                Disk(key=key, label=clean(label), capacity_bytes=0, format="vdi", bus=bus, controller=place[0], unit=place[1])
            )
    return tuple(disks), attached


def _port(device: Element) -> tuple[int, int]:
    """The port of an AttachedDevice, and its number there."""
    return whole_number(attribute(device, "port")) or 0, whole_number(attribute(device, "device")) or 0


# Kinds of media that the disk here is not.
_FORGETS = {"immutable": "forgets", "readonly": "can only be read"}


def _manifest(machine: Element, disks: tuple[Disk, ...], disk_concerns: list[Concern], sorts: Mapping[str, str]) -> VmManifest:
    hardware = child(machine, "Hardware")
    uefi, tpm = is_uefi(machine), has_tpm(machine)
    guest = guest_os(vendor_id=clean(attribute(machine, "OSType")))
    snapshots = tuple(_snapshots(machine))
    suspended = bool(attribute(machine, "stateFile"))
    found = list(disk_concerns) if disks else [concerns.no_disks()]
    if suspended:
        found.append(concerns.suspended())
    host_pci = child(child(hardware, "HostPci"), "Devices")
    passed = [] if host_pci is None else list(children(host_pci, "Device"))
    found += [concerns.passthrough_device(clean(attribute(each, "host")) or "a PCI device") for each in passed]
    if reaches := reaching.virtualbox(machine):
        found.append(concerns.left_out(reaches))
    if settings := [
        *settings_left_out(machine, windows=guest.family == "windows"),
        *(f"{key} {_FORGETS[sort]}" for key, sort in sorts.items() if sort in _FORGETS),
    ]:
        found.append(concerns.settings_left_out(settings))
    if media := tuple(_media_inserted(machine)):
        found.append(concerns.removable_media_left_out(media))
    found += concerns.of_machine(uefi=uefi, secure_boot=False, tpm=tpm, guest=guest, snapshots=len(snapshots))
    name = clean(attribute(machine, "name")) or "imported"
    memory = min(whole_number(attribute(child(hardware, "Memory"), "RAMSize")) or 128, _MEMORY_MAX_MIB)
    return VmManifest(
        vm_id=uuid_of(attribute(machine, "uuid")) or name,
        name=name,
        uuid=uuid_of(*identities(machine)),
        uuid_reversed_for=uuid_reversed_for(machine),
        serial=serial(machine),
        power_state="suspended" if suspended else "off",
        firmware="uefi" if uefi else "bios",
        tpm=tpm,
        cpu_count=min(_processors(_of_platform(machine, "CPU")), _CPUS_MAX),
        memory_bytes=memory * MIB,
        guest_os=guest,
        cbt_reason="an offline import is a copy of files: nothing changes in them",
        disks=disks,
        nics=nics(machine),
        snapshots=snapshots,
        concerns=tuple(found),
    )


def _of_platform(machine: Element | None, name: str) -> Element | None:
    hardware = child(machine, "Hardware")
    places = (hardware, child(machine, "Platform"), child(hardware, "Platform"))
    return next((found for place in places if (found := child(place, name)) is not None), None)


def _processors(cpu: Element | None) -> int:
    """Of those that may be plugged in, the ones that are (VBoxManage modifyvm --cpu-hotplug, --plug-cpu)."""
    tree = child(cpu, "CpuTree")
    plugged = 0 if tree is None or not is_true(attribute(cpu, "hotplug")) else len(list(children(tree, "Cpu")))
    return plugged or whole_number(attribute(cpu, "count")) or 1


def settings_left_out(machine: Element | None, *, windows: bool) -> Iterator[str]:
    """A clock other than here, where a Windows has the local time and no other guest; and what the machine has not here."""
    clock = attribute(_of_platform(machine, "RTC"), "localOrUTC").lower()
    if clock and (clock == "utc") is windows:
        yield f"RTC {clean(clock)}"
    cpu = _of_platform(machine, "CPU")
    if (cap := attribute(cpu, "executionCap")) not in ("", "100"):
        yield f"processors at {clean(cap)} %"
    if is_true(attribute(cpu, "hotplug")):
        yield "processors to plug in"
    if attribute(child(child(machine, "Hardware"), "AudioAdapter"), "enabled").lower() == "true":
        yield "sound"


def _media_inserted(machine: Element) -> Iterator[str]:
    """The images in its CD-ROM and floppy drives, by their files' names."""
    registry = child(machine, "MediaRegistry")
    lists = [group for name in ("DVDImages", "FloppyImages") if (group := child(registry, name)) is not None]
    known = {attribute(image, "uuid"): attribute(image, "location") for group in lists for image in children(group, "Image")}
    for controller in _controllers(machine):
        for device in children(controller, "AttachedDevice"):
            uuid = attribute(child(device, "Image"), "uuid")
            if uuid and attribute(device, "type") in ("DVD", "Floppy"):
                yield clean(re.split(r"[/\\]", known.get(uuid, ""))[-1]) or "a disc"


def _controllers(machine: Element) -> list[Element]:
    storage = child(machine, "StorageControllers")
    if storage is None:
        storage = child(child(machine, "Hardware"), "StorageControllers")
    return [] if storage is None else list(children(storage, "StorageController"))


def _snapshots(machine: Element) -> Iterator[Snapshot]:
    """The tree of snapshots, walked with a list, as the file decides how deep it is."""
    waiting = [machine]
    while waiting:
        inner = waiting.pop()
        for each in (*children(inner, "Snapshot"), *(grand for group in children(inner, "Snapshots") for grand in group)):
            if local(each.tag) == "Snapshot":
                waiting.append(each)
                identity = uuid_of(attribute(each, "uuid")) or clean(attribute(each, "name"))
                yield Snapshot(id=identity, name=clean(attribute(each, "name")), created_at=_time(attribute(each, "timeStamp")))


def _time(written: str) -> datetime | None:
    try:
        return datetime.fromisoformat(written).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def identities(machine: Element | None) -> tuple[str, str, str]:
    """The UUID that a person or a clone set for the guest to see, and the machine's own, which it sees without one."""
    return _dmi(machine, "DmiSystemUuid"), attribute(child(machine, "Hardware"), "uuid"), attribute(machine, "uuid")


def uuid_reversed_for(machine: Element | None) -> smbios.Families:
    """Who reads the UUID in reverse: a setting that newer versions make."""
    return smbios.of_virtualbox(little_endian=_enabled(machine, "SmbiosUuidLittleEndian"))


def serial(machine: Element | None) -> str | None:
    """The serial number: one that a person gave, or one made from the UUID, which newer versions do. Without either it is «0»,
    the same for all machines."""
    if given := _dmi(machine, "DmiSystemSerial"):
        return smbios.serial_of(given)
    uuid = uuid_of(*identities(machine))
    return f"VirtualBox-{uuid}" if uuid and _enabled(machine, "AutoSerialNumGen") else None


def _enabled(machine: Element | None, name: str) -> bool:
    hardware = child(machine, "Hardware")
    return any(is_true(attribute(child(child(hardware, above), name), "enabled")) for above in ("BIOS", "Firmware"))


def _dmi(machine: Element | None, name: str) -> str:
    """A DMI value that a person gave to the machine's firmware; empty, where none did."""
    firmware = "efi" if is_uefi(machine) else "pcbios"
    for above in (machine, child(machine, "Hardware")):
        extra = child(above, "ExtraData")
        for item in () if extra is None else children(extra, "ExtraDataItem"):
            found = _DMI.fullmatch(attribute(item, "name"))
            if found and found.groups() == (firmware, name):
                return attribute(item, "value").removeprefix("string:")
    return ""


def is_uefi(machine: Element | None) -> bool:
    return attribute(child(child(machine, "Hardware"), "Firmware"), "type").upper().startswith("EFI")


def has_tpm(machine: Element | None) -> bool:
    """Whether the machine has a TPM."""
    kind = attribute(child(child(machine, "Hardware"), "TrustedPlatformModule"), "type")
    return kind.lower() not in ("", "none")


def nics(machine: Element | None) -> tuple[Nic, ...]:
    """The enabled adapters in the order of their slots."""
    network = child(child(machine, "Hardware"), "Network")
    if network is None:
        return ()
    enabled = [adapter for adapter in children(network, "Adapter") if attribute(adapter, "enabled").lower() == "true"]
    return tuple(_nic(adapter) for adapter in sorted(enabled, key=_slot))


def _nic(adapter: Element) -> Nic:
    mac = attribute(adapter, "MACAddress").lower()
    model = attribute(adapter, "type").lower() or "am79c973"  # the schema's default
    attached = next((part for part in children(adapter, *_ATTACHMENTS)), None)
    kind = "" if attached is None else _ATTACHMENTS[attached.tag.rpartition("}")[2]]
    return Nic(
        key=f"adapter{_slot(adapter)}",
        mac=":".join(re.findall("..", mac)) if re.fullmatch("[0-9a-f]{12}", mac) else None,
        model=_NIC_MODELS.get(model, model),
        network=attribute(attached, "name") or kind,
        connected=attribute(adapter, "cable").lower() != "false",
        linux_name=card_names.virtualbox(_slot(adapter)),
    )


def _slot(adapter: Element) -> int:
    slot = attribute(adapter, "slot")
    return int(slot) if slot.isascii() and slot.isdigit() and len(slot) < 4 else 0
