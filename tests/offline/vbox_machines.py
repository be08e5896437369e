"""Folders of VirtualBox machines, by hand: VirtualBox itself is in no Debian release."""

import os
import struct
from pathlib import Path
from uuid import UUID

from synvirt import programs
from tests.needs import need
from tests.offline import appliances

MACHINE = (appliances.DESCRIPTIONS / "machine.vbox").read_bytes()
BASE, FIRST, SECOND = (f"11111111-0000-4000-8000-00000000000{number}" for number in (1, 2, 3))
DATA = "22222222-0000-4000-8000-000000000001"
MIB = 1 << 20


def vdi(raw: bytes, uuid: str, parent: str | None = None) -> bytes:
    """A VDI by qemu-img; with a parent, a differencing one: blocks of zeros are the parent's then (VDICore.h, image type 4)."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (source := Path(folder, "raw")).write_bytes(raw)
        return vdi_file(Path(folder, "disk.vdi"), source, uuid, parent).read_bytes()


def vdi_file(target: Path, raw: Path, uuid: str, parent: str | None = None) -> Path:
    """The same, of a file that may be large."""
    programs.run([need("qemu-img", "qemu-utils"), "convert", "-f", "raw", "-O", "vdi", str(raw), str(target)], timeout_s=60)
    with target.open("r+b") as file:
        os.pwrite(file.fileno(), UUID(uuid).bytes_le, 392)
        if parent is not None:
            os.pwrite(file.fileno(), struct.pack("<I", 4), 76)
            os.pwrite(file.fileno(), UUID(parent).bytes_le, 424)
    return target


def vmdk(raw: bytes, uuid: str, parent: str | None = None) -> bytes:
    """A VMDK as VirtualBox writes it: its UUID and its parent's in the descriptor, which has no other word of a parent
    (src/VBox/Storage/VMDK.cpp, VMDK_DDB_PARENT_UUID)."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        content = bytearray(appliances.image(Path(folder), "disk.vmdk", "vmdk", raw).read_bytes())
    end = content.index(b"\0", content.index(b"ddb.adapterType"))
    none = "00000000-0000-0000-0000-000000000000"
    lines = f'ddb.uuid.image="{uuid}"\nddb.uuid.parent="{parent or none}"\n'.encode()
    content[end : end + len(lines)] = lines
    return bytes(content)


def blocks(text: str) -> bytes:
    """A letter is a mebibyte of it (a VDI block), `-` one of zeros."""
    return b"".join((block.encode() if block != "-" else b"\0") * MIB for block in text)


# Each image's own blocks, and what the machine sees through the newest.
CHAIN = {BASE: "AAAA-A", FIRST: "-B----", SECOND: "--C--C"}
SEEN = "ABCA-C"


def machine(folder: Path, description: bytes = MACHINE) -> Path:
    (folder / "Snapshots").mkdir(parents=True)
    (folder / "web.vbox").write_bytes(description)
    (folder / "web.vdi").write_bytes(vdi(blocks(CHAIN[BASE]), BASE))
    (folder / f"Snapshots/{{{FIRST}}}.vdi").write_bytes(vdi(blocks(CHAIN[FIRST]), FIRST, BASE))
    (folder / f"Snapshots/{{{SECOND}}}.vdi").write_bytes(vdi(blocks(CHAIN[SECOND]), SECOND, FIRST))
    (folder / "data.vmdk").write_bytes(appliances.disk_file("vmdk", appliances.DISK_BYTES, 1))
    return folder


def one_disk(*, memory_mib: int, extension: str = "vdi") -> bytes:
    """A .vbox of a machine with one disk, on SATA, and one snapshot of it: the image FIRST over BASE."""
    return f"""<?xml version="1.0"?>
<VirtualBox xmlns="http://www.virtualbox.org/" version="1.16-linux">
  <Machine uuid="{{3bd3d2a7-9d8b-4a3c-9a44-2b1f5c6f4d10}}" name="wrapped" OSType="Debian_64" snapshotFolder="Snapshots">
    <MediaRegistry><HardDisks>
      <HardDisk uuid="{{{BASE}}}" location="web.{extension}" format="{extension.upper()}" type="Normal">
        <HardDisk uuid="{{{FIRST}}}" location="Snapshots/{{{FIRST}}}.{extension}" format="{extension.upper()}"/>
      </HardDisk>
    </HardDisks></MediaRegistry>
    <Snapshot uuid="{{0a0a0a0a-0000-4000-8000-000000000001}}" name="before" timeStamp="2024-01-01T10:00:00Z"/>
    <Hardware>
      <CPU count="1"/>
      <Memory RAMSize="{memory_mib}"/>
      <Network><Adapter slot="0" enabled="true" MACAddress="080027F3C2AA" type="82540EM"><NAT/></Adapter></Network>
    </Hardware>
    <StorageControllers>
      <StorageController name="SATA" type="AHCI" PortCount="1">
        <AttachedDevice type="HardDisk" port="0" device="0"><Image uuid="{{{FIRST}}}"/></AttachedDevice>
      </StorageController>
    </StorageControllers>
  </Machine>
</VirtualBox>
""".encode()
