"""OVF descriptions (DMTF DSP0243 1.x and 2.x, and VMware's 0.9 before it) as ovftool, VirtualBox, oVirt, XenServer and others
write them → a VmManifest, and the file of each of its disks.

    Envelope
    ├── References        File: id, href, size, compression, chunkSize
    ├── DiskSection       Disk: diskId, capacity, fileRef, format, parentRef
    ├── NetworkSection
    └── VirtualSystem     Name, OperatingSystemSection, VirtualHardwareSection (`hardware`)

0.9 and oVirt write `<Section xsi:type="ovf:DiskSection_Type">` for DiskSection and Content for VirtualSystem.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from synvirt.errors import MalformedArchive, UnsupportedFormat, VmNotFound
from synvirt.machines import concerns, reaching
from synvirt.machines.guest_os import guest_os
from synvirt.machines.texts import clean, uuid_of, whole_number
from synvirt.model.machine import Concern, Disk, DiskBus, GuestOs, VmManifest
from synvirt.nearest import LISTED_MAX, in_short
from synvirt.offline.ovf import hardware as ovf_hardware
from synvirt.offline.ovf import traits as ovf_traits
from synvirt.offline.ovf.hardware import Attachment, Hardware
from synvirt.offline.units import quantity_bytes
from synvirt.offline.vbox import machine as virtualbox
from synvirt.sizes import GIB
from synvirt.xml_document import attribute, child, children, local, text, wrong_encoding
from synvirt.xml_document import parse as parse_xml

# VMware's maximum is 256 disks on SCSI and 60 on NVMe.
_DISKS_MAX = 1000
_OVIRT_INTERFACES: dict[str, DiskBus] = {"virtio": "virtio", "virtio_scsi": "scsi", "ide": "ide", "sata": "sata"}
# The format in a description, by a word of its URI; the file's own magic decides.
_FORMATS = (
    ("vmdk", "vmdk"),
    ("qcow", "qcow2"),
    ("vhdx", "vhdx"),
    ("virtualserver", "vhd"),
    ("linkid=137171", "vhd"),
    ("vdi", "vdi"),
    ("wiki/byte", "raw"),
)
# oVirt gives all its disks the URI of VMDK, and has their real format in an attribute of its own.
_OVIRT_VOLUMES = {"raw": "raw", "cow": "qcow2"}
# ISO 9660: a CD image. DSP0243 marks it only by the format.
_CD_IMAGES = ("ecma-119", "iso9660", "iso-9660")
_PROPERTY = re.compile(r"\$\{([^}]{1,255})\}")


@dataclass(frozen=True, slots=True)
class FileReference:
    """A file of the package. With `chunk_bytes` it is in pieces: href.000000000, href.000000001, …"""

    id: str
    href: str
    size_bytes: int | None = None
    compression: str = ""
    chunk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DiskSource:
    """Where a disk's content is. No file: a blank disk, or one on a LUN of its storage (`is_lun`). With a `parent`, the file
    has only the differences from that disk. `format` is the description's, empty where it is unknown."""

    file: FileReference | None
    parent: str = ""
    format: str = ""
    is_lun: bool = False


@dataclass(frozen=True, slots=True)
class Description:
    """A parsed OVF: `sources` has every key of `manifest.disks`. `states_firmware`: BIOS is stated, not assumed."""

    manifest: VmManifest
    sources: Mapping[str, DiskSource]
    files: tuple[FileReference, ...]
    states_firmware: bool


def parse(data: bytes, name: str, vm: str | None = None) -> Description:
    """MalformedArchive says what is wrong in `name`. `vm`: the name or id of the selected machine, where there are several;
    UnsupportedFormat lists them, VmNotFound says that none has that name."""
    root = parse_xml(data, name)
    if local(root.tag) != "Envelope":
        raise MalformedArchive(f"{name} is not an OVF: its root element is {local(root.tag)[:60]!r}, not Envelope")
    systems = list(_systems(root))
    system = _the_system(systems, name, vm)
    files = _files(root, name)
    properties = _properties(*_owners(root, system), system)
    declared = _disks(root, files, properties, name)
    section = _section(system, "VirtualHardwareSection")
    hardware = Hardware() if section is None else ovf_hardware.parse(section, _configuration(root))
    disks, disk_concerns = _attached(declared, hardware, _boot_items(root, system), alone=len(systems) == 1)
    declared_encoding = wrong_encoding(data)
    if declared_encoding is not None:
        disk_concerns.append(concerns.wrong_encoding(declared_encoding))
    manifest = _manifest(root, system, hardware, disks, disk_concerns)
    sources = {disk.key: declared[disk.key].source for disk in disks}
    return Description(manifest, sources, tuple(files.values()), ovf_traits.states_firmware(system, hardware))


def _the_system(systems: list[Element], name: str, vm: str | None) -> Element:
    if not systems:
        raise MalformedArchive(f"{name} describes no virtual system")
    names = in_short([repr(_system_name(system)) for system in systems])
    if vm is not None:
        # An id belongs to one VM; two VMs may share a name.
        found = [system for system in systems if clean(attribute(system, "id")) == vm] or [
            system for system in systems if _system_name(system) == vm
        ]
        if len(found) != 1:
            raise VmNotFound(f"{name} holds {len(found) or 'no'} virtual machines called {vm[:100]!r}; it holds {names}")
        return found[0]
    if len(systems) > 1:
        raise UnsupportedFormat(
            f"{name} holds {len(systems)} virtual machines: {names}",
            hint="One import makes one VM: say which one (source_ref.vm; --vm NAME).",
            holds=tuple(_system_name(system) for system in systems[:LISTED_MAX]),
        )
    return systems[0]


def _systems(element: Element) -> Iterator[Element]:
    """Collections nest. They are walked with a list, so that a deep document cannot exhaust the stack."""
    waiting = [element]
    while waiting:
        for inner in waiting.pop():
            kind = _effective_name(inner)
            if kind == "VirtualSystem":
                yield inner
            elif kind == "VirtualSystemCollection":
                waiting.append(inner)


def _effective_name(element: Element) -> str:
    """`Section xsi:type="ovf:DiskSection_Type"` is DiskSection; `Content xsi:type="ovf:VirtualSystem_Type"` VirtualSystem."""
    name = local(element.tag)
    if name in ("Section", "Content"):
        return attribute(element, "type").rpartition(":")[2].removesuffix("_Type")
    return name


def _sections(element: Element, name: str) -> Iterator[Element]:
    return (inner for inner in element if _effective_name(inner) == name)


def _section(element: Element, name: str) -> Element | None:
    return next(_sections(element, name), None)


def _files(root: Element, name: str) -> dict[str, FileReference]:
    files: dict[str, FileReference] = {}
    references = child(root, "References")
    for element in () if references is None else children(references, "File"):
        key, href = attribute(element, "id"), attribute(element, "href")
        if not href:
            raise MalformedArchive(f"{name}: the file {key!r} has no href")
        if key in files:
            raise MalformedArchive(f"{name}: two files have the id {key!r}")
        compression = attribute(element, "compression").lower()
        files[key] = FileReference(
            id=key,
            href=href,
            size_bytes=whole_number(attribute(element, "size")),
            compression="" if compression == "identity" else compression,
            chunk_bytes=whole_number(attribute(element, "chunkSize")) or None,
        )
    return files


@dataclass(frozen=True, slots=True)
class _Declared:
    """A Disk element of the DiskSection."""

    key: str
    capacity_bytes: int
    used_bytes: int | None
    bus: DiskBus | None
    boot: bool
    shared: bool
    is_cd: bool
    source: DiskSource


def _disks(root: Element, files: Mapping[str, FileReference], properties: Mapping[str, str], name: str) -> dict[str, _Declared]:
    declared: dict[str, _Declared] = {}
    # oVirt's older exports name the file by its href; an id has priority.
    findable = {**{file.href: file for file in files.values()}, **files}
    for section in _sections(root, "DiskSection"):
        for element in children(section, "Disk"):
            disk = _disk(element, findable, properties, name)
            if len(declared) >= _DISKS_MAX:
                raise MalformedArchive(f"{name} has over {_DISKS_MAX} disks; no VM has")
            if disk.key in declared:
                raise MalformedArchive(f"{name}: two disks have the id {disk.key!r}")
            declared[disk.key] = disk
    return declared


def _disk(element: Element, files: Mapping[str, FileReference], properties: Mapping[str, str], name: str) -> _Declared:
    key = attribute(element, "diskId")
    if not key:
        raise MalformedArchive(f"{name}: a Disk has no diskId")
    reference = attribute(element, "fileRef")
    file = files.get(reference)
    if reference and file is None:
        raise MalformedArchive(f"{name}: disk {key!r} lies in file {reference!r}, which References does not have")
    uri = attribute(element, "format").lower()
    declared = _OVIRT_VOLUMES.get(attribute(element, "volume-format").lower()) or next(
        (known for word, known in _FORMATS if word in uri), ""
    )
    is_lun = attribute(element, "disk_storage_type").lower() == "lun"
    return _Declared(
        key=key,
        capacity_bytes=_capacity_bytes(element, properties, f"{name}: disk {key!r}"),
        used_bytes=whole_number(attribute(element, "populatedSize")),
        bus=_OVIRT_INTERFACES.get(attribute(element, "disk-interface").lower()),
        boot=attribute(element, "boot").lower() == "true",
        shared=attribute(element, "shareable").lower() == "true",
        is_cd=any(word in uri for word in _CD_IMAGES),
        source=DiskSource(file, attribute(element, "parentRef"), declared, is_lun),
    )


def _capacity_bytes(element: Element, properties: Mapping[str, str], what: str) -> int:
    """0, where the description does not have it: the image itself is more exact."""
    capacity, units = attribute(element, "capacity"), attribute(element, "capacityAllocationUnits") or "byte"
    if not capacity:  # oVirt's exports to a storage domain give GiB as `size`
        capacity, units = attribute(element, "size") or "0", "byte * 2^30"
    given = _PROPERTY.fullmatch(capacity)
    if given is not None:  # DSP0243 clause 9.1: the capacity may be chosen at deployment, with a default
        if given[1] not in properties:
            raise MalformedArchive(f"{what}: its capacity is the property {given[1]!r}, which has no default")
        capacity = properties[given[1]]
    return quantity_bytes(capacity, units, what)


def _owners(root: Element, system: Element) -> list[Element]:
    """The envelope and the collections around the system, the outermost first."""
    waiting = [[root]]
    while waiting:
        owners = waiting.pop()
        for inner in owners[-1]:
            if inner is system:
                return owners
            if _effective_name(inner) == "VirtualSystemCollection":
                waiting.append([*owners, inner])
    return [root]


def _properties(*owners: Element) -> dict[str, str]:
    """Properties nearer to the machine have priority."""
    found: dict[str, str] = {}
    for owner in owners:
        for section in _sections(owner, "ProductSection"):
            for element in children(section, "Property"):
                value = attribute(element, "value")
                if value:
                    found[attribute(element, "key")] = value
    return found


def _configuration(root: Element) -> str:
    """The deployment option marked as default, else the first (DSP0243 clause 9.8)."""
    section = _section(root, "DeploymentOptionSection")
    options = [] if section is None else list(children(section, "Configuration"))
    marked = next((option for option in options if attribute(option, "default").lower() in ("true", "1")), None)
    chosen = marked if marked is not None else next(iter(options), None)
    return attribute(chosen, "id")


def _boot_items(root: Element, system: Element) -> list[str]:
    """Instance ids of disks in boot order: VMware's BootOrderSection, «8 9»."""
    for owner in (system, root):
        for section in children(owner, "BootOrderSection"):
            if attribute(section, "type") in ("", "disk"):
                return attribute(section, "instanceId").split()
    return []


def _attached(
    declared: Mapping[str, _Declared], hardware: Hardware, boot_items: list[str], *, alone: bool
) -> tuple[tuple[Disk, ...], list[Concern]]:
    """The disks in the order of the hardware items, each at a place of its own; then those without an item, unless they may
    belong to another VM: then `alone` is false."""
    disks: dict[str, Disk] = {}
    found: list[Concern] = []
    places: set[tuple[str, int]] = set()
    default: DiskBus = "ide" if hardware.system_type.startswith(("xen", "hvm")) else "scsi"
    declared = {key: disk for key, disk in declared.items() if not disk.is_cd and key not in hardware.media_references}
    for item in (*hardware.attachments, None) if alone else hardware.attachments:
        named = (
            [key for key in item.references if key in declared][:1] if item else [key for key in declared if key not in disks]
        )
        for key in named:
            if key in disks:
                twice = concerns.disk_named_twice(key)
                found += [] if twice in found else [twice]
                continue
            disk = declared[key]
            bus = disk.bus or (item.bus if item and item.bus else default)
            controller = item.controller if item and item.controller else f"{bus}0"
            unit = item.unit if item and item.unit is not None else 0
            while (controller, unit) in places:
                unit += 1
            places.add((controller, unit))
            disks[key] = Disk(
                key=key,
                label=_label(item, key, disks),
                capacity_bytes=disk.capacity_bytes,
                used_bytes=disk.used_bytes,
                format=disk.source.format or "raw",
                bus=bus,
                controller=controller,
                unit=unit,
                boot_order=_boot_order(item, disk, boot_items),
                source_path=disk.source.file.href if disk.source.file else "",
            )
            if item is None:
                found.append(concerns.unattached_disk(key))
            elif item.mode.startswith("independent"):
                found.append(concerns.independent_disk(key, item.mode))
            if disk.shared:
                found.append(concerns.shared_disk(key))
    return tuple(disks.values()), found


def _boot_order(item: Attachment | None, disk: _Declared, boot_items: list[str]) -> int | None:
    if item is not None and item.instance in boot_items:
        return boot_items.index(item.instance) + 1
    if item is not None and item.boot_order is not None:
        return item.boot_order
    return 1 if disk.boot else None


def _label(item: Attachment | None, key: str, others: Mapping[str, Disk]) -> str:
    """The exporter's name of the disk. Two disks of one VM never share a label, as it names their volumes."""
    label = clean(item.name if item and item.name else key)
    taken = {disk.label for disk in others.values()}
    return label if label not in taken else f"{label} ({clean(key)})"


def _manifest(
    root: Element, system: Element, hardware: Hardware, disks: tuple[Disk, ...], disk_concerns: list[Concern]
) -> VmManifest:
    machine = child(system, "Machine")  # VirtualBox puts its own description of the VM beside OVF's
    uefi, secure_boot = ovf_traits.firmware(root, system, machine, hardware)
    tpm = hardware.tpm or virtualbox.has_tpm(machine)
    guest = _guest(system, machine)
    found = list(disk_concerns)
    if not disks:
        found.append(concerns.no_disks())
    for missing, value in (("processors", hardware.cpu_count), ("memory", hardware.memory_bytes)):
        if value is None:
            found.append(concerns.hardware_incomplete(missing))
    found += concerns.of_machine(uefi=uefi, secure_boot=secure_boot, tpm=tpm, guest=guest)
    found += [concerns.passthrough_device(name) for name in dict.fromkeys(hardware.passthrough)]
    if reaches := [*reaching.vmware(hardware.settings), *reaching.virtualbox(machine), *hardware.ports]:
        found.append(concerns.left_out(reaches))
    if ovf_traits.is_paravirtualised(hardware):
        found.append(concerns.paravirtualised())
    if hardware.media:
        found.append(concerns.removable_media_left_out(hardware.media))
    name = _system_name(system)
    return VmManifest(
        vm_id=clean(attribute(system, "id")) or name,
        name=name,
        uuid=uuid_of(attribute(machine, "uuid"), hardware.settings.get("uuid.bios", ""), attribute(system, "id")),
        firmware="uefi" if uefi else "bios",
        secure_boot=secure_boot,
        tpm=tpm,
        cpu_count=hardware.cpu_count or 1,
        cores_per_socket=hardware.cores_per_socket,
        memory_bytes=hardware.memory_bytes or GIB,
        guest_os=guest,
        cbt_reason="an offline import is a copy of files: nothing changes in them",
        disks=disks,
        nics=ovf_traits.nics(hardware, machine),
        concerns=tuple(found),
    )


def _guest(system: Element, machine: Element | None) -> GuestOs:
    section = _section(system, "OperatingSystemSection")
    if section is None:
        return guest_os(vendor_id=attribute(machine, "OSType"))
    virtualbox = text(section, "OSType")
    return guest_os(
        cim_id=attribute(section, "id"),
        vendor_id=clean(attribute(section, "osType") or virtualbox or attribute(machine, "OSType")),
        description=clean(text(section, "Description")),
    )


def _system_name(system: Element) -> str:
    inner = child(_section(system, "VirtualHardwareSection"), "System")
    for candidate in (text(system, "Name"), text(inner, "VirtualSystemIdentifier"), attribute(system, "id")):
        if clean(candidate):
            return clean(candidate)
    return "imported"
