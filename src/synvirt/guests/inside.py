"""What the disks of a guest say of it, read without starting it: a process of its own, in a cage.

    python -P -m synvirt.guests.inside DESCRIPTOR...         open for reading, a disk each; prints facts as one JSON object

    disk ─▶ partitions, LVM ─▶ file systems ─▶ linux_facts.py │ windows_facts.py

File systems and registries are read by Debian's libfsext, libfsxfs, libfsntfs, libvslvm and libregf: nothing of a guest is ever
mounted by this host's kernel. Whatever is on the disks may break them: then this process ends, and nobody else does.
"""

import contextlib
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
from synvirt.model.facts import bounded
from synvirt.sizes import GIB, MIB

MEMORY_BYTES = 2 * GIB
CPU_S = 30
# Guests with more volumes than that have the rest unread.
VOLUMES_MAX = 64
_MAGIC: Final = ((pyfsext.volume, 0x438, b"\x53\xef"), (pyfsxfs.volume, 0, b"XFSB"), (pyfsntfs.volume, 3, b"NTFS    "))
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


def volumes(descriptors: Sequence[int]) -> Iterator[Bytes]:
    """Disks, partitions and logical volumes that may hold a file system."""
    held = []
    for disk in map(Disk, descriptors):
        for start in (starts(disk) or [0])[:VOLUMES_MAX]:
            part = Window(disk, start)
            if _LVM in part.read(_LABEL_BYTES):
                held.append(part)
            else:
                yield part
    yield from _logical(held)


def _logical(held: Sequence[Window]) -> Iterator[Bytes]:
    """Of the first group that these parts are of: a system has one."""
    if not held:
        return
    handle = pyvslvm.handle()
    with contextlib.suppress(OSError, RuntimeError):
        handle.open_file_object(held[0])
        handle.open_physical_volume_files_as_file_objects(list(held))
        group = handle.get_volume_group()
        yield from list(group.logical_volumes)[:VOLUMES_MAX]


def opened(volume: Bytes) -> Files | None:
    """Its file system, where it has one that is read here."""
    for kind, offset, magic in _MAGIC:
        volume.seek(offset)
        if volume.read(len(magic)) == magic:
            found: Any = kind()
            found.open_file_object(volume)
            return NtfsFiles(found) if kind is pyfsntfs.volume else UnixFiles(found)
    return None


def facts(descriptors: Sequence[int]) -> dict[str, str]:
    """Of the first system that is found."""
    for volume in volumes(descriptors):
        # What the libraries raise where a disk is odd, or hostile.
        with contextlib.suppress(OSError, RuntimeError, ValueError, TypeError, MemoryError, RecursionError):
            files = opened(volume)
            found = {} if files is None else windows_facts.told(files) if files.is_ntfs else linux_facts.told(files)
            if found:
                return bounded(found)
    return {}


def main(argv: Sequence[str]) -> int:
    descriptors = [int(one) for one in argv[1:]]
    enter(Cage(memory_bytes=MEMORY_BYTES, cpu_s=CPU_S, files=64 + len(descriptors), written_bytes=MIB))
    sys.stdout.write(json.dumps(facts(descriptors)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
