"""What is known of a file before any importer is loaded: importers' modules take longer to load than a small disk to copy."""

import re
from pathlib import Path

# The bytes that `OfflineImporter.probe` gets.
HEAD_BYTES = 64 << 10
# The end of the file, where some formats have their magic.
TAIL_BYTES = 512

# Descriptions are text, and known by their names. Archives are known by their first bytes, and damaged ones by their names.
SUFFIXES = (".ovf", ".vmx", ".vmtx", ".vbox", ".xml", ".vmcx", ".exp", ".ova", ".xva", ".xva.gz", ".xva.zst")

# Files that people try to import, and what they can do: (magic, its place, the file's kind, hint).
# A place below zero counts from the file's end.
NOT_READ: tuple[tuple[bytes, int, str, str], ...] = (
    (b"\x1f\x8b", 0, "a gzip file", "Unpack it with gunzip first."),
    (b"\xfd7zXZ", 0, "an xz file", "Unpack it with unxz first."),
    (b"\x28\xb5\x2f\xfd", 0, "a zstd file", "Unpack it with unzstd first."),
    (b"BZh", 0, "a bzip2 file", "Unpack it with bunzip2 first."),
    (b"PK\x03\x04", 0, "a zip archive", "Unpack it, and import the folder or the disk inside."),
    (b"7z\xbc\xaf\x27\x1c", 0, "a 7z archive", "Unpack it, and import the folder or the disk inside."),
    *(
        (b"conectix", at, "a VHD image without a machine", "Convert it first: qemu-img convert -O vhdx OLD NEW.")
        for at in (0, -512)
    ),
    (b"koly", -512, "a dmg image without a machine", "Convert it first: qemu-img convert -O qcow2 OLD NEW."),
    (
        b"\x7f\x10\xda\xbe",
        0x40,
        "a VDI image without a machine",
        "Import its machine's .vbox, or convert it: qemu-img convert -O qcow2.",
    ),
    (b"\x14\x20\x28\x01", 0, "a state of a Hyper-V machine", "Import the machine's folder, or its .vmcx."),
    *(
        (magic, 0, f"{what} image without a machine", "Convert it first: qemu-img convert -O qcow2 OLD NEW.")
        for what, magic in (
            ("a Parallels", b"WithoutFreeSpace"),
            ("a Parallels", b"WithouFreSpacExt"),
            ("a QED", b"QED\0"),
            ("a Bochs", b"Bochs Virtual HD Image"),
            ("a cloop", b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop"),
        )
    ),
    # The importers of archives were asked before.
    (b"ustar", 257, "a tar archive without a VM's description", "Unpack it, and import the folder or the disk inside."),
    (b"CD001", 0x8001, "a CD image", "An installation medium is not a VM: only disks are imported."),
)


# Formats by a file's name. Not .hds and .hdd, which may rightly be raw disks of Parallels.
_PROMISED = {
    ".ova": "an OVA archive",
    ".ovf": "an OVF description",
    ".vbox": "a VirtualBox machine",
    ".vmcx": "a Hyper-V machine",
    ".vmtx": "a VMware template",
    ".vmx": "a VMware machine",
    ".xva": "an XVA archive",
    ".dmg": "a dmg image",
    ".qcow2": "a qcow2 image",
    ".vdi": "a VDI image",
    ".vhd": "a VHD image",
    ".vhdx": "a VHDX image",
    ".vmdk": "a VMDK",
}
# Rightly raw: the extents of a flat VMDK, by the names that ESX and Workstation give them.
_FLAT_EXTENT = re.compile(r"-(flat|f\d{3})\.vmdk\Z", re.IGNORECASE)


def promised(name: str) -> str | None:
    """The format that a file's name promises. If its bytes have no known format, they were lost: a fixed VHD and a dmg are
    known only by their last sector, which an incomplete copy lacks."""
    return None if _FLAT_EXTENT.search(name) else _PROMISED.get(Path(name).suffix.lower())


# The folders of a Hyper-V export with configurations; its disks are in folders beside them.
_INNER_FOLDERS = ("virtual machines", "snapshots")


def root_of(where: Path) -> Path:
    """The folder in which files of a VM may be read, if a person named its file or folder outside the import root: the folder
    around it; for a Hyper-V machine's configuration the whole export's."""
    if where.is_dir():
        return where
    is_inner = where.suffix.lower() in (".vmcx", ".xml") and where.parent.name.lower() in _INNER_FOLDERS
    return where.parent.parent if is_inner else where.parent


def may_be_appliance(name: str, head: bytes) -> bool:
    """False: no importer takes a file of this name that begins with `head`; `registry.detect` would report it as unknown."""
    if name.lower().endswith(SUFFIXES):
        return True
    from synvirt.disks.tar import is_tar  # not loaded for disks with a partition table, which do not get here

    if is_tar(head):
        return True
    return not_read(head, b"") is not None


def not_read(head: bytes, tail: bytes) -> tuple[str, str] | None:
    """What a file is that no importer takes, and what to do about it, by its first bytes and its last 512; None: unknown."""
    for magic, at, what, hint in NOT_READ:
        if (head[at : at + len(magic)] if at >= 0 else tail[: len(magic)]) == magic:
            return what, hint
    return None
