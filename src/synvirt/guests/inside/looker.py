"""Facts of a guest from its disks, read without starting it: a process of its own, in a cage.

    python -P -m synvirt.guests.inside.looker DESCRIPTOR...   one open disk each; prints facts as one JSON object
    python -P -m synvirt.guests.inside.looker --loaders DESCRIPTOR...   prints the loaders of systems that boot by UEFI

A disk that is an overlay in qcow2 has two: DESCRIPTOR:DESCRIPTOR, the second of the raw file under it. nbd:DESCRIPTOR is a
connection to what serves a disk.

    disk ─▶ partitions, mirrors, LVM ─▶ file systems ─▶ superblocks.py, linux_facts.py │ windows_facts.py

ext4, XFS, NTFS and registries are read by Debian's libfsext, libfsxfs, libfsntfs and libregf, LVM and Btrfs by our own code:
this host's kernel never mounts anything of a guest. A volume that is not read (an encrypted one) gives a fact, too: where it
lies, and why. The contents of the disks may crash a reader: then only this process ends.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import pyfsext
import pyfsntfs
import pyfsxfs
import pyregf  # noqa: F401 - imported before the cage closes

from synvirt.blocks import DiskReader, Extent, bytes_of
from synvirt.cage import Cage, enter
from synvirt.errors import DiskReadFailed, SynvirtError
from synvirt.guests.inside import linux_devices, linux_facts, lvm, menus, mirrors, superblocks, windows_facts
from synvirt.guests.inside.btrfs.subvolumes import Btrfs
from synvirt.guests.inside.btrfs.trees import MAGIC, MAGIC_AT, SUPERBLOCK_AT, newest
from synvirt.guests.inside.files import Files, NtfsFiles, UnixFiles
from synvirt.guests.inside.initramfs import drivers_of
from synvirt.guests.inside.loaders import LOADERS_MAX, loaders_of, menus_of
from synvirt.guests.inside.opening import SERVED
from synvirt.guests.inside.seekable import Bytes, Window, read_at
from synvirt.machines.partitions import starts
from synvirt.model.facts import NOT_READ, bounded, several, short
from synvirt.sizes import GIB, KIB, MIB

LOADERS = "--loaders"
MEMORY_BYTES = 2 * GIB
CPU_S = 30
# Of facts, as JSON: looking.py reads no more.
WRITTEN_BYTES = 4 * MIB
# Of a disk that is not read by its descriptor: 16 MiB, which hold the tables of a file system.
BLOCK_BYTES, BLOCKS_KEPT = 64 * KIB, 256
# Of a guest with more volumes, the rest is not read.
VOLUMES_MAX = 64
EXT4, XFS, BTRFS, NTFS = ((0x438, b"\x53\xef"), (0, b"XFSB"), (SUPERBLOCK_AT + MAGIC_AT, MAGIC), (3, b"NTFS    "))
# Signatures of what is not read here: headers of LUKS and BitLocker, superblocks of F2FS, ReFS and software RAID (1.1, 1.2).
_UNREAD: Final = (
    (0, b"LUKS\xba\xbe", "it is encrypted (LUKS)"),
    (3, b"-FVE-FS-", "it is encrypted (BitLocker)"),
    (0x400, b"\x10\x20\xf5\xf2", "F2FS is not read"),
    (3, b"ReFS\0", "ReFS is not read"),
    *((at, mirrors.MAGIC, "it is a part of a software RAID, which is not put together") for at in mirrors.PLACES),
)
# The master file table's seventh entry: $Bitmap.
_BITMAP = 6
# The libraries' exceptions for an odd or hostile disk; our own give the reason.
_DAMAGE: Final = (OSError, RuntimeError, ValueError, TypeError, MemoryError, RecursionError)


class Disk:
    """An open disk, for our own code."""

    max_readers = 1

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = os.lseek(descriptor, 0, os.SEEK_END)

    def extents(self) -> Iterator[Extent]:
        yield Extent(0, self.size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if os.preadv(self.descriptor, [buffer], offset) != len(buffer):
            raise DiskReadFailed(f"the disk ends before {offset + len(buffer)}")

    def pread(self, length: int, offset: int) -> bytes:
        """For the readers of its content."""
        return os.pread(self.descriptor, length, offset)

    def close(self) -> None:
        os.close(self.descriptor)


class Read:
    """A disk by one of our readers, for the readers of its content. They read little at a time, which may be a way over a
    network: the last blocks are kept."""

    max_readers = 1

    def __init__(self, reader: DiskReader) -> None:
        self._reader = reader
        self.size = reader.size
        self._block = lru_cache(BLOCKS_KEPT)(self._read_block)

    def extents(self) -> Iterator[Extent]:
        yield Extent(0, self.size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._reader.read_into(offset, buffer)

    def pread(self, length: int, offset: int) -> bytes:
        """For the readers of its content."""
        end = min(offset + length, self.size)
        if end <= offset:
            return b""
        first = offset // BLOCK_BYTES
        content = b"".join(self._block(number) for number in range(first, -(-end // BLOCK_BYTES)))
        return content[offset - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def _read_block(self, number: int) -> bytes:
        start = number * BLOCK_BYTES
        return bytes_of(self._reader, start, min(BLOCK_BYTES, self.size - start))

    def close(self) -> None:
        self._reader.close()


def overlay(descriptor: int, backing: int) -> Read:
    """An open overlay in qcow2, and the raw file under it, whatever the overlay names."""
    from synvirt.disks.entries import WindowCache
    from synvirt.disks.qcow2.mapping import WINDOWS_KEPT
    from synvirt.disks.qcow2.named_files import Chain
    from synvirt.disks.qcow2.reader import Qcow2Reader
    from synvirt.disks.raw.files import RawReader

    class Given(Chain):
        def open(self, reference: str) -> tuple[DiskReader, Chain]:
            return RawReader("the volume", descriptor=backing), self

    return Read(Qcow2Reader(RawReader("the overlay", descriptor=descriptor), chain=Given(WindowCache(WINDOWS_KEPT))))


def export(connection: int) -> Read:
    """A disk that another process serves by NBD, on a connection of this number."""
    from synvirt.disks.nbd.reader import NbdReader

    return Read(NbdReader(lambda handle: handle.aio_connect_socket(connection), connections=1, name="the volume"))


def opened_disk(argument: str) -> "Disk | Read":
    """By an argument of this process. Raises the error of a disk that is not served, or of a damaged overlay."""
    if argument.startswith(SERVED):
        return export(int(argument.removeprefix(SERVED)))
    descriptors = [int(part) for part in argument.split(":")]
    return overlay(*descriptors) if len(descriptors) > 1 else Disk(*descriptors)


def volumes(disks: Sequence[Disk | Read], held: list[lvm.Physical], unread: dict[str, str]) -> list[tuple[str, Bytes]]:
    """Disks, partitions and logical volumes that may hold a file system, each with its place. Adds physical volumes to `held`,
    and to `unread`."""
    found: list[tuple[str, Bytes]] = []
    parts = [
        (f"disk {number} from byte {start} on", Window(disk, start))
        for number, disk in enumerate(disks, 1)
        for start in (starts(disk) or [0])[:VOLUMES_MAX]
    ]
    halves = {where: half for where, part in parts if (half := mirrors.half(part)) is not None}
    for where, part in parts:
        if where in halves and mirrors.is_away(halves[where], halves.values()):
            unread[where] = mirrors.AWAY
            continue
        volume = halves[where].data if where in halves else part
        try:
            physical = lvm.physical(volume)
        except DiskReadFailed as error:
            unread[where] = f"{lvm.NOT_READ}: {error.detail}"
            continue
        if physical is None:
            found.append((where, volume))
        else:
            held.append(physical)
    return [*found, *lvm.logical_volumes(held, unread)]


def _together(found: Sequence[tuple[str, Bytes]]) -> list[tuple[str, list[Bytes]]]:
    """The file systems: one of Btrfs may lie on several volumes."""
    groups: dict[str | bytes, tuple[str, list[Bytes]]] = {}
    for where, volume in found:
        try:
            number = read_at(volume, SUPERBLOCK_AT + 0x20, 16) if _is(volume, BTRFS) else where
        except DiskReadFailed:
            number = where
        groups.setdefault(number, (where, []))[1].append(volume)
    return list(groups.values())


def _is(volume: Bytes, kind: tuple[int, bytes]) -> bool:
    offset, magic = kind
    return read_at(volume, offset, len(magic)) == magic


def opened(parts: Sequence[Bytes]) -> tuple[str, Iterator[Files]] | None:
    """A description of the file system, and the places in it that may hold a system. None, where none is read here.

    `parts`: all volumes that it lies on."""
    [volume, *_] = parts
    if _is(volume, EXT4):
        return superblocks.ext4(volume), _by_library(pyfsext.volume(), volume)
    if _is(volume, XFS):
        return superblocks.xfs(volume), _by_library(pyfsxfs.volume(), volume)
    if _is(volume, BTRFS):
        return superblocks.btrfs(newest(parts)), _of_btrfs(parts)
    if _is(volume, NTFS):
        found = pyfsntfs.volume()
        found.open_file_object(volume)
        return superblocks.ntfs(volume, found.name or "", found.get_file_entry(_BITMAP)), iter([NtfsFiles(found)])
    return None


def _by_library(library: Any, volume: Bytes) -> Iterator[Files]:
    library.open_file_object(volume)
    yield UnixFiles(library)


def _of_btrfs(parts: Sequence[Bytes]) -> Iterator[Files]:
    for place in Btrfs(parts).subvolumes():
        yield UnixFiles(place)


@dataclass(slots=True)
class _Booting:
    """`by_efi`: the menus on EFI system partitions. `found`: the file system with the kernel, and the entry that starts it."""

    by_efi: Mapping[str, str]
    found: tuple[Files, menus.Entry] | None = None


def _facts_of(
    where: str, parts: Sequence[Bytes], held: Sequence[lvm.Physical], booting: _Booting, unread: dict[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Facts of the file system, and of the system on it, which may be none. Where there is something that was not read, why.
    Notes in `booting`, where it has none, what the menu of a boot loader starts."""
    of_itself: dict[str, str] = {}
    try:
        for offset, magic, why in _UNREAD:
            if _is(parts[0], (offset, magic)):
                unread[where] = why
                return {}, {}
        found = opened(parts)
        if found is not None:
            of_itself[f"volume {where}"], places = found
            for files in places:
                if not files.is_ntfs and booting.found is None and (entry := menus.started(files, booting.by_efi)) is not None:
                    booting.found = files, entry
                facts = windows_facts.facts_of(files) if files.is_ntfs else linux_facts.facts_of(files)
                if facts:
                    names = {one.name for one in held}
                    return of_itself, facts if files.is_ntfs else dict(linux_devices.devices_of(files, names)) | facts
    except SynvirtError as error:
        unread[where] = f"its file system cannot be read: {error.detail}"
    except _DAMAGE:
        unread[where] = "its file system cannot be read: it is damaged, or of a kind that is too new"
    return of_itself, {}


def _of_start(files: Files, entry: menus.Entry) -> Iterator[tuple[str, str]]:
    """Facts of how the kernel is started: of its command line, and of its initramfs."""
    yield from linux_devices.command_line(entry).items()
    try:
        found = [entry.file(files, path) for path in entry.initrds]
        if not found or None in found:
            return
        drivers = drivers_of(found, entry.configuration(files))
    except (SynvirtError, *_DAMAGE):
        return
    if drivers is not None:
        yield f"drivers in {short(entry.shown(entry.initrds[-1]))}", several(drivers) or "none for disks here"


def _menus_by_efi(disks: Sequence[Disk | Read]) -> dict[str, str]:
    found: dict[str, str] = {}
    for disk in disks:
        with suppress(*_DAMAGE):
            found |= menus_of(disk)
    return found


def facts(disks: Sequence[Disk | Read]) -> dict[str, str]:
    """Facts of the first system that is found, of all file systems, and of all that was not read."""
    system: dict[str, str] = {}
    file_systems: dict[str, str] = {}
    unread: dict[str, str] = {}
    booting = _Booting(_menus_by_efi(disks))
    held: list[lvm.Physical] = []
    for where, parts in _together(volumes(disks, held, unread)):
        of_itself, found = _facts_of(where, parts, held, booting, unread)
        file_systems |= of_itself
        system = system or found
    if disks and not system and not unread:
        unread["disks"] = "no system was found on them that is known here"
    started = dict(_of_start(*booting.found)) if booting.found is not None else {}
    return bounded({**{f"{NOT_READ} {where}": why for where, why in unread.items()}, **file_systems, **started, **system})


def found_loaders(disks: Sequence[Disk | Read]) -> dict[str, str]:
    """By numbers: the loaders that a firmware does not find by itself."""
    found = [one.line() for disk in disks for one in loaders_of(disk)]
    return {str(number): line for number, line in enumerate(found[:LOADERS_MAX])}


def main(argv: Sequence[str]) -> int:
    """The process: descriptors as arguments, the facts as JSON on stdout. With LOADERS first, loaders instead of facts."""
    wanted = found_loaders if argv[1:2] == [LOADERS] else facts
    arguments = [one for one in argv[1:] if one != LOADERS]
    # What reads them is loaded before the cage closes.
    if any(":" in one for one in arguments):
        import synvirt.disks.nbd.reader
        import synvirt.disks.qcow2.reader  # noqa: F401
    enter(Cage(memory_bytes=MEMORY_BYTES, cpu_s=CPU_S, files=64 + 2 * len(arguments), written_bytes=WRITTEN_BYTES))
    try:
        found = wanted([opened_disk(one) for one in arguments])
    except SynvirtError as error:
        found = {f"{NOT_READ} disks": error.detail}
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
