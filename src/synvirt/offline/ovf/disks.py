"""The disks of an OVF's machine: what the DiskSection and References declare, and the hardware item that attaches each."""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple
from xml.etree.ElementTree import Element

from synvirt.errors import MalformedArchive
from synvirt.machines.texts import whole_number
from synvirt.offline.ovf import envelope, hardware
from synvirt.offline.ovf.envelope import Envelope
from synvirt.offline.ovf.hardware import Attachment, Hardware
from synvirt.offline.units import quantity_bytes
from synvirt.xml_document import attribute, child, children

if TYPE_CHECKING:  # the command line opens disks, and does not wait for pydantic
    from synvirt.model.machine import DiskBus

# VMware's maximum is 256 disks on SCSI and 60 on NVMe.
_DISKS_MAX = 1000
_OVIRT_INTERFACES: "dict[str, DiskBus]" = {"virtio": "virtio", "virtio_scsi": "scsi", "ide": "ide", "sata": "sata"}
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


class FileReference(NamedTuple):
    """A file of the package. With `chunk_bytes` it is in pieces: href.000000000, href.000000001, …"""

    id: str
    href: str
    size_bytes: int | None = None
    compression: str = ""
    chunk_bytes: int | None = None


class DiskSource(NamedTuple):
    """Where a disk's content is. No file: a blank disk, or one on a LUN of its storage (`is_lun`). With a `parent`, the file
    has only the differences from that disk. `format` is the description's, empty where it is unknown."""

    file: FileReference | None
    parent: str = ""
    format: str = ""
    is_lun: bool = False


class Declared(NamedTuple):
    """A Disk element of the DiskSection."""

    key: str
    capacity_bytes: int
    used_bytes: int | None
    bus: "DiskBus | None"
    boot: bool
    shared: bool
    read_only: bool
    is_cd: bool
    source: DiskSource


class Parsed(NamedTuple):
    """A description as far as its disks need it: all files by their ids, all disks by theirs, and the machine's hardware."""

    envelope: Envelope
    files: Mapping[str, FileReference]
    disks: Mapping[str, Declared]
    hardware: Hardware

    def attached(self) -> Iterator[tuple[Attachment | None, Declared]]:
        """The machine's disks in the order of their places, one twice where two items name it; then those without an
        item, unless they may belong to another machine."""
        media = self.hardware.media_references
        disks = {key: disk for key, disk in self.disks.items() if not disk.is_cd and key not in media}
        named = set()
        for item in self.hardware.attachments:
            key = next((key for key in item.references if key in disks), None)
            if key is not None:
                named.add(key)
                yield item, disks[key]
        if self.envelope.alone:
            yield from ((None, disk) for key, disk in disks.items() if key not in named)


def parse(data: bytes, name: str, vm: str | None = None) -> Parsed:
    """MalformedArchive says what is wrong in `name`. `vm`: the name or id of the selected machine, where there are several;
    UnsupportedFormat lists them, VmNotFound says that none has that name."""
    opened = envelope.opened(data, name, vm)
    files = _files(opened.root, name)
    disks = _disks(opened.root, files, envelope.properties(opened), name)
    return Parsed(opened, files, disks, hardware.of(opened))


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


def _disks(root: Element, files: Mapping[str, FileReference], properties: Mapping[str, str], name: str) -> dict[str, Declared]:
    declared: dict[str, Declared] = {}
    # oVirt's older exports name the file by its href; an id has priority.
    findable = {**{file.href: file for file in files.values()}, **files}
    for section in envelope.sections(root, "DiskSection"):
        for element in children(section, "Disk"):
            disk = _disk(element, findable, properties, name)
            if len(declared) >= _DISKS_MAX:
                raise MalformedArchive(f"{name} has over {_DISKS_MAX} disks; no VM has")
            if disk.key in declared:
                raise MalformedArchive(f"{name}: two disks have the id {disk.key!r}")
            declared[disk.key] = disk
    return declared


def _disk(element: Element, files: Mapping[str, FileReference], properties: Mapping[str, str], name: str) -> Declared:
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
    return Declared(
        key=key,
        capacity_bytes=_capacity_bytes(element, properties, f"{name}: disk {key!r}"),
        used_bytes=whole_number(attribute(element, "populatedSize")),
        bus=_OVIRT_INTERFACES.get(attribute(element, "disk-interface").lower()),
        boot=attribute(element, "boot").lower() == "true",
        shared=attribute(element, "shareable").lower() == "true",
        read_only=attribute(element, "read-only").lower() == "true",
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
