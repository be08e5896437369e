"""Readers that lie between a file and an image: gzip, chunks, and no file at all."""

import gzip
import random
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt.blocks import DiskReader
from synvirt.disks import open_reader
from synvirt.disks.joined import FILES_MAX, JoinedReader
from synvirt.disks.packed import gzipped
from synvirt.disks.packed.gzipped import GzippedReader
from synvirt.disks.raw.blank import BlankReader
from synvirt.disks.raw.files import RawReader
from synvirt.disks.specs import BlankSpec, GzipSpec, ImageFormat, ImageSpec, JoinedSpec, RawSpec
from synvirt.errors import DiskReadFailed, MalformedArchive, UnsupportedFormat
from tests.contracts.readers import ReaderCase, ReaderContract, read, read_all
from tests.contracts.spec_json import READER_SPEC
from tests.offline import appliances
from tests.running.processes import open_files

MIB = 1 << 20


def some(size: int, seed: int = 0) -> bytes:
    """Compresses to about half, so that both sides of an inflater are exercised."""
    numbers = random.Random(seed)
    return b"".join(numbers.randbytes(64) + bytes(64) for _ in range(-(-size // 128)))[:size]


class TestGzipped(ReaderContract):
    @pytest.fixture(params=["one", "several in a row", "padded"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> ReaderCase:
        content = some(3 * MIB + 12345)
        path = tmp_path / "disk.gz"
        data = gzip.compress(content, 1)
        if request.param == "several in a row":
            data = b"".join(gzip.compress(content[at : at + 700_001], 1) for at in range(0, len(content), 700_001))
        path.write_bytes(data + (bytes(512) if request.param == "padded" else b""))
        return ReaderCase(open=lambda: GzippedReader(RawReader(str(path)), 1 << 30, path.name), content=content)


class TestJoined(ReaderContract):
    @pytest.fixture(params=["files", "ranges"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> ReaderCase:
        content = some(2 * MIB + 777)
        cuts = [0, 1, 500_000, 500_000, 1_700_000, len(content)]
        spans = list(pairwise(cuts))
        if request.param == "ranges":
            (tmp_path / "all").write_bytes(b"before" + content + b"behind")
            parts = [RawSpec(path=str(tmp_path / "all"), offset=6 + start, length=end - start) for start, end in spans]
        else:
            for number, (start, end) in enumerate(spans):
                (tmp_path / str(number)).write_bytes(content[start:end])
            parts = [RawSpec(path=str(tmp_path / str(number))) for number in range(len(spans))]
        return ReaderCase(open=lambda: JoinedReader(parts), content=content)


class TestBlank(ReaderContract):
    @pytest.fixture(params=[1, 3 * MIB + 5])
    def case(self, request: pytest.FixtureRequest) -> ReaderCase:
        return ReaderCase(open=lambda: BlankReader(request.param), content=bytes(request.param))


@pytest.fixture
def _few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small enough that a short file has many states, drops some of them, and forgets blocks."""
    monkeypatch.setattr(gzipped, "_STATES_APART_MIN", MIB)
    monkeypatch.setattr(gzipped, "_STATES_MAX", 4)
    monkeypatch.setattr(gzipped, "_BLOCKS_KEPT", 2)


@pytest.mark.usefixtures("_few_states")
def test_reads_in_any_order_go_on_from_the_nearest_state(tmp_path: Path) -> None:
    content = some(14 * MIB + 99)
    (tmp_path / "a.gz").write_bytes(gzip.compress(content, 1))
    reader = GzippedReader(RawReader(str(tmp_path / "a.gz")), 1 << 30, "a.gz")
    assert 1 < len(reader._states) <= 4
    numbers = random.Random(3)
    for _ in range(60):
        start = numbers.randrange(len(content))
        length = numbers.randrange(min(2 * MIB, len(content) - start) + 1)
        assert read(reader, start, length) == content[start : start + length]
    reader.close()


@settings(max_examples=60, deadline=None)
@given(
    members=st.lists(st.binary(max_size=3000), max_size=4),
    spans=st.lists(st.tuples(st.integers(0, 12000), st.integers(0, 5000)), max_size=5),
)
def test_any_members_read_as_gunzip_reads_them(
    members: list[bytes], spans: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("gz") / "a.gz"
    path.write_bytes(b"".join(map(gzip.compress, members)) or gzip.compress(b""))
    content = b"".join(members)
    reader = GzippedReader(RawReader(str(path)), 1 << 20, "a.gz")
    assert read_all(reader) == content
    for start, length in spans:
        at = min(start, len(content))
        assert read(reader, at, min(length, len(content) - at)) == content[at : at + length]
    reader.close()


def test_a_bomb_is_refused_before_it_fills_anything(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(256 * MIB), 9))
    with pytest.raises(MalformedArchive, match=r"a.gz inflates to more than 2097152 bytes"):
        GzippedReader(RawReader(str(tmp_path / "a.gz")), 2 * MIB, "a.gz")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[: len(data) // 2], "is cut short"),
        (lambda data: data[:-4], "is cut short"),
        (lambda data: b"", "is cut short"),
        (lambda data: data[:1000] + bytes([data[1000] ^ 255]) + data[1001:], "is damaged|is cut short"),
        (lambda data: data[:-8] + bytes(8), "is damaged"),
        (lambda data: b"no gzip at all", "is damaged"),
        (lambda data: data + b"garbage", "is damaged"),
        (lambda data: zlib.compress(b"x"), "is damaged"),
    ],
)
def test_damage_is_named(damage: "object", says: str, tmp_path: Path) -> None:
    assert callable(damage)
    (tmp_path / "a.gz").write_bytes(damage(gzip.compress(some(300_000))))
    with pytest.raises(MalformedArchive, match=says):
        GzippedReader(RawReader(str(tmp_path / "a.gz")), 1 << 30, "a.gz")


def test_a_missing_chunk_closes_what_was_opened(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"x")
    with pytest.raises(DiskReadFailed):
        JoinedReader([RawSpec(path=str(tmp_path / "0")), RawSpec(path=str(tmp_path / "1"))])
    assert open_files(tmp_path) == []


def test_more_chunks_than_files_may_be_open(tmp_path: Path) -> None:
    for number in range(FILES_MAX + 1):
        (tmp_path / str(number)).write_bytes(b"x")
    with pytest.raises(UnsupportedFormat, match="over 400 chunks"):
        JoinedReader([RawSpec(path=str(tmp_path / str(number))) for number in range(FILES_MAX + 1)])


@pytest.mark.parametrize(("kind", "image_format"), [("stream", "vmdk"), ("vmdk", "vmdk"), ("qcow2", "qcow2"), ("vhdx", "vhdx")])
def test_an_image_in_gzip_in_chunks(kind: str, image_format: ImageFormat, tmp_path: Path) -> None:
    data = gzip.compress(appliances.disk_file(kind, appliances.DISK_BYTES, 0), 1)
    parts = []
    for number, at in enumerate(range(0, len(data), 100_000)):
        (tmp_path / str(number)).write_bytes(data[at : at + 100_000])
        parts.append(RawSpec(path=str(tmp_path / str(number))))
    over = GzipSpec(over=JoinedSpec(parts=tuple(parts)), size_max_bytes=1 << 30, name="disk.gz")
    spec = ImageSpec(format=image_format, over=over, name="disk.gz")
    reader: DiskReader = open_reader(READER_SPEC.validate_json(READER_SPEC.dump_json(spec)))
    assert read_all(reader) == appliances.raw_disk(seed=0)
    reader.close()


def test_a_blank_disk_by_its_spec() -> None:
    reader = open_reader(BlankSpec(size_bytes=1 << 50))
    assert [(extent.length, extent.zero) for extent in reader.extents()] == [(1 << 50, True)]
