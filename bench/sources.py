"""The images that rows are measured on, made when first asked for: a disk of real files, and what others make of it.

Real files matter: zeros and noise inflate, compress and cache like nothing that anybody migrates.
"""

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
# Programs, libraries, documentation: text and code as they lie on a Linux disk.
REAL_FILES = Path("/usr")
HUGE_BYTES, HUGE_DATA_BYTES = 1 << 40, 100 * MIB
BLOCK_BYTES = 4096
# Of ext4: an inode, and what a journal and the tables of groups take at most of a small disk.
INODE_BYTES, JOURNAL_BYTES = 256, 48 * MIB
PARTITION_AT = MIB

OVF = """<?xml version="1.0" encoding="UTF-8"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1"
 xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData">
 <References><File ovf:href="disk1.vmdk" ovf:id="file1"/></References>
 <DiskSection><Info/><Disk ovf:capacity="{capacity}" ovf:diskId="disk1" ovf:fileRef="file1"
  ovf:format="http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized"/></DiskSection>
 <VirtualSystem ovf:id="bench"><Info/><VirtualHardwareSection><Info/>
  <Item><rasd:InstanceID>1</rasd:InstanceID><rasd:ResourceType>3</rasd:ResourceType><rasd:VirtualQuantity>1</rasd:VirtualQuantity></Item>
  <Item><rasd:AllocationUnits>byte * 2^20</rasd:AllocationUnits><rasd:InstanceID>2</rasd:InstanceID>
   <rasd:ResourceType>4</rasd:ResourceType><rasd:VirtualQuantity>512</rasd:VirtualQuantity></Item>
  <Item><rasd:HostResource>ovf:/disk/disk1</rasd:HostResource><rasd:InstanceID>3</rasd:InstanceID>
   <rasd:ResourceType>17</rasd:ResourceType></Item>
 </VirtualHardwareSection></VirtualSystem>
</Envelope>
"""


class Sources:
    """The folder of images. `get` makes one when it is missing, whole or not at all, so that a folder can be kept."""

    def __init__(self, folder: Path, data_mib: int) -> None:
        self.folder, self._data_bytes = folder, data_mib * MIB
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            print(f"making {name} …", file=sys.stderr, flush=True)
            unfinished = self.folder / f".{name}"
            try:
                MAKERS[name](self, unfinished)
                unfinished.rename(path)
            finally:
                unfinished.unlink(missing_ok=True)
        return path

    def drop(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def make_disk(self, path: Path) -> None:
        """One partition with an ext4 file system of real files, a fifth of it free, as disks are."""
        files = self.folder / ".files"
        try:
            copied, entries = _copy_files(REAL_FILES, files, self._data_bytes)
            # Inodes for as many as there are: by its size, a small disk of small files would have too few.
            inodes = entries + 1000
            size = int((copied + inodes * INODE_BYTES + self._data_bytes * 0.3 + JOURNAL_BYTES) // MIB) * MIB
            options = f"root_owner=0:0,offset={PARTITION_AT}"
            shape = ["-t", "ext4", "-I", str(INODE_BYTES), "-N", str(inodes), "-E", options]
            _run(["mke2fs", "-q", *shape, "-d", str(files), str(path), f"{size // 1024}k"])
        finally:
            shutil.rmtree(files, ignore_errors=True)
        entry = struct.pack("<8B2I", 0x80, 0, 0, 0, 0x83, 0, 0, 0, PARTITION_AT // 512, size // 512)
        with path.open("r+b") as disk:
            disk.truncate(PARTITION_AT + size)
            disk.seek(446)
            disk.write(entry + bytes(48) + b"\x55\xaa")

    def make_huge(self, path: Path) -> None:
        """1 TiB, with 100 MiB in a hundred places."""
        with path.open("wb") as file, self.get("disk.raw").open("rb") as disk:
            file.truncate(HUGE_BYTES)
            for part in range(100):
                file.seek(part * (HUGE_BYTES // 100) // BLOCK_BYTES * BLOCK_BYTES)
                file.write(disk.read(HUGE_DATA_BYTES // 100 // BLOCK_BYTES * BLOCK_BYTES))

    def make_ova(self, path: Path, *, manifest: bool) -> None:
        vmdk = self.get("stream.vmdk")
        ovf = self.folder / ".ovf"
        ovf.write_text(OVF.format(capacity=self.get("disk.raw").stat().st_size))
        lines = self.folder / ".mf"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            tar.add(ovf, "bench.ovf")
            if manifest:
                lines.write_text("".join(f"SHA256({name})= {_sha256(file)}\n" for name, file in _members(ovf, vmdk)))
                tar.add(lines, "bench.mf")
            tar.add(vmdk, "disk1.vmdk")
        ovf.unlink()
        lines.unlink(missing_ok=True)


def _converted(source: str, image_format: str, *more: str) -> Callable[[Sources, Path], None]:
    def make(sources: Sources, path: Path) -> None:
        argv = ["qemu-img", "convert", "-W", "-m", "16", "-f", "raw", "-O", image_format, *more]
        _run([*argv, str(sources.get(source)), str(path)])

    return make


MAKERS: dict[str, Callable[[Sources, Path], None]] = {
    "disk.raw": Sources.make_disk,
    "stream.vmdk": _converted("disk.raw", "vmdk", "-o", "subformat=streamOptimized"),
    "sparse.vmdk": _converted("disk.raw", "vmdk", "-o", "subformat=monolithicSparse"),
    "plain.ova": lambda sources, path: sources.make_ova(path, manifest=False),
    "manifest.ova": lambda sources, path: sources.make_ova(path, manifest=True),
    "disk.qcow2": _converted("disk.raw", "qcow2"),
    "zlib.qcow2": _converted("disk.raw", "qcow2", "-c"),
    "zstd.qcow2": _converted("disk.raw", "qcow2", "-c", "-o", "compression_type=zstd"),
    "disk.vhdx": _converted("disk.raw", "vhdx"),
    "disk.vhd": _converted("disk.raw", "vpc", "-o", "force_size=on"),
    "disk.vdi": _converted("disk.raw", "vdi"),
    "huge.raw": Sources.make_huge,
    "huge.qcow2": _converted("huge.raw", "qcow2"),
}

# The raw disk that each source must become.
ORIGINALS = {"huge.raw": "huge.raw", "huge.qcow2": "huge.raw"}


def original_of(source: str) -> str:
    return ORIGINALS.get(source, "disk.raw")


def needs(source: str) -> set[str]:
    """The images that must be kept while `source` is measured: itself, and the disk it is compared with."""
    return {source, original_of(source)}


def _copy_files(tree: Path, into: Path, limit_bytes: int) -> tuple[int, int]:
    """Files of the tree, in order of their names, until they are this many bytes; links and devices are left out. The bytes
    that they take, and how many files and folders they are."""
    copied = entries = 0
    for folder, folders, names in os.walk(tree):
        folders.sort()
        place = into / Path(folder).relative_to(tree)
        for name in sorted(names):
            file = Path(folder) / name
            if file.is_symlink() or not file.is_file():
                continue
            size = -(-file.stat().st_size // BLOCK_BYTES) * BLOCK_BYTES
            if copied + size > limit_bytes:
                continue
            if not place.is_dir():
                above = sum(not parent.is_dir() for parent in (place, *place.parents))
                copied, entries = copied + above * BLOCK_BYTES, entries + above
                place.mkdir(parents=True)
            shutil.copyfile(file, place / name)
            copied, entries = copied + size, entries + 1
        if limit_bytes - copied < BLOCK_BYTES:
            break
    return copied, entries


def _members(ovf: Path, vmdk: Path) -> list[tuple[str, Path]]:
    return [("bench.ovf", ovf), ("disk1.vmdk", vmdk)]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(argv: list[str]) -> None:
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    subprocess.run(argv, check=True, env=environment, stdout=subprocess.DEVNULL)
