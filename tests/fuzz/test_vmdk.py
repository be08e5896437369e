"""Damaged and hostile VMDK files: each reads, twice the same, or is refused by our own error, in little memory and time."""

import contextlib
import struct
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from synvirt.disks.vmdk.descriptor import parse_descriptor
from synvirt.errors import SynvirtError
from synvirt.sizes import KIB, MIB
from tests.cases import cases
from tests.disks.block_images import bytes_of, scratch
from tests.disks.vmdk.vmdk_images import SECTOR, Cowd, Image, SeSparse, Stream, descriptor, images, open_vmdk, write_image

# Seconds of the processor for one small file: a hundred times what an honest one takes here.
TIME_MAX_S = 10
MEMORY_MAX_BYTES = 80 * MIB

_EDGES = [0, 1, 2, 3, 127, 128, 511, 512, 513, 4096, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 47, 1 << 63, (1 << 64) - 1]
# Made once: to make them takes Hypothesis longer than to draw of them.
numbers = st.one_of(st.sampled_from(_EDGES), st.integers(0, 4000), st.integers(0, (1 << 64) - 1))
_in_sector = st.one_of(st.integers(0, 96), st.integers(0, SECTOR - 1))
_ways = st.sampled_from(["number", "number", "number", "short", "byte", "swap", "cut", "longer"])


@cache
def _sectors(last: int) -> st.SearchStrategy[int]:
    """Where headers, directories, tables, markers and footers are: the file's beginning and end."""
    return st.one_of(st.integers(0, min(last, 8)), st.integers(0, last), st.integers(max(last - 4, 0), last))


def changed(draw: Callable[[st.SearchStrategy[Any]], Any], content: bytes) -> bytes:
    """Fields overwritten, sectors moved, the file cut off or made longer. No strategy of its own: Hypothesis would keep what it
    is made of, a file of 16 MiB for each case."""
    damaged = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        last = max(len(damaged) // SECTOR, 1) - 1
        sector = draw(_sectors(last))
        at = sector * SECTOR + draw(_in_sector)
        match draw(_ways):
            case "number":
                damaged[at : at + 8] = struct.pack("<Q", draw(numbers))
            case "short":
                damaged[at : at + 4] = struct.pack("<I", draw(numbers) & 0xFFFF_FFFF)
            case "byte":
                damaged[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "swap":
                other = draw(st.integers(0, last)) * SECTOR
                here = sector * SECTOR
                damaged[here : here + SECTOR], damaged[other : other + SECTOR] = (
                    damaged[other : other + SECTOR],
                    damaged[here : here + SECTOR],
                )
            case "cut":
                del damaged[at:]
            case _:
                damaged += bytes(draw(st.integers(1, 64 * KIB)))
    return bytes(damaged)


def outcome(image: Path, places: list[tuple[float, int]]) -> str:
    """Open it, ask for its extents, read some: whatever it says must be consistent."""
    try:
        reader = open_vmdk(image)
    except SynvirtError as problem:
        return type(problem).__name__
    try:
        assert 0 < reader.size <= 64 << 40
        at = 0
        for extent in islice(reader.extents(), 500):
            assert extent.start == at
            assert extent.length > 0
            at = extent.end
            assert at <= reader.size
            length = min(extent.length, 256 * KIB)
            try:
                content = bytes_of(reader, extent.start, length)
                assert content == bytes_of(reader, extent.start, length)
                assert not extent.zero or content == bytes(len(content))
            except SynvirtError:
                assert not extent.zero, "zeros that cannot be read"
        for fraction, wanted in places:
            start = int(fraction * reader.size)
            bytes_of(reader, start, min(wanted, reader.size - start))
    except SynvirtError as problem:
        return type(problem).__name__
    else:
        return "reads"
    finally:
        reader.close()


def bounded(work: Callable[[], str]) -> None:
    began = time.process_time()
    tracemalloc.start()
    try:
        event(work())
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX_BYTES
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < TIME_MAX_S


@cases(300)
@given(image=images(), data=st.data(), places=st.lists(st.tuples(st.floats(0, 1), st.integers(1, MIB)), max_size=3))
def test_damaged_files(image: Image, data: st.DataObject, places: list[tuple[float, int]]) -> None:
    with scratch() as folder:
        write_image(folder, "disk", image)
        extent = folder / ("disk-delta.vmdk" if isinstance(image, Cowd | SeSparse) else "disk.vmdk")
        extent.write_bytes(changed(data.draw, extent.read_bytes()))
        bounded(lambda: outcome(folder / "disk.vmdk", places))


@cases(150)
@given(image=images((Stream,)), data=st.data())
def test_damaged_streams_without_tables(image: Stream, data: st.DataObject) -> None:
    with scratch() as folder:
        write_image(folder, "disk", replace(image, directory=False))
        extent = folder / "disk.vmdk"
        extent.write_bytes(changed(data.draw, extent.read_bytes()))
        bounded(lambda: outcome(extent, [(0, MIB)]))


_KINDS = ["FLAT", "SPARSE", "VMFSSPARSE", "SESPARSE", "ZERO", "VMFS", "VMFSRDM"]
_KEYS = ["CID", "parentCID", "parentFileNameHint", "createType", "encoding", "ddb.x", "=", "ffffffff"]
_VALUES = ["1", "4", "99999999999999999999", "-1", '"disk-flat.vmdk"', '"../x"', '"json:{}"', '"', '"GBK"', '"rot13"']
_SPACES = ["#", "\n", "\r\n", " ", "\t", "\0", "\x85", "\u2028", "é"]
words = st.sampled_from(["RW", "RDONLY", "NOACCESS", *_KINDS, *_KEYS, *_VALUES, *_SPACES])


@cases(300)
@given(
    pieces=st.lists(st.one_of(words, st.text(max_size=5)), max_size=60),
    joint=st.sampled_from(["", " ", "\n"]),
    binary=st.binary(max_size=40),
)
def test_damaged_descriptors(pieces: list[str], joint: str, binary: bytes) -> None:
    text = joint.join(pieces).encode("utf-8", "surrogatepass")
    honest = descriptor('RW 4 FLAT "disk-flat.vmdk" 0', "RW 3 ZERO", create_type="x")
    middle = len(honest) // 2
    for content in (text, honest + text, text + binary + honest, honest[:middle] + text + binary + honest[middle:]):
        with scratch() as folder:
            (folder / "disk.vmdk").write_bytes(content)
            (folder / "disk-flat.vmdk").write_bytes(bytes(range(256)) * 8)
            bounded(lambda: outcome(folder / "disk.vmdk", []))  # called at once


_REPEATED = [b"\n", b" ", b"\t", b"x", b'"', b"=", b"a=", b"RW ", b"RW 1 ZERO\n", b"CID=1\n", b"encoding\n", b"\r", b"9"]


@pytest.mark.parametrize("piece", _REPEATED)
@pytest.mark.parametrize("before", [b"", b"a=", b'a="', b"RW ", b"RW 1 FLAT ", b'RW 1 FLAT "', b"encoding="])
def test_a_descriptor_of_the_largest_size_takes_no_time(before: bytes, piece: bytes) -> None:
    for after in (b"", b"x", b'"'):
        began = time.process_time()
        with contextlib.suppress(SynvirtError):
            parse_descriptor(before + piece * (MIB // len(piece)) + after, "disk.vmdk")
        assert time.process_time() - began < TIME_MAX_S
