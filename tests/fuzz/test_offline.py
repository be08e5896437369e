"""Garbage into every parser of the offline side: it is read, or refused with our own error, in bounded time and memory."""

import tarfile
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt import xml_document
from synvirt.disks import tar
from synvirt.disks.raw.files import RawReader
from synvirt.errors import MalformedArchive, SynvirtError, UnsupportedFormat
from synvirt.offline.ovf import manifest_file
from synvirt.offline.registry import IMPORTERS
from synvirt.offline.vbox import machine as virtualbox
from synvirt.offline.vmx import configuration as vmx
from synvirt.offline.xva import geneva, ova_xml
from tests.offline import appliances, vbox_machines
from tests.offline import parsing as ovf
from tests.offline.xva import geneva_exports, ova_xml_text

DESCRIPTIONS = sorted(path.stem for path in appliances.DESCRIPTIONS.glob("*.ovf"))
# A document at its size limit may take this much; measured: 40 MiB for 200,000 elements.
MEMORY_MAX_BYTES = 128 << 20

FUZZED = settings(max_examples=300)

_NUMBERS = [
    b"",
    b"0",
    b"-1",
    b"99999999999999999999",
    b"1e308",
    b"NaN",
    b"byte * 2^",
    b"byte * 2^9999999",
    b"2^64",
    "٣".encode(),
]
_MARKUP = [b"\0", b"&#0;", b"\xff", b"<Item/>", b"</Item>", b"<!--", b"x" * 70_000]
_REFERENCES = [b"${x}", b"ovf:/disk/", b"vmdisk1", b"../..", b"true"]
_TOKENS = st.sampled_from([*_NUMBERS, *_MARKUP, *_REFERENCES])


def edits(text: bytes) -> st.SearchStrategy[bytes]:
    """`text` with up to five places replaced by something unlucky."""
    edit = st.tuples(st.integers(0, len(text)), st.integers(0, 40), _TOKENS | st.binary(max_size=20))

    def applied(changes: list[tuple[int, int, bytes]]) -> bytes:
        changed = text
        for at, cut, token in changes:
            changed = changed[:at] + token + changed[at + cut :]
        return changed

    return st.lists(edit, min_size=1, max_size=5).map(applied)


def values_replaced(text: bytes) -> st.SearchStrategy[bytes]:
    """Well-formed XML whose values are unlucky: quoted attribute values of `text`, replaced."""
    pieces = text.replace(b"'", b'"').split(b'"')
    places = range(1, len(pieces), 2)
    unlucky = st.sampled_from(
        [b"", b"-1", b"0", b"9" * 30, b"1.5", b"byte * 2^60", b"vmdisk1", b"file1", b"${a}", b"../x", b"a/b/c"]
    )

    def applied(changes: dict[int, bytes]) -> bytes:
        return b'"'.join(changes.get(number, piece) for number, piece in enumerate(pieces))

    return st.dictionaries(st.sampled_from(places), unlucky, min_size=1, max_size=4).map(applied)


def allowed(parse: Callable[[], object]) -> None:
    try:
        parse()
    except (MalformedArchive, UnsupportedFormat) as problem:
        detail = problem.detail
    else:
        return
    assert 0 < len(detail) < 5000


@FUZZED
@given(st.binary(max_size=4000))
def test_any_bytes_as_a_description(data: bytes) -> None:
    allowed(lambda: ovf.parse(data, "a.ovf"))


@pytest.mark.parametrize("name", DESCRIPTIONS)
@settings(max_examples=60)
@given(st.data())
def test_a_damaged_description(name: str, data: st.DataObject) -> None:
    text = appliances.description(name)
    damaged = data.draw(edits(text) | values_replaced(text))
    allowed(lambda: ovf.parse(damaged, "a.ovf"))


@FUZZED
@given(st.binary(max_size=2000) | edits(b"SHA256(a.ovf)= " + b"0" * 64 + b"\r\nSHA1 (b) = " + b"f" * 40 + b"\n"))
def test_any_bytes_as_a_manifest(data: bytes) -> None:
    allowed(lambda: manifest_file.parse(data, "a.mf"))


@FUZZED
@given(st.binary(max_size=2000) | edits(ova_xml_text.whole({"Ref:4": 5, "Ref:5": 6})))
def test_any_bytes_as_ova_xml(data: bytes) -> None:
    allowed(lambda: ova_xml.parse(xml_document.parse(data, "ova.xml"), "ova.xml"))


GENEVA = geneva_exports.ova_xml({"sda": 5 << 20, "sdb": 6 << 20})


@FUZZED
@given(st.binary(max_size=2000) | edits(GENEVA) | values_replaced(GENEVA))
def test_any_bytes_as_ova_xml_of_version_1(data: bytes) -> None:
    allowed(lambda: geneva.described(xml_document.parse(data, "ova.xml"), "ova.xml", lambda name: None))


@FUZZED
@given(st.binary(max_size=2000) | edits((appliances.DESCRIPTIONS / "workstation.vmx").read_bytes()))
def test_any_bytes_as_a_vmx(data: bytes) -> None:
    allowed(lambda: vmx.parse(data, "a.vmx"))
    allowed(lambda: vmx.snapshots(data, "a.vmsd"))


@FUZZED
@given(st.binary(max_size=2000) | edits(vbox_machines.MACHINE) | values_replaced(vbox_machines.MACHINE))
def test_any_bytes_as_a_vbox(data: bytes) -> None:
    allowed(lambda: virtualbox.parse(data, "a.vbox"))


def _tar(data: bytes) -> object:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with closing(RawReader(file.name)) as archive:
            return tar.index(archive)


@FUZZED
@given(st.binary(max_size=3000) | st.binary(max_size=400).map(lambda data: data.ljust(2048, b"\0")))
def test_any_bytes_as_an_archive(data: bytes) -> None:
    allowed(lambda: _tar(data))


@FUZZED
@given(st.data())
def test_a_damaged_archive_with_its_checksums_put_right(data: st.DataObject) -> None:
    """Otherwise the checksum would refuse every change, and nothing behind it would ever be tried."""
    with tempfile.TemporaryDirectory() as folder:
        tar_format = data.draw(st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
        files = {"a.ovf": b"x" * 700, "n" * 150: b"y" * 20, "b": b""}
        path = appliances.archive(Path(folder) / "a.tar", files, tar_format)
        whole = path.read_bytes()
    damaged = bytearray(data.draw(edits(whole)))
    for at in range(0, len(damaged) - 511, 512):
        block = damaged[at : at + 512]
        if block[257:262] == b"ustar":
            block[148:156] = b" " * 8
            damaged[at + 148 : at + 156] = b"%06o\0 " % sum(block)
    allowed(lambda: _tar(bytes(damaged)))


@FUZZED
@given(st.binary(max_size=3000))
def test_probes_never_raise_and_importers_raise_ours(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        path = root / "file.ova"
        path.write_bytes(data)
        for importer in IMPORTERS:
            assert importer.probe(path, data[: 64 << 10]) in (True, False)
            with pytest.raises(SynvirtError):
                importer.inspect(path, root)


# Megabytes each: as parameters they would be in every worker's memory from its start to its end.
AT_THE_LIMITS: dict[str, Callable[[], bytes]] = {
    "elements": lambda: b"<Envelope>" + b"<a/>" * 199_990 + b"</Envelope>",
    "depth": lambda: b"<Envelope>" + b"<a>" * 190_000,
    "attributes": lambda: b"<Envelope " + b" ".join(b'a%d=""' % number for number in range(300_000)) + b"/>",
    "text": lambda: b"<Envelope><VirtualSystem><Name>" + b"x" * (2 << 20) + b"</Name></VirtualSystem></Envelope>",
    "disks": lambda: (
        b"<Envelope><DiskSection>"
        + b'<Disk diskId="a" capacity="${a}"/>' * 90_000
        + b"</DiskSection><VirtualSystem/></Envelope>"
    ),
    "items": lambda: (
        b"<Envelope><VirtualSystem><VirtualHardwareSection>"
        + b"<Item/>" * 190_000
        + b"</VirtualHardwareSection></VirtualSystem></Envelope>"
    ),
}


@pytest.mark.parametrize("what", AT_THE_LIMITS)
def test_a_document_at_the_limits_is_bounded(what: str) -> None:
    text = AT_THE_LIMITS[what]()[: 4 << 20]
    tracemalloc.start()
    try:
        allowed(lambda: ovf.parse(text, "a.ovf"))
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX_BYTES
    finally:
        tracemalloc.stop()


def test_an_archive_of_headers_only_is_bounded(tmp_path: Path) -> None:
    """40 MB of empty members, as an upload might hold: refused after the 100,000th."""
    pattern = bytearray(tarfile.TarInfo("m000000").tobuf(tarfile.USTAR_FORMAT))
    of_zeros = sum(pattern[:148]) + sum(pattern[156:]) + 8 * ord(" ") - 6 * ord("0")
    with (tmp_path / "a.tar").open("wb") as file:
        for number in range(100_002):
            digits = b"%06d" % number
            pattern[1:7], pattern[148:156] = digits, b"%06o\0 " % (of_zeros + sum(digits))
            file.write(pattern)
    with closing(RawReader(str(tmp_path / "a.tar"))) as archive, pytest.raises(MalformedArchive, match="more than 100000"):
        tar.index(archive)
