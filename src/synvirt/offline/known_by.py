"""What a file may be known by, before any importer is loaded: their modules take longer to load than a small disk to copy."""

from pathlib import Path

from synvirt.disks import tar

# What `OfflineImporter.probe` is promised.
HEAD_BYTES = 64 << 10

# Descriptions are text, and known by their names; archives by their first bytes, and where they are damaged by their names.
SUFFIXES = (".ovf", ".vmx", ".vmtx", ".vbox", ".xml", ".vmcx", ".exp", ".ova", ".xva", ".xva.gz", ".xva.zst")

# What people try to import, with what to do about it: (magic, where it lies, what it is, hint).
NOT_READ: tuple[tuple[bytes, int, str, str], ...] = (
    (b"\x1f\x8b", 0, "a gzip file", "Unpack it with gunzip first."),
    (b"\xfd7zXZ", 0, "an xz file", "Unpack it with unxz first."),
    (b"\x28\xb5\x2f\xfd", 0, "a zstd file", "Unpack it with unzstd first."),
    (b"BZh", 0, "a bzip2 file", "Unpack it with bunzip2 first."),
    (b"PK\x03\x04", 0, "a zip archive", "Unpack it, and import the folder or the disk inside."),
    (b"7z\xbc\xaf\x27\x1c", 0, "a 7z archive", "Unpack it, and import the folder or the disk inside."),
    (b"conectix", 0, "a VHD image by itself", "Convert it first: qemu-img convert -O vhdx OLD NEW."),
    (
        b"\x7f\x10\xda\xbe",
        0x40,
        "a VDI image by itself",
        "Import its machine's .vbox, or convert it: qemu-img convert -O qcow2.",
    ),
    (b"\x14\x20\x28\x01", 0, "a state of a Hyper-V machine", "Import the machine's folder, or its .vmcx."),
    (b"CD001", 0x8001, "a CD image", "An installation medium is no VM: only disks are imported."),
)


# A Hyper-V export keeps configurations in these, and the disks in folders beside them.
_INNER_FOLDERS = ("virtual machines", "snapshots")


def root_of(where: Path) -> Path:
    """All that may be read of a VM whose file or folder a person named outside the import root: the folder it lies in; of a
    Hyper-V machine's configuration the whole export's."""
    if where.is_dir():
        return where
    is_inner = where.suffix.lower() in (".vmcx", ".xml") and where.parent.name.lower() in _INNER_FOLDERS
    return where.parent.parent if is_inner else where.parent


def may_be_appliance(name: str, head: bytes) -> bool:
    """False: no importer takes a file of this name that begins with `head`; `registry.detect` would call it unknown."""
    if name.lower().endswith(SUFFIXES) or tar.is_tar(head):
        return True
    return any(head[at : at + len(magic)] == magic for magic, at, _, _ in NOT_READ)
