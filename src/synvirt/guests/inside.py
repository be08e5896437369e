"""What the disks of a guest say of it, read without starting it: a process of its own, in a cage.

    python -P -m synvirt.guests.inside DESCRIPTOR...         open for reading, a disk each; prints facts as one JSON object

    disk ─▶ partitions, LVM ─▶ file systems ─▶ linux_facts.py │ windows_facts.py

File systems and registries are read by Debian's libfsext, libfsxfs, libfsntfs, libvslvm and libregf: nothing of a guest is ever
mounted by this host's kernel. What none of them reads (an encrypted volume, Btrfs) is a fact, too: where it lies, and why.
Whatever is on the disks may break them: then this process ends, and nobody else does.
"""

import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import pyfsext
import pyfsntfs
import pyfsxfs
import pyregf  # noqa: F401 - imported before the cage closes
import pyvslvm

from synvirt.blocks import Extent
from synvirt.cage import Cage, enter
from synvirt.errors import DiskReadFailed
from synvirt.guests import linux_facts, windows_facts
from synvirt.guests.files import Files, NtfsFiles, UnixFiles
from synvirt.machines.partitions import starts
from synvirt.model.facts import NOT_READ, bounded
from synvirt.sizes import GIB, MIB

MEMORY_BYTES = 2 * GIB
CPU_S = 30
# Guests with more volumes than that have the rest unread.
VOLUMES_MAX = 64
_MAGIC: Final = ((pyfsext.volume, 0x438, b"\x53\xef"), (pyfsxfs.volume, 0, b"XFSB"), (pyfsntfs.volume, 3, b"NTFS    "))
# What nobody here reads: headers of LUKS and BitLocker, superblocks of Btrfs, F2FS, ReFS and software RAID (1.1, 1.2).
_UNREAD: Final = (
    (0, b"LUKS\xba\xbe", "it is encrypted (LUKS)"),
    (3, b"-FVE-FS-", "it is encrypted (BitLocker)"),
    (0x10040, b"_BHRfS_M", "Btrfs is not read"),
    (0x400, b"\x10\x20\xf5\xf2", "F2FS is not read"),
    (3, b"ReFS\0", "ReFS is not read"),
    (0, b"\xfc\x4e\x2b\xa9", "it is a part of a software RAID, which is not put together"),
    (0x1000, b"\xfc\x4e\x2b\xa9", "it is a part of a software RAID, which is not put together"),
)
# In one of the first four sectors (lvm2, label.h).
_LVM, _LABEL_BYTES = b"LABELONE", 4 * 512


class Bytes(Protocol):
    """What the libraries take for a file."""

    def read(self, size: int = -1) -> bytes: ...
    def seek(self, offset: int, whence: int = 0) -> int: ...
    def tell(self) -> int: ...
    def get_size(self) -> int: ...


class Disk:
    """An open one, as our own code reads it."""

    max_readers = 1

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = os.lseek(descriptor, 0, os.SEEK_END)

    def extents(self) -> Iterator[Extent]:
        yield Extent(0, self.size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if os.preadv(self.descriptor, [buffer], offset) != len(buffer):
            raise DiskReadFailed(f"the disk ends before {offset + len(buffer)}")

    def close(self) -> None:
        os.close(self.descriptor)


class Window:
    """What lies on a disk from `start` on: how long it is, a file system knows itself."""

    def __init__(self, disk: Disk, start: int) -> None:
        self._disk, self._start, self._size, self._at = disk, start, disk.size - start, 0

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._at, 0)
        content = os.pread(self._disk.descriptor, left if size < 0 else min(size, left), self._start + self._at)
        self._at += len(content)
        return content

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def get_size(self) -> int:
        return self._size


def volumes(descriptors: Sequence[int], unread: dict[str, str]) -> Iterator[tuple[str, Bytes]]:
    """Disks, partitions and logical volumes that may hold a file system, each with where it lies. `unread`: to be added to."""
    held = []
    for number, disk in enumerate(map(Disk, descriptors), 1):
        for start in (starts(disk) or [0])[:VOLUMES_MAX]:
            part = Window(disk, start)
            if _LVM in part.read(_LABEL_BYTES):
                held.append(part)
            else:
                yield f"disk {number} from byte {start} on", part
    yield from _logical(held, unread)


def _logical(held: Sequence[Window], unread: dict[str, str]) -> Iterator[tuple[str, Bytes]]:
    """Of the first group that these parts are of: a system has one."""
    if not held:
        return
    handle = pyvslvm.handle()
    try:
        handle.open_file_object(held[0])
        handle.open_physical_volume_files_as_file_objects(list(held))
        group = handle.get_volume_group()
        yield from [(f"logical volume {one.name}", one) for one in list(group.logical_volumes)[:VOLUMES_MAX]]
    except (OSError, RuntimeError):
        unread["logical volumes"] = "LVM is not read as it is there: several groups, thin or cached volumes, or damage"


def opened(volume: Bytes) -> Files | None:
    """Its file system, where it has one that is read here."""
    for kind, offset, magic in _MAGIC:
        if _has(volume, offset, magic):
            found: Any = kind()
            found.open_file_object(volume)
            return NtfsFiles(found) if kind is pyfsntfs.volume else UnixFiles(found)
    return None


def _has(volume: Bytes, offset: int, magic: bytes) -> bool:
    volume.seek(offset)
    return volume.read(len(magic)) == magic


def _facts_of(where: str, volume: Bytes, unread: dict[str, str]) -> dict[str, str]:
    """Facts of the system on it; none, where there is none. Why it was not read, where it holds something."""
    try:
        for offset, magic, why in _UNREAD:
            if _has(volume, offset, magic):
                unread[where] = why
                return {}
        files = opened(volume)
        return {} if files is None else windows_facts.facts_of(files) if files.is_ntfs else linux_facts.facts_of(files)
    # What the libraries raise where a disk is odd, or hostile.
    except (OSError, RuntimeError, ValueError, TypeError, MemoryError, RecursionError):
        unread[where] = "its file system cannot be read: it is damaged, or of a kind that is too new"
        return {}


def facts(descriptors: Sequence[int]) -> dict[str, str]:
    """Of the first system that is found, and of all that was not read."""
    found: dict[str, str] = {}
    unread: dict[str, str] = {}
    for where, volume in volumes(descriptors, unread):
        said = _facts_of(where, volume, unread)
        found = found or said
    if descriptors and not found and not unread:
        unread["disks"] = "no system was found on them that is known here"
    return bounded({**{f"{NOT_READ} {where}": why for where, why in unread.items()}, **found})


def main(argv: Sequence[str]) -> int:
    """The process: descriptors as arguments, the facts as JSON on stdout."""
    descriptors = [int(one) for one in argv[1:]]
    enter(Cage(memory_bytes=MEMORY_BYTES, cpu_s=CPU_S, files=64 + len(descriptors), written_bytes=MIB))
    sys.stdout.write(json.dumps(facts(descriptors)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
