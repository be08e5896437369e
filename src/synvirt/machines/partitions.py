"""What a disk's partition table says of the VM: how it boots, its family of systems, what is encrypted.

UEFI specification 2.10, chapter 5 (GPT and the protective MBR); Windows' types: Microsoft, «PARTITION_INFORMATION_GPT». A look,
not a proof: a disk without a table says nothing, and nothing here refuses a disk.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from uuid import UUID

from synvirt.blocks import DiskReader
from synvirt.errors import SynvirtError

if TYPE_CHECKING:  # it loads pydantic, which what reads a guest's disks in a cage does not need
    from synvirt.model.machine import Family

# A table lies in the first sectors; disks with sectors of 4096 bytes keep it in the same sectors, eight times as far.
_SECTOR_SIZES = (512, 4096)
# UEFI asks for 128 entries of 128 bytes; of a larger table no more is read.
_ENTRIES_MAX = 128

_EFI_SYSTEM = UUID("C12A7328-F81F-11D2-BA4B-00A0C93EC93B")
_BIOS_BOOT = UUID("21686148-6449-6E6F-744E-656564454649")
_FAMILIES: dict[UUID | int, "Family"] = {
    UUID("E3C9E316-0B5C-4DB8-817D-F92DF00215AE"): "windows",  # Microsoft reserved
    UUID("DE94BBA4-06D1-4D40-A16A-BFD50179D6AC"): "windows",  # Windows recovery
    UUID("5808C8AA-7E8F-42E0-85D2-E1E90434CFB3"): "windows",  # LDM metadata
    UUID("0FC63DAF-8483-4772-8E79-3D69D8477DE4"): "linux",
    UUID("4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709"): "linux",  # root, x86-64
    UUID("E6D6D379-F507-44C2-A23C-238F2A3DF928"): "linux",  # LVM
    UUID("0657FD6D-A4AB-43C4-84E5-0933C84B4F4F"): "linux",  # swap
    0x07: "windows",
    0x27: "windows",
    0x42: "windows",
    0x82: "linux",
    0x83: "linux",
    0x8E: "linux",
    0xFD: "linux",
    0xA5: "other",  # FreeBSD
    0xA6: "other",
    0xA9: "other",
    0xBF: "other",  # Solaris
}
# Windows dynamic disks (LDM): neither another system nor the installation of drivers can read them.
_DYNAMIC = frozenset({UUID("5808C8AA-7E8F-42E0-85D2-E1E90434CFB3"), UUID("AF9B60A0-1431-4F62-BC68-3311714A69AD"), 0x42})
_GPT_PROTECTIVE = 0xEE
# Extended partitions contain others: each has a table of its own before it, which names the next one.
_EXTENDED = frozenset({0x05, 0x0F, 0x85})
_LOGICAL_MAX = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """`firmware` and `family` are None, where the table does not show them."""

    firmware: Literal["bios", "uefi"] | None = None
    family: "Family | None" = None
    dynamic: bool = False
    bitlocker: bool = False
    luks: bool = False


UNKNOWN = Layout()


def look(reader: DiskReader, *, within: int | None = None) -> Layout:
    """Never raises: a disk that cannot be read fails where it is copied, with a better error.

    `within`: reads only so many first bytes, where reading further is slow.
    """
    try:
        return _look(_Beginning(reader, reader.size if within is None else min(within, reader.size)))
    except (SynvirtError, struct.error):
        return UNKNOWN


def starts(reader: DiskReader) -> list[int]:
    """Where the disk's partitions begin, with those in an extended one; none, where it has no table."""
    try:
        disk = _Beginning(reader, reader.size)
        table, gpt = _table(disk)
        found = {start for kind, start in table if gpt or kind not in _EXTENDED}
        for kind, start in table:
            if not gpt and kind in _EXTENDED:
                found.update(_logical(disk, start))
        return sorted(start for start in found if 0 < start < reader.size)
    except (SynvirtError, struct.error):
        return []


@dataclass(frozen=True, slots=True)
class SystemPartition:
    """An EFI system partition of a GPT. `number`: of its entry, from 1; `first`, `sectors`: in sectors of its disk, as
    firmware counts; `start`: in bytes; `id`: its own GUID."""

    number: int
    first: int
    sectors: int
    start: int
    id: UUID


def system_partitions(reader: DiskReader) -> list[SystemPartition]:
    """None, where the disk has no GPT."""
    try:
        disk, found = _Beginning(reader, reader.size), list[SystemPartition]()
        if not _table(disk)[1]:
            return []
        for number, sector, entry in _gpt_entries(disk):
            kind, own = UUID(bytes_le=entry[:16]), UUID(bytes_le=entry[16:32])
            first, last = struct.unpack_from("<QQ", entry, 32)
            if kind == _EFI_SYSTEM and 0 < first <= last and first * sector < reader.size:
                found.append(SystemPartition(number, first, last - first + 1, first * sector, own))
    except (SynvirtError, struct.error):
        return []
    return found


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The first `size` bytes of a disk."""

    reader: DiskReader
    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Short at the end, empty behind it."""
        data = bytearray(max(0, min(length, self.size - offset)))
        if data:
            self.reader.read_into(offset, memoryview(data))
        return bytes(data)


def _look(disk: _Beginning) -> Layout:
    table, gpt = _table(disk)
    return _described(disk, table, gpt=gpt) if table or gpt else UNKNOWN


def _table(disk: _Beginning) -> tuple[list[tuple[UUID | int, int]], bool]:
    """Each partition's type and its beginning; and whether the table is a GPT."""
    mbr = disk.read(0, 512)
    if mbr[510:] != b"\x55\xaa":
        return [], False
    table: list[tuple[UUID | int, int]] = [
        (kind, start * 512) for kind, start in struct.iter_unpack("<4xB3xI4x", mbr[446:510]) if kind
    ]
    return (_gpt(disk), True) if any(kind == _GPT_PROTECTIVE for kind, _ in table) else (table, False)


def _logical(disk: _Beginning, extended: int) -> Iterator[int]:
    """Where the partitions in an extended one begin: relative to their own table, whose place is relative to the first one."""
    at = extended
    for _ in range(_LOGICAL_MAX):
        table = disk.read(at, 512)
        if table[510:] != b"\x55\xaa":
            return
        entries = [(kind, start * 512) for kind, start in struct.iter_unpack("<4xB3xI4x", table[446:478]) if kind]
        yield from (at + start for kind, start in entries if kind not in _EXTENDED)
        following = [extended + start for kind, start in entries if kind in _EXTENDED]
        if not following:
            return
        at = following[0]


def _gpt(disk: _Beginning) -> list[tuple[UUID | int, int]]:
    return [
        (UUID(bytes_le=entry[:16]), struct.unpack_from("<Q", entry, 32)[0] * sector) for _, sector, entry in _gpt_entries(disk)
    ]


def _gpt_entries(disk: _Beginning) -> Iterator[tuple[int, int, bytes]]:
    """The used entries: each one's number from 1, the size of the disk's sectors, and the entry itself."""
    for sector in _SECTOR_SIZES:
        header = disk.read(sector, 92)
        if header[:8] != b"EFI PART":
            continue
        at, count, size = struct.unpack_from("<QII", header, 72)
        if size < 128 or size > 4096:
            return
        entries = disk.read(at * sector, min(count, _ENTRIES_MAX) * size)
        for number, start in enumerate(range(0, len(entries) - size + 1, size), 1):  # whole ones: the disk may end before
            if any(entries[start : start + 16]):
                yield number, sector, entries[start : start + size]
        return


def _described(disk: _Beginning, table: Sequence[tuple[UUID | int, int]], *, gpt: bool) -> Layout:
    kinds = {kind for kind, _ in table}
    families = [_FAMILIES[kind] for kind, _ in table if kind in _FAMILIES]
    begins = [disk.read(start, 16) for _, start in sorted(table, key=lambda each: each[1]) if 0 < start <= disk.size - 16]
    # With both an EFI system partition and a BIOS boot partition the disk boots either way, and BIOS is the default.
    uefi = gpt and _EFI_SYSTEM in kinds and _BIOS_BOOT not in kinds
    return Layout(
        firmware=None if not table else "uefi" if uefi else "bios",
        family="windows" if "windows" in families else families[0] if families else None,
        dynamic=bool(kinds & _DYNAMIC),
        bitlocker=any(begin[3:11] == b"-FVE-FS-" for begin in begins),
        luks=any(begin[:6] == b"LUKS\xba\xbe" for begin in begins),
    )
