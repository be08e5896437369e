"""Garbage into the parsers of Hyper-V's configurations: read, or refused with our own error, in bounded time and memory."""

import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt.disks.raw.files import RawReader
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.offline.hyperv import machine as vmcx_machine
from synvirt.offline.hyperv import storage as vmcx_storage
from synvirt.offline.hyperv import xml as vmcx_xml
from synvirt.offline.hyperv.storage import Tree, Value
from tests.offline.hyperv import hyperv_exports
from tests.offline.hyperv.hyperv_exports import PAGE, configuration, crc, drive, storage

# What is kept of a hostile file is 32 MiB at most, and some 300 bytes a key; measured: 70 MiB.
MEMORY_MAX_BYTES = 128 << 20
FUZZED = settings(max_examples=400)
MACHINE = configuration(
    {"ide0:0": "C:\\a.vhdx", "scsi0:0": "D:\\b.vhdx"},
    generation=1,
    drives={"scsi0:1": drive("\\\\.\\PHYSICALDRIVE1", "PHYSICAL"), "ide1:0": drive("C:\\a.iso", "ISO")},
)
WHOLE = storage(MACHINE, replay={3 * PAGE: storage(MACHINE)[3 * PAGE : 4 * PAGE]})
SAVED = frozenset({"savedstate"})


def allowed(parse: Callable[[], object]) -> None:
    try:
        parse()
    except (MalformedArchive, UnsupportedFormat) as problem:
        detail = problem.detail
    else:
        return
    assert 0 < len(detail) < 5000
    assert "m.vmcx" in detail


def machine_of(tree: Tree) -> None:
    """What is read can be told: no half of a character, no control character in a name."""
    machine = vmcx_machine.machine(tree, "m.vmcx")
    reported = machine.manifest.model_dump_json() + "".join(drive.file_name for drive in machine.drives.values())
    assert "\\u0000" not in reported
    assert reported.isprintable()
    vmcx_machine.checkpoint(tree)
    vmcx_machine.saved_state_files(tree)


def storage_of(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with closing(RawReader(file.name)) as reader:
            allowed(lambda: vmcx_storage.has_key(reader, "m.vmcx", SAVED))
            machine_of(vmcx_storage.read(reader, "m.vmcx"))


# Where something is, in a file whose layout is known: headers, log, object table, key tables.
PLACES = st.sampled_from([0, PAGE, 2 * PAGE, 2 * PAGE + 8, 3 * PAGE, len(WHOLE) - hyperv_exports.LOG_BYTES])
EDITS = st.lists(
    st.tuples(
        st.integers(0, len(WHOLE) - 1) | st.builds(lambda place, more: place + more, PLACES, st.integers(0, 200)),
        st.sampled_from([b"\0", b"\xff", b"\xff" * 4, b"\xff" * 8, b"\x01\0\0\0", b"\0" * 8])
        | st.binary(min_size=1, max_size=16),
    ),
    min_size=1,
    max_size=6,
)


def edited(edits: list[tuple[int, bytes]]) -> bytearray:
    damaged = bytearray(WHOLE)
    for place, content in edits:
        damaged[place : place + len(content)] = content
    return damaged[: len(WHOLE)]


def put_right(file: bytearray) -> bytes:
    """The checksums of a damaged file, so that what lies behind them is tried too."""

    def summed(place: int, length: int, at: int) -> None:
        if place >= 0 and 0 < at + 4 <= length and place + length <= len(file):
            file[place : place + length] = crc(bytes(file[place : place + length]), at)

    for header in (0, PAGE):
        summed(header, 46, 4)
    (log,) = struct.unpack_from("<Q", file, 26)
    summed(log, 34, 4)
    summed(log + 34, 28, 20)
    for number in range(227):
        summed(2 * PAGE + 8 + number * 18, 18, 1)
    for table in range(3 * PAGE, len(file) - hyperv_exports.LOG_BYTES, PAGE):
        summed(table, 10, 6)
        at = 10
        while at + 21 < PAGE:
            kind, flags, size, _, _, _, _, name = struct.unpack_from("<BBIHIIIB", file, table + at)
            data = {3: 8, 4: 8, 5: 8, 8: 4, 9: 12}.get(kind, 4)
            if kind in (6, 7) and not flags & 1 and at + 25 + name <= PAGE:
                data = 4 + struct.unpack_from("<I", file, table + at + 21 + name)[0]
            summed(table + at, 21 + name + (12 if flags & 1 else data), 12)
            if not 21 <= size <= PAGE - at:
                break
            at += size
    return bytes(file)


@FUZZED
@given(st.binary(max_size=3000) | st.binary(max_size=400).map(lambda data: vmcx_storage.MAGIC + data.ljust(3 * PAGE, b"\0")))
def test_any_bytes_as_a_storage(data: bytes) -> None:
    allowed(lambda: storage_of(data))


@FUZZED
@given(EDITS)
def test_a_damaged_storage(edits: list[tuple[int, bytes]]) -> None:
    allowed(lambda: storage_of(bytes(edited(edits))))


@settings(max_examples=800)
@given(EDITS)
def test_a_damaged_storage_with_its_checksums_put_right(edits: list[tuple[int, bytes]]) -> None:
    """Otherwise a checksum would refuse every change, and nothing behind it would ever be tried."""
    allowed(lambda: storage_of(put_right(edited(edits))))


VALUES: st.SearchStrategy[Value] = (
    st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.sampled_from(
        ["", "NONE", "VHD", "a\0b", "\\\\.\\PHYSICALDRIVE0", "..\\..\\x.vhdx", "C:", "\ud800", "{" * 40, "9" * 400]
    )
    | st.text(max_size=20)
    | st.binary(max_size=10)
    | st.just({})
)


@FUZZED
@given(st.data())
def test_a_configuration_of_unlucky_values(data: st.DataObject) -> None:
    """Any leaf, or a whole node, is something else."""

    def places(tree: Tree, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        inner = [place for key, value in tree.items() if isinstance(value, dict) for place in places(value, (*path, key))]
        return [*((*path, key) for key in tree), *inner]

    tree = configuration({"ide0:0": "C:\\a.vhdx", "scsi0:0": "D:\\b.vhdx"}, generation=data.draw(st.sampled_from([1, 2])))
    for path in data.draw(st.lists(st.sampled_from(places(tree)), min_size=1, max_size=4)):
        node = tree
        for key in path[:-1]:
            inner = node.get(key)
            if not isinstance(inner, dict):
                break
            node = inner
        node[path[-1]] = data.draw(VALUES)
    allowed(lambda: machine_of(tree))


@FUZZED
@given(st.binary(max_size=2000) | st.data())
def test_a_damaged_xml(data: st.DataObject | bytes) -> None:
    if isinstance(data, bytes):
        text = data
    else:
        whole = hyperv_exports.xml(MACHINE).decode("utf-16")
        at = data.draw(st.integers(0, len(whole)))
        token = data.draw(st.sampled_from(["", "<", "&", "</configuration>", "<!DOCTYPE x>", "9" * 30, "\0", '"', "x" * 5000]))
        text = (whole[:at] + token + whole[at + data.draw(st.integers(0, 300)) :]).encode("utf-16")
    allowed(lambda: machine_of(vmcx_xml.read(text, "m.vmcx")))


def one_table_many_times() -> bytes:
    """Every object is the same key table: what is kept does not grow with how often it is named."""
    table = storage({"t": "x" * 1000})[3 * PAGE : 4 * PAGE]
    at = 20 * PAGE
    entries = b"".join(crc(struct.pack("<BIQIB", 2, 0, at, PAGE, 1), 1) for _ in range(3640))
    return _file(entries, 3640, table, at=at)


def one_text_many_times() -> bytes:
    """Ten thousand keys point at the same mebibyte of text."""
    tables, keys = [], []
    for number in range(100):
        key = b"k\0" + struct.pack("<IQ", 1 << 20, 0)
        keys.append(crc(struct.pack("<BBIHIIIB", 6, 1, 21 + len(key), 0, 0, 0, number, 2) + key, 12))
    for index in range(1, 101):
        tables.append((crc(struct.pack("<HHHI", 2, index, 1, 0), 6) + b"".join(keys)).ljust(PAGE, b"\0"))
    at = 20 * PAGE
    entries = b"".join(crc(struct.pack("<BIQIB", 2, 0, at + number * PAGE, PAGE, 1), 1) for number in range(100))
    return _file(entries, 100, b"".join(tables), at=at).ljust(2 << 20, b"\0")


def overlapping_tables() -> bytes:
    """Tables of 64 KiB, each a few bytes further: as many as fit the file, each with an index of its own."""
    heads = b"".join(crc(struct.pack("<HHHI", 2, index, 1, 0), 6) for index in range(1, 3601))
    at = 20 * PAGE
    entries = b"".join(crc(struct.pack("<BIQIB", 2, 0, at + 10 * number, 65536, 1), 1) for number in range(3600))
    return _file(entries, 3600, heads + bytes(70000), at=at)


def deep() -> bytes:
    """Each key is the child of the one before."""
    entries, parent, offset = b"", 0, 10
    for _ in range(3000):
        key = b"n\0" + bytes(12)
        entries += crc(struct.pack("<BBIHIIIB", 9, 0, 35, 1 if parent else 0, parent, 0, 1, 2) + key, 12)
        parent, offset = offset, offset + 35
    table = (crc(struct.pack("<HHHI", 2, 1, 1, 0), 6) + entries).ljust(65536 * 2, b"\0")[:65536]
    at = 20 * PAGE
    return _file(crc(struct.pack("<BIQIB", 2, 0, at, 65536, 1), 1), 1, table, at=at)


def _file(entries: bytes, count: int, content: bytes, *, at: int) -> bytes:
    """Headers, an object table, `content` at `at`, and a log."""
    directory = struct.pack("<II", 0x01110001, count) + entries
    body = (bytes(2 * PAGE) + directory).ljust(at, b"\0") + content
    log = len(body)
    heads = hyperv_exports.header(2, 0x400, log).ljust(PAGE, b"\0") + hyperv_exports.header(1, 0x400, log).ljust(PAGE, b"\0")
    return heads + body[2 * PAGE :] + hyperv_exports.log({})


@pytest.mark.parametrize("hostile", [one_table_many_times, one_text_many_times, overlapping_tables, deep])
def test_a_file_at_the_limits_is_bounded(hostile: Callable[[], bytes]) -> None:
    data = hostile()
    tracemalloc.start()
    try:
        allowed(lambda: storage_of(data))
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX_BYTES
    finally:
        tracemalloc.stop()
