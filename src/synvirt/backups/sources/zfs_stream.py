"""What a stream of `zfs send -i` lists as changed in a volume: areas, and none of its bytes.

OpenZFS, include/sys/zfs_ioctl.h, dmu_replay_record_t: records of 312 bytes in the sender's byte order, some with a payload.

    BEGIN             magic, type of the data set, guids of both snapshots
    WRITE, …          object, offset, length, and the bytes, which are skipped
    FREE              object, offset, length; the largest number means to its end. Also of areas that were always holes
    OBJECT, …         objects, as they are made and removed
    END               all that came before is complete
    the others        are in no plain stream of a volume

A volume's bytes are its object 1, at their own offsets (ZVOL_OBJ of module/zfs/zvol.c); object 2 is its properties. An unknown
record is an error: it could be a change that we would miss.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import IO

from synvirt.backups.orders import ZfsChangesSpec
from synvirt.blocks import Extent
from synvirt.destinations.zfs_command import Zfs
from synvirt.errors import DeltaFallback, SynvirtError
from synvirt.programs import Begun, ProgramFailed, begin, output_of
from synvirt.sizes import MIB

# For a volume of many terabytes that has changed completely.
SEND_TIMEOUT_S = 24 * 3600
RECORD_BYTES = 312
MAGIC = 0x2F5BACBAC
SUBSTREAM = 1
ZVOL = 3  # dmu_objset_type_t: DMU_OST_ZVOL
DATA_OBJECT = 1
# DMU_OBJECT_END: to the object's end.
TO_THE_END = 2**64 - 1
# SPA_MAXBLOCKSIZE; a payload is a block, or less.
PAYLOAD_BYTES_MAX = 16 * MIB


class Kind(IntEnum):
    """The types of records in a stream, by their numbers (dmu_replay_record_t)."""

    BEGIN, OBJECT, FREEOBJECTS, WRITE, FREE, END, WRITE_BYREF, SPILL, WRITE_EMBEDDED, OBJECT_RANGE, REDACT = range(11)


_HEAD = struct.Struct("<II")
# magic, version info, time, type, flags, to, from
_BEGIN = struct.Struct("<QQQIIQQ")
# object, its type, type of its bonus, block size, length of the bonus, checksum, compression, slots, flags, raw length
_OBJECT = struct.Struct("<QIIIIBBBBI")
# object, its type, padding, offset, length, to, checksum, flags, compression, padding, key, compressed length
_WRITE = struct.Struct("<QIIQQQBBB5x40xQ")
# object, offset, length, to
_RANGE = struct.Struct("<QQQQ")
# …, compression, type, padding, length, length as it is stored
_EMBEDDED = struct.Struct("<QQQQBB6xII")


@dataclass(frozen=True, slots=True)
class Send:
    """A running `zfs send`. `refused`: why it does not run."""

    spec: ZfsChangesSpec
    until_guid: int = 0
    begun: Begun | None = None
    refused: DeltaFallback | None = None


def send(spec: ZfsChangesSpec) -> Send:
    """Started before the cage is entered: zfs checks its caller, and the process that reads the stream may not call it any
    more."""
    zfs = Zfs(spec.program)
    try:
        since, until = guids_of(zfs, spec.since, spec.until)
        if since != spec.guid:
            return Send(spec, refused=DeltaFallback(f"the bookmark {spec.since} is not the same as before"))
        return Send(spec, int(until), begin([spec.program, "send", "-i", spec.since, spec.until]))
    except SynvirtError as error:  # the disk is read whole, and the others go on
        return Send(spec, refused=_not_known(spec, error))


def changed(by: Send) -> Iterator[Extent]:
    """The changed areas; they can be read once. DeltaFallback for any doubt."""
    if by.begun is None:
        raise by.refused or DeltaFallback("its changes were not asked for")
    try:
        with output_of(by.begun, timeout_s=SEND_TIMEOUT_S) as stream:
            yield from changed_areas(stream, from_guid=int(by.spec.guid), to_guid=by.until_guid, size=by.spec.size_bytes)
    except ProgramFailed as error:
        raise _not_known(by.spec, error) from error


def _not_known(spec: ZfsChangesSpec, error: SynvirtError) -> DeltaFallback:
    return DeltaFallback(f"what changed since the bookmark {spec.since} is not known: {error.detail}")


def guids_of(zfs: Zfs, *names: str) -> list[str]:
    """Of snapshots and bookmarks. ZfsRefused, if one of them is missing."""
    # zfs has an order of its own.
    found = dict(line.split("\t") for line in zfs("get", "-Hp", "-o", "name,value", "guid", *names).splitlines())
    return [found[name] for name in names]


def changed_areas(stream: IO[bytes], *, from_guid: int, to_guid: int, size: int) -> Iterator[Extent]:
    """The changed areas of a disk of `size` bytes, in the stream's order, which is not sorted; zero: freed, or never written.
    DeltaFallback, if the stream is not of these snapshots, not complete, or not understood."""
    kind, payload, body = _record(stream)
    _check_begin(kind, body, from_guid, to_guid)
    _skip(stream, payload)
    while True:
        kind, payload, body = _record(stream)
        match kind:
            case Kind.WRITE:
                object_, _, _, offset, length, _, _, _, compression, stored = _WRITE.unpack_from(body)
                _skip(stream, stored if compression else length)
                yield from _within(object_, offset, length, size)
            case Kind.FREE | Kind.WRITE_BYREF:
                object_, offset, length, _ = _RANGE.unpack_from(body)
                yield from _within(object_, offset, length, size, zero=kind == Kind.FREE)
            case Kind.WRITE_EMBEDDED:
                object_, offset, length, _, _, _, _, stored = _EMBEDDED.unpack_from(body)
                _skip(stream, -(-stored // 8) * 8)
                yield from _within(object_, offset, length, size)
            case Kind.OBJECT:
                _, _, _, _, bonus, _, _, _, _, raw = _OBJECT.unpack_from(body)
                _skip(stream, raw or -(-bonus // 8) * 8)
            case Kind.FREEOBJECTS:
                first, count, _, _ = _RANGE.unpack_from(body)
                if first <= DATA_OBJECT < first + count:
                    raise DeltaFallback("its changes say that the volume's bytes were freed as a whole")
            case Kind.END:
                if stream.read(1):
                    raise DeltaFallback("its changes go on after their end")
                return
            case _:
                raise DeltaFallback(f"its changes have a record of type {kind}, which is not understood")


def _check_begin(kind: int, body: bytes, from_guid: int, to_guid: int) -> None:
    magic, version, _, type_, _, to, from_ = _BEGIN.unpack_from(body)
    if kind != Kind.BEGIN or magic != MAGIC or version & 3 != SUBSTREAM or type_ != ZVOL:
        raise DeltaFallback("its changes are not a stream of a zfs volume")
    if (to, from_) != (to_guid, from_guid):
        raise DeltaFallback(f"its changes are from snapshot {from_:x} to {to:x}, not from {from_guid:x} to {to_guid:x}")


def _record(stream: IO[bytes]) -> tuple[int, int, bytes]:
    record = stream.read(RECORD_BYTES)
    if len(record) < RECORD_BYTES:
        raise DeltaFallback("its changes are cut off")
    kind, payload = _HEAD.unpack_from(record)
    return kind, payload, record[_HEAD.size :]


def _skip(stream: IO[bytes], length: int) -> None:
    if length > PAYLOAD_BYTES_MAX:
        raise DeltaFallback(f"its changes have a record of {length} bytes, which is not understood")
    if len(stream.read(length)) < length:
        raise DeltaFallback("its changes are cut off")


def _within(object_: int, offset: int, length: int, size: int, *, zero: bool = False) -> Iterator[Extent]:
    """A volume's last block may be longer than the disk; the part after the disk's end does not matter."""
    end = size if length == TO_THE_END else min(offset + length, size)
    if object_ == DATA_OBJECT and offset < end:
        yield Extent(offset, end - offset, zero)
