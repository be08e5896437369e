"""Streams of `zfs send -i`, record by record, as OpenZFS' include/sys/zfs_ioctl.h has them; and what is no such stream."""

import io
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.backups.sources.zfs_stream import MAGIC, RECORD_BYTES, TO_THE_END, Kind, changed_areas
from synvirt.blocks import Extent
from synvirt.errors import DeltaFallback
from tests.cases import cases

FROM, TO, SIZE = 7, 9, 1 << 20


def record(kind: int, body: bytes = b"", payload: bytes = b"") -> bytes:
    return (struct.pack("<II", kind, 0) + body).ljust(RECORD_BYTES, b"\0") + payload


def begin(*, magic: int = MAGIC, version: int = 1, type_: int = 3, to: int = TO, from_: int = FROM) -> bytes:
    return record(Kind.BEGIN, struct.pack("<QQQIIQQ", magic, version, 0, type_, 0, to, from_) + b"tank/disk@now")


def write(offset: int, length: int, *, object_: int = 1, stored: int = 0, sent: bytes | None = None) -> bytes:
    head = struct.pack("<QIIQQQBBB5x40xQ", object_, 23, 0, offset, length, TO, 0, 0, 15 if stored else 0, stored)
    return record(Kind.WRITE, head, b"x" * (stored or length) if sent is None else sent)


def free(offset: int, length: int, *, object_: int = 1) -> bytes:
    return record(Kind.FREE, struct.pack("<QQQQ", object_, offset, length, TO))


def embedded(offset: int, length: int, stored: int) -> bytes:
    head = struct.pack("<QQQQBB6xII", 1, offset, length, TO, 15, 0, length, stored)
    return record(Kind.WRITE_EMBEDDED, head, b"x" * (-(-stored // 8) * 8))


def object_(number: int, *, bonus: int = 12, raw: int = 0) -> bytes:
    head = struct.pack("<QIIIIBBBBI", number, 23, 0, 65536, bonus, 0, 0, 1, 0, raw)
    return record(Kind.OBJECT, head, b"x" * (raw or -(-bonus // 8) * 8))


def free_objects(first: int, count: int) -> bytes:
    return record(Kind.FREEOBJECTS, struct.pack("<QQQ", first, count, TO))


END = record(Kind.END, b"\1" * 40)


def areas(content: bytes) -> list[Extent]:
    return list(changed_areas(io.BytesIO(content), from_guid=FROM, to_guid=TO, size=SIZE))


def test_all_that_may_differ_is_named_and_other_objects_are_passed_over() -> None:
    stream = [
        begin(),
        free_objects(0, 1),
        object_(1),
        write(65536, 65536),
        object_(2, raw=24),
        write(0, 512, object_=2),
        write(0, 65536, stored=700),
        free(131072, 4096),
        free(0, TO_THE_END, object_=2),
        embedded(196608, 65536, 61),
        record(Kind.WRITE_BYREF, struct.pack("<QQQQ", 1, 300000, 512, TO)),
        free_objects(3, 2**63),
        write(SIZE - 512, 65536),  # the volume's last block reaches over the disk's end
        free(SIZE - 1, TO_THE_END),
        free(SIZE, TO_THE_END),
        END,
    ]
    assert areas(b"".join(stream)) == [
        Extent(65536, 65536),
        Extent(0, 65536),
        Extent(131072, 4096, zero=True),
        Extent(196608, 65536),
        Extent(300000, 512),
        Extent(SIZE - 512, 512),
        Extent(SIZE - 1, 1, zero=True),
    ]
    assert areas(begin() + END) == []


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"", "cut off"),
        (begin(magic=MAGIC + 1) + END, "not a stream"),
        (begin(magic=int.from_bytes(MAGIC.to_bytes(8, "little"), "big")) + END, "not a stream"),
        (begin(version=2) + END, "not a stream"),
        (begin(type_=2) + END, "not a stream"),
        (begin(to=TO + 1) + END, "are from snapshot"),
        (begin(from_=0) + END, "are from snapshot"),
        (begin(), "cut off"),
        (begin() + write(0, 65536)[:-1], "cut off"),
        # Refused by the length that it says; the bytes themselves are not waited for.
        (begin() + write(0, 1 << 30, sent=b"x"), "not understood"),
        (begin() + free_objects(0, 2) + END, "freed as a whole"),
        (begin() + free_objects(1, 2**64 - 1) + END, "freed as a whole"),
        (begin() + record(Kind.SPILL) + END, "not understood"),
        (begin() + record(Kind.OBJECT_RANGE) + END, "not understood"),
        (begin() + record(Kind.REDACT) + END, "not understood"),
        (begin() + record(11) + END, "not understood"),
        (begin() + begin() + END, "not understood"),
        (begin() + END + b"\0", "after their end"),
    ],
)
def test_what_is_not_understood_is_refused(stream: bytes, message: str) -> None:
    with pytest.raises(DeltaFallback, match=message):
        areas(stream)


SOUND = begin() + object_(1) + write(0, 512) + free(4096, 4096) + embedded(8192, 4096, 60) + END


def refused_or_within(content: bytes) -> None:
    try:
        found = areas(content)
    except DeltaFallback:
        return
    assert all(one.start >= 0 and one.length > 0 and one.end <= SIZE for one in found)


@cases(200)
@given(st.integers(0, len(SOUND) - 1))
def test_a_stream_that_is_cut_anywhere_is_refused(at: int) -> None:
    with pytest.raises(DeltaFallback):
        areas(SOUND[:at])


@cases(200)
@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_stream_that_is_changed_anywhere_names_areas_of_the_disk_or_is_refused(changes: list[tuple[int, int]]) -> None:
    content = bytearray(SOUND)
    for at, value in changes:
        content[at] = value
    refused_or_within(bytes(content))


@cases(200)
@given(st.binary(max_size=700).map(lambda tail: begin() + tail))
def test_any_bytes_are_refused_or_read(content: bytes) -> None:
    refused_or_within(content)


Record = Callable[[int, int], bytes]


@cases(200)
@given(st.lists(st.tuples(st.sampled_from([write, free]), st.integers(0, SIZE - 1), st.integers(1, 70000)), max_size=12))
def test_every_area_of_a_sound_stream_is_named(records: list[tuple[Record, int, int]]) -> None:
    stream = begin() + b"".join(make(offset, length) for make, offset, length in records) + END
    assert areas(stream) == [Extent(offset, min(length, SIZE - offset), zero=make is free) for make, offset, length in records]
