"""VHDX, VHD and VDI images: how a case is drawn, how QEMU makes it, and what every reader of it must fulfil."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from synvirt.blocks import DiskReader, Extent, Placed
from synvirt.programs import run
from tests.needs import need

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# Formats whose disks are whole sectors, and no larger than was asked for.
_OF_SECTORS = ("qcow2", "vdi", "vhdx")
# What is compared at once: a sparse disk of many GiB is compared in its data only.
_STEP = 4 * MIB


@dataclass(frozen=True)
class Write:
    """Bytes from `at` (a fraction of the disk) of one pattern, or of zeros (`pattern` 0)."""

    at: float
    length: int
    pattern: int


writes = st.lists(
    st.builds(
        Write,
        st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1)),
        st.one_of(st.integers(1, 8 * KIB), st.integers(1, 5 * MIB)),
        st.integers(0, 255),
    ),
    max_size=8,
)
# Where reads begin and how long they are, of what is left.
reads = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 3 * MIB)), max_size=6)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder a case, in memory where that is possible."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="synvirt-", dir=shared if shared.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def qemu(program: str, *arguments: str, cwd: Path) -> str:
    """Run one of QEMU's tools. qemu-io ends with 0 after a command that it refused, so what it says is looked at as well."""
    need(program, "qemu-utils")
    output = run([program, *arguments], timeout_s=60, cwd=cwd)
    text = output.stdout + output.stderr
    assert program != "qemu-io" or "failed" not in text, text
    return output.stdout


def make_by_writes(image: Path, image_format: str, options: str, size: int, pieces: Sequence[Write]) -> None:
    """An image that qemu-img creates, and qemu-io writes to: its blocks lie in the order of the writes."""
    option = ["-o", options] if options else []
    qemu("qemu-img", "create", "-q", "-f", image_format, *option, image.name, str(size), cwd=image.parent)
    write_to(image, image_format, pieces, -(-size // 512) * 512 if image_format in _OF_SECTORS else None)


def write_to(image: Path, image_format: str, pieces: Sequence[Write], size: int | None = None) -> None:
    """What qemu-io writes to an image that is there, over its parents if it has some. `size`: the disk's, where it is known."""
    if size is None and pieces:
        whole = json.loads(qemu("qemu-img", "info", "-f", image_format, "--output=json", image.name, cwd=image.parent))
        size = whole["virtual-size"]
    commands = write_commands(pieces, size or 0)
    if commands:
        qemu("qemu-io", "-f", image_format, *commands, image.name, cwd=image.parent)


def make_by_conversion(image: Path, image_format: str, options: str, size: int, pieces: Sequence[Write]) -> None:
    """An image that qemu-img converts from a raw disk: its blocks ascend, those of zeros are left out."""
    raw = image.with_name("before")
    with raw.open("wb") as file:
        file.truncate(size)
    commands = write_commands(pieces, size // 512 * 512)
    if commands:
        qemu("qemu-io", "-f", "raw", *commands, raw.name, cwd=image.parent)
    option = ["-o", options] if options else []
    qemu("qemu-img", "convert", "-f", "raw", "-O", image_format, *option, raw.name, image.name, cwd=image.parent)


@dataclass(frozen=True)
class Made:
    """An image that QEMU makes: `converted` from a raw disk, else written into."""

    image_format: str
    options: str
    size: int
    pieces: Sequence[Write]
    converted: bool


def assert_read_as_by_qemu(
    made: Made, opened: Callable[[Path], DiskReader], places: Sequence[tuple[float, int]], *, leaves_out: int | None
) -> None:
    """The reader has the disk that QEMU reads, and its zeros. `leaves_out`: a conversion leaves out blocks of this size."""
    make = make_by_conversion if made.converted else make_by_writes
    with scratch() as folder:
        image = folder / f"disk.{made.image_format}"
        make(image, made.image_format, made.options, made.size, made.pieces)
        raw = raw_of(image, made.image_format)
        reader = opened(image)
        try:
            assert_same_disk(reader, raw, places)
            assert_knows_zeros_of_qemu(reader, image, made.image_format)
            if made.converted and leaves_out is not None:
                assert_only_touched_blocks_are_data(reader, leaves_out, raw)
        finally:
            reader.close()
            reader.close()


def write_commands(pieces: Sequence[Write], size: int) -> list[str]:
    words = []
    for piece in pieces:
        length = min(piece.length, size)
        start = int(piece.at * (size - length))
        if length:
            words += ["-c", f"write -P {piece.pattern} {start} {length}" if piece.pattern else f"write -z {start} {length}"]
    return words


def raw_of(image: Path, image_format: str) -> Path:
    """The disk as qemu-img reads it."""
    raw = image.with_name("raw")
    qemu("qemu-img", "convert", "-f", image_format, "-O", "raw", image.name, raw.name, cwd=image.parent)
    return raw


def bytes_of(reader: DiskReader, start: int, length: int) -> bytes:
    # Filled with what no zeros are, so that a reader that forgets some of its buffer is found out.
    content = bytearray(b"\xa5" * length)
    reader.read_into(start, memoryview(content))
    return bytes(content)


def assert_same_disk(reader: DiskReader, raw: Path, places: Sequence[tuple[float, int]] = ()) -> None:
    """The reader's disk is the raw one, in its extents, as a whole, and from any place on."""
    with raw.open("rb") as file:
        assert reader.size == raw.stat().st_size
        at = 0
        for extent in reader.extents():
            assert extent.start == at, "a gap, or an overlap"
            assert extent.length > 0
            at = extent.end
            if extent.zero:
                _assert_zeros(file.fileno(), extent)
            else:
                _assert_same(reader, file.fileno(), extent)
        assert at == reader.size
        assert list(reader.extents()) == list(reader.extents())
        assert_places(reader, file.fileno())
        for fraction, wanted in places:
            start = int(fraction * reader.size)
            length = min(wanted, reader.size - start)
            assert bytes_of(reader, start, length) == os.pread(file.fileno(), length, start)


def assert_same_file(one: Path, other: Path) -> None:
    """Byte for byte, a little at a time, but for the holes that both have."""
    size = one.stat().st_size
    assert other.stat().st_size == size
    with one.open("rb") as left, other.open("rb") as right:
        at = 0
        while (at := min(_next_data(file.fileno(), at, size) for file in (left, right))) < size:
            content = os.pread(left.fileno(), _STEP, at)
            assert content == os.pread(right.fileno(), _STEP, at), f"in {len(content)} bytes at {at}"
            at += len(content)


def _next_data(raw: int, at: int, size: int) -> int:
    """Where the file has data, from there on; its size, where it has none."""
    try:
        return os.lseek(raw, at, os.SEEK_DATA)
    except OSError:
        return size


def assert_places(reader: DiskReader, raw: int) -> None:
    """What a reader says to lie in a file, lies there."""
    at = 0
    for place in reader.places() if isinstance(reader, Placed) else ():
        assert place.start >= at
        assert place.length > 0
        at = place.start + place.length
        for start in range(0, place.length, _STEP):
            length = min(_STEP, place.length - start)
            found = os.pread(place.descriptor, length, place.at + start)
            assert found == os.pread(raw, length, place.start + start), f"{place} is not the disk's"
    assert at <= reader.size


def _assert_same(reader: DiskReader, raw: int, extent: Extent) -> None:
    for start in range(extent.start, extent.end, _STEP):
        length = min(_STEP, extent.end - start)
        assert bytes_of(reader, start, length) == os.pread(raw, length, start), f"in {length} bytes at {start}"


def _assert_zeros(raw: int, extent: Extent) -> None:
    """Holes of the raw disk are zeros without a look."""
    at = extent.start
    while (at := _next_data(raw, at, extent.end)) < extent.end:
        length = min(_STEP, extent.end - at)
        assert os.pread(raw, length, at) == bytes(length), f"{extent} is not zero, somewhere from {at}"
        at += length


def assert_knows_zeros_of_qemu(reader: DiskReader, image: Path, image_format: str) -> None:
    """Wherever `qemu-img map` says zeros, the reader's extents do."""
    answer = qemu("qemu-img", "map", "-f", image_format, "--output=json", image.name, cwd=image.parent)
    entries: list[dict[str, Any]] = json.loads(answer)
    zeros = iter([(entry["start"], entry["start"] + entry["length"]) for entry in entries if entry["zero"]])
    start, end = next(zeros, (reader.size, reader.size))
    for extent in reader.extents():
        while end <= extent.start:
            start, end = next(zeros, (reader.size, reader.size + 1))
        assert extent.zero or extent.end <= start, f"{extent} has zeros from {start} to {end}"


def assert_only_touched_blocks_are_data(reader: DiskReader, block_bytes: int, raw: Path) -> None:
    """No data extent lies in a block that is zeros altogether, if the image's maker left such blocks out."""
    with raw.open("rb") as file:
        for extent in reader.extents():
            if not extent.zero:
                for block in range(extent.start // block_bytes, -(-extent.end // block_bytes)):
                    content = os.pread(file.fileno(), block_bytes, block * block_bytes)
                    assert content != bytes(len(content)), f"{extent} lies in block {block}, which is zeros"
