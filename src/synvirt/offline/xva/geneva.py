"""XVA version 1, the export of XenServer 3 («Geneva»): ova.xml, and one folder of gzipped chunks per disk.

    <appliance version="0.1">
      <vm name="vm"><label>…</label><config mem_set="268435456" vcpus="1"/><hacks is_hvm="false"/>
        <vbd device="sda" function="root" mode="w" vdi="vdi_sda"/></vm>
      <vdi name="vdi_sda" size="10737418240" source="file://sda" type="dir-gzipped-chunks"/>
    </appliance>                              sda/chunk-000000000.gz, sda/chunk-000000001.gz, …

XenServer SDK Guide, «VM import/export», XVA version 1. The chunks of a disk, joined, are one gzip file (RFC 1952, 2.2).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element

from synvirt.disks.roots import Root, is_folder, listed, raw_spec
from synvirt.disks.specs import GzipSpec, JoinedSpec, RawSpec
from synvirt.errors import MalformedArchive, SynvirtError, UnsupportedFormat
from synvirt.machines import concerns
from synvirt.machines.guest_os import guest_os
from synvirt.machines.texts import clean, whole_number
from synvirt.model.machine import Concern, Disk, VmManifest
from synvirt.nearest import in_short
from synvirt.offline.files import FileRange, Folder, read_all
from synvirt.sizes import GIB
from synvirt.xml_document import DOCUMENT_MAX_BYTES, attribute, child, children, local, parse, text

# XenServer wrote chunks of a gigabyte; its largest disk was 2 TiB.
_CHUNKS_MAX = 10_000
_DISKS_MAX = 100
_FORMAT = "dir-gzipped-chunks"
_DESCRIPTION = "ova.xml"
ROOT_TAG = "appliance"

Find = Callable[[str], FileRange | None]


@dataclass(frozen=True, slots=True)
class Appliance:
    """`folders` has the folder of each disk's chunks by the disk's key; `find` finds a file of the export by its name."""

    manifest: VmManifest
    folders: Mapping[str, str]
    find: Find

    def disk_spec(self, disk: Disk, root: Root) -> GzipSpec:
        """How to read the disk: its chunks, until one is missing. Those behind the last one that is there are missed by their
        bytes: each chunk is a whole gzip file."""
        folder, parts = self.folders[disk.key], list[RawSpec]()
        while (part := self.find(f"{folder}/chunk-{len(parts):09d}.gz")) is not None:
            parts.append(raw_spec(root, part.path, part.offset, part.length))
            if len(parts) > _CHUNKS_MAX:
                raise MalformedArchive(f"{folder} has over {_CHUNKS_MAX} chunks; no disk has")
        if not parts:
            raise MalformedArchive(
                f"disk {disk.key} has no file {folder}/chunk-000000000.gz",
                hint="The export is incomplete: copy all of its files.",
            )
        size = disk.capacity_bytes
        return GzipSpec(over=JoinedSpec(parts=tuple(parts)), size_max_bytes=size, name=folder, size_least_bytes=size)


def probe(path: Path, head: bytes, root: Root) -> bool:
    """A folder with an ova.xml, or that file. Never raises."""
    if path.name.lower() == _DESCRIPTION:
        return b"<" + ROOT_TAG.encode() in head
    try:
        return is_folder(root, path) and _DESCRIPTION in (listed(root, path) or ())
    except (OSError, SynvirtError):
        return False


def of_folder(path: Path, root: Root) -> Appliance:
    """`path` is the folder, or the ova.xml in it. NotFound, HostPathRejected, MalformedArchive, UnsupportedFormat."""
    folder = Folder(path, root)
    file = folder.find(_DESCRIPTION)
    if file is None:
        raise MalformedArchive(f"{folder.label} has no {_DESCRIPTION}")
    name = f"{_DESCRIPTION} in {folder.label}"
    document = parse(read_all(file, root, DOCUMENT_MAX_BYTES), name)
    if local(document.tag) != ROOT_TAG:
        raise UnsupportedFormat(
            f"{name} is of a newer version, whose disks lie in an archive", hint="Import the .xva file as it was exported."
        )
    return described(document, name, folder.find)


def described(root: Element, name: str, find: Find) -> Appliance:
    """`root` is the element `appliance`. MalformedArchive, UnsupportedFormat."""
    machines = list(children(root, "vm"))
    if len(machines) != 1:
        names = in_short([repr(clean(text(vm, "label"))) for vm in machines])
        raise UnsupportedFormat(f"{name} holds {len(machines)} virtual machines: {names}", hint="Export each VM separately.")
    images = {attribute(vdi, "name"): vdi for vdi in children(root, "vdi")}
    disks, folders = _disks(machines[0], images, name)
    return Appliance(_manifest(machines[0], disks), folders, find)


def _disks(vm: Element, images: dict[str, Element], name: str) -> tuple[tuple[Disk, ...], dict[str, str]]:
    disks: dict[str, Disk] = {}
    folders: dict[str, str] = {}
    for unit, vbd in enumerate(children(vm, "vbd")):
        key = attribute(vbd, "vdi")
        vdi = images.get(key)
        if vdi is None or key in disks or unit >= _DISKS_MAX:
            raise MalformedArchive(f"{name}: its disk {unit} is the image {key[:100]!r}, which it has not, or a second time")
        kind, size, source = attribute(vdi, "type"), whole_number(attribute(vdi, "size")), attribute(vdi, "source")
        if kind != _FORMAT or not source.startswith("file://") or not size:
            raise UnsupportedFormat(f"{name}: image {key[:100]!r} of type {kind[:40]!r} in {source[:100]!r}; {_FORMAT} is read")
        folders[key] = source.removeprefix("file://").strip("/")
        disks[key] = Disk(
            key=key,
            label=clean(attribute(vbd, "device")) or clean(key),
            capacity_bytes=size,
            bus="ide" if unit < 4 else "scsi",
            controller=f"ide{unit // 2}" if unit < 4 else "scsi0",
            unit=unit % 2 if unit < 4 else unit - 4,
            boot_order=1 if attribute(vbd, "function") == "root" else None,
            source_path=folders[key],
        )
    return tuple(disks.values()), folders


def _manifest(vm: Element, disks: tuple[Disk, ...]) -> VmManifest:
    config = child(vm, "config")
    memory, cpus = whole_number(attribute(config, "mem_set")), whole_number(attribute(config, "vcpus"))
    name = clean(text(vm, "label")) or clean(attribute(vm, "name")) or "imported"
    guest = guest_os(description=clean(text(vm, "shortdesc")))
    found: list[Concern] = [] if disks else [concerns.no_disks()]
    found += [concerns.compressed(disk.key) for disk in disks]
    for missing, value in (("processors", cpus), ("memory", memory)):
        if value is None:
            found.append(concerns.hardware_incomplete(missing))
    if attribute(child(vm, "hacks"), "is_hvm").lower() != "true":
        found.append(concerns.paravirtualised())
    found += concerns.of_machine(uefi=False, secure_boot=False, tpm=False, guest=guest)
    return VmManifest(
        vm_id=clean(attribute(vm, "name")) or name,
        name=name,
        cpu_count=min(cpus or 1, 1024),
        memory_bytes=memory or GIB,
        guest_os=guest,
        cbt_reason="an offline import is a copy of files: nothing changes in them",
        disks=disks,
        concerns=tuple(found),
    )
