"""qcow2 images: the contract of readers, each way a cluster can be stored, and each oddity of real files."""

import os
import random
import struct
from pathlib import Path

import pytest

from synvirt.blocks import DiskReader, Extent
from synvirt.copying import copy
from synvirt.disks import open_reader
from synvirt.disks.qcow2.reader import Qcow2Reader
from synvirt.disks.raw.cloning import clone
from synvirt.disks.raw.files import RawReader, open_file_writer
from synvirt.disks.specs import ImageSpec, RawSpec
from synvirt.errors import DiskReadFailed, MalformedArchive, UnsupportedFormat
from tests.contracts.readers import ReaderCase, ReaderContract, read_all
from tests.disks.block_images import bytes_of, qemu
from tests.disks.raw.test_cloning import mounted

KIB, MIB = 1 << 10, 1 << 20


def raw_disk(path: Path) -> Path:
    """4 MiB + 1536 bytes: text, noise, zeros, and an odd end."""
    content = bytearray(4 * MIB + 1536)
    noise = random.Random(7).randbytes(200_000)
    for at, piece in ((0, b"boot" * 1000), (300_000, noise), (MIB, b"text\n" * 100_000), (len(content) - 700, noise[:700])):
        content[at : at + len(piece)] = piece
    path.write_bytes(content)
    return path


def opened(image: Path) -> DiskReader:
    return open_reader(ImageSpec(format="qcow2", over=RawSpec(path=str(image)), root=str(image.parent), name=image.name))


def create(folder: Path, name: str, options: str, size: int | None = None, *backing: str) -> Path:
    sizes = [] if size is None else [str(size)]
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "-o", options, *backing, name, *sizes, cwd=folder)
    return folder / name


def write(image: Path, *commands: str) -> None:
    qemu("qemu-io", "-f", "qcow2", *(word for command in commands for word in ("-c", command)), image.name, cwd=image.parent)


def patch(image: Path, offset: int, layout: str, *values: int) -> Path:
    with image.open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack(layout, *values))
    return image


CONVERSIONS = {
    "version 2": ["-o", "compat=0.10"],
    "version 2, compressed": ["-c", "-o", "compat=0.10"],
    "version 3": [],
    "zlib": ["-c"],
    "zstd": ["-c", "-o", "compression_type=zstd"],
    "zlib, clusters of 512 bytes": ["-c", "-o", "cluster_size=512"],
    "zstd, clusters of 512 bytes": ["-c", "-o", "compression_type=zstd,cluster_size=512"],
    "zlib, clusters of 2 MiB": ["-c", "-o", "cluster_size=2M"],
    "zstd, clusters of 2 MiB": ["-c", "-o", "compression_type=zstd,cluster_size=2M"],
    "clusters of 512 bytes": ["-o", "cluster_size=512"],
    "clusters of 2 MiB": ["-o", "cluster_size=2M"],
    "extended L2": ["-o", "extended_l2=on"],
    "extended L2, compressed": ["-c", "-o", "extended_l2=on,cluster_size=16K"],
    "external data file": ["-o", "data_file=disk.data"],
    "raw external data file": ["-o", "data_file=disk.data,data_file_raw=on"],
    "metadata preallocated": ["-S", "0", "-o", "preallocation=metadata"],
}


class TestQcow2Reader(ReaderContract):
    @pytest.fixture(params=[*CONVERSIONS, "chain"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> ReaderCase:
        raw = raw_disk(tmp_path / "disk.raw")
        image = tmp_path / "disk.qcow2"
        if request.param == "chain":
            # Sizes shrink and grow upwards; each layer has what the others have not.
            content = bytearray(raw.read_bytes()[: 3 * MIB] + bytes(2 * MIB))
            create(tmp_path, "middle", "extended_l2=on", 3 * MIB, "-b", raw.name, "-F", "raw")
            write(tmp_path / "middle", "write -P 1 100k 5k", "write -z 1M 512k")
            content[100 * KIB : 105 * KIB], content[MIB : MIB + 512 * KIB] = b"\1" * (5 * KIB), bytes(512 * KIB)
            create(tmp_path, image.name, "cluster_size=4K", 5 * MIB, "-b", "middle", "-F", "qcow2")
            write(image, "write -c -P 2 200k 4k", "write -P 3 4M 100k")
            content[200 * KIB : 204 * KIB], content[4 * MIB : 4 * MIB + 100 * KIB] = b"\2" * (4 * KIB), b"\3" * (100 * KIB)
            return ReaderCase(open=lambda: opened(image), content=bytes(content))
        options = CONVERSIONS[request.param]
        qemu("qemu-img", "convert", "-f", "raw", "-O", "qcow2", *options, raw.name, image.name, cwd=tmp_path)
        return ReaderCase(open=lambda: opened(image), content=raw.read_bytes())


def test_the_active_layer_of_an_image_with_snapshots_is_read(tmp_path: Path) -> None:
    image = create(tmp_path, "disk.qcow2", "cluster_size=64K", MIB)
    write(image, "write -P 1 0 128k")
    qemu("qemu-img", "snapshot", "-c", "before", image.name, cwd=tmp_path)
    write(image, "write -P 2 64k 64k", "discard 0 64k")
    reader = opened(image)
    assert read_all(reader) == bytes(64 * KIB) + b"\2" * (64 * KIB) + bytes(MIB - 128 * KIB)
    reader.close()


def test_a_tebibyte_that_is_nearly_empty_costs_nothing(tmp_path: Path) -> None:
    image = create(tmp_path, "disk.qcow2", "cluster_size=64K", 1 << 40)
    write(image, "write -P 1 700G 1M")
    reader = opened(image)
    assert list(reader.extents()) == [
        Extent(0, 700 << 30, zero=True), Extent(700 << 30, MIB), Extent((700 << 30) + MIB, (324 << 30) - MIB, zero=True),
    ]  # fmt: skip
    content = bytearray(MIB + 2)
    reader.read_into((700 << 30) - 1, memoryview(content))
    assert content == b"\0" + b"\1" * MIB + b"\0"
    reader.close()


@pytest.mark.parametrize(
    ("cluster_bits", "extended"),
    [(9, False), (12, False), (14, True), (16, False), (16, True), (18, False), (21, False), (21, True)],
)
def test_reads_cross_from_table_to_table(tmp_path: Path, cluster_bits: int, extended: bool) -> None:
    """Where an L2 table ends, and where our piece of mapping does; below and above it, and far from any other data."""
    cluster = 1 << cluster_bits
    options = f"cluster_size={cluster},extended_l2={'on' if extended else 'off'}"
    entry = 16 if extended else 8
    edges = {cluster * cluster // entry, 64 * KIB // entry * cluster}
    image = create(tmp_path, "disk.qcow2", options, 3 * max(edges))
    expected = []
    for number, edge in enumerate(sorted(edges)):
        write(image, f"write -P {number + 1} {edge - cluster} {2 * cluster}")
        expected.append(Extent(edge - cluster, 2 * cluster))
    reader = opened(image)
    assert [extent for extent in reader.extents() if not extent.zero] == expected
    for number, edge in enumerate(sorted(edges)):
        start = edge - 2 * cluster
        content = bytearray(b"\xa5" * (4 * cluster))
        reader.read_into(start, memoryview(content))
        data = bytes([number + 1]) * (2 * cluster)
        assert content == bytes(cluster) + data + bytes(cluster)
        assert bytes_of(reader, edge - 1, 2) == data[:2]
    reader.close()


def test_preallocated_clusters_that_were_never_written_are_zeros(tmp_path: Path) -> None:
    """Proxmox makes its images so: every cluster has its place, and the file is one hole."""
    image = create(tmp_path, "disk.qcow2", "preallocation=metadata", 10 << 30)
    write(image, "write -P 1 5G 64k")
    reader = opened(image)
    extents = list(reader.extents())
    assert sum(extent.length for extent in extents if not extent.zero) < MIB
    assert any(not extent.zero and extent.start <= 5 << 30 < extent.end for extent in extents)
    reader.close()


def test_an_external_data_file_may_end_with_the_disk_in_the_midst_of_a_cluster(tmp_path: Path) -> None:
    image = create(tmp_path, "disk.qcow2", "cluster_size=64K,data_file=disk.raw,data_file_raw=on", 54 * KIB)
    write(image, "write -P 1 0 54k")
    os.truncate(tmp_path / "disk.raw", 54 * KIB)
    reader = opened(image)
    assert read_all(reader) == b"\1" * (54 * KIB)
    reader.close()


@pytest.mark.parametrize("missing", [1, 10 * KIB, 64 * KIB, 128 * KIB])
def test_a_file_that_is_cut_off_is_never_read_as_zeros(missing: int, tmp_path: Path) -> None:
    """QEMU reads what is missing as zeros."""
    image = create(tmp_path, "disk.qcow2", "cluster_size=64K", MIB)
    write(image, "write -P 1 0 1M")
    with image.open("r+b") as file:
        file.truncate(image.stat().st_size - missing)
    reader = opened(image)
    with pytest.raises(DiskReadFailed, match=f"guest offset {MIB - missing}.*outside the file") as failure:
        read_all(reader)
    assert "cut off" in str(failure.value.hint)
    reader.close()


@pytest.mark.parametrize("cluster", [0, 18])
@pytest.mark.parametrize("compression", ["zlib", "zstd"])
def test_a_damaged_compressed_cluster_is_named_by_its_guest_offset(tmp_path: Path, compression: str, cluster: int) -> None:
    """The first one, or one in the midst of a batch; read alone, in part, or with all others."""
    raw, image, guest = raw_disk(tmp_path / "disk.raw"), tmp_path / "disk.qcow2", cluster * 64 * KIB
    options = ["-c", "-o", f"compression_type={compression}"]
    qemu("qemu-img", "convert", "-f", "raw", "-O", "qcow2", *options, raw.name, image.name, cwd=tmp_path)
    reader = opened(image)
    assert isinstance(reader, Qcow2Reader)
    size = reader.size
    entries, _ = reader._mapping.clusters(next(reader._mapping.runs(guest, 64 * KIB)))
    at = entries[0] & ((1 << 54) - 1)
    reader.close()
    for garbage in (bytes(8), b"\xff" * 8):
        with image.open("r+b") as file:
            file.seek(at)
            file.write(garbage)
        reader = opened(image)
        for offset, length in ((guest, 64 * KIB), (guest + 5, 700), (0, size)):
            with pytest.raises(DiskReadFailed, match=f"guest offset {guest}: its compressed cluster is damaged"):
                reader.read_into(offset, memoryview(bytearray(length)))
        assert bytes_of(reader, guest + 64 * KIB, 64 * KIB) == raw.read_bytes()[guest + 64 * KIB : guest + 128 * KIB]
        reader.close()


@pytest.mark.parametrize("options", [[], ["-c"]])
def test_a_failure_of_the_file_names_the_guest_offset(tmp_path: Path, options: list[str]) -> None:
    """Whether a table, a plain cluster or a compressed one lies on the bad sector."""
    raw = raw_disk(tmp_path / "disk.raw")
    qemu("qemu-img", "convert", "-f", "raw", "-O", "qcow2", *options, raw.name, "disk.qcow2", cwd=tmp_path)

    class BadSector(RawReader):
        bad = -1

        def read_into(self, offset: int, buffer: memoryview) -> None:
            if offset <= self.bad < offset + len(buffer):
                raise DiskReadFailed(f"sector {self.bad} is bad", hint="look at the disk")
            super().read_into(offset, buffer)

    for bad in (L2, DATA + 10):
        over = BadSector(str(tmp_path / "disk.qcow2"))
        reader = Qcow2Reader(over, name="disk.qcow2")
        over.bad = bad
        with pytest.raises(
            DiskReadFailed, match=f"disk.qcow2 cannot be read at guest offset 0: sector {bad} is bad"
        ) as failure:
            read_all(reader)
        assert failure.value.hint == "look at the disk"
        reader.close()


def test_an_empty_disk_has_no_extents(tmp_path: Path) -> None:
    reader = opened(create(tmp_path, "disk.qcow2", "cluster_size=64K", 0))
    assert reader.size == 0
    assert list(reader.extents()) == []
    reader.read_into(0, memoryview(b""))
    reader.close()


def test_zero_clusters_of_version_3_keep_or_drop_their_place(tmp_path: Path) -> None:
    image = create(tmp_path, "disk.qcow2", "cluster_size=64K", MIB)
    write(image, "write -P 1 0 256k", "write -z 64k 64k", "write -z -u 128k 64k")
    reader = opened(image)
    starts = [(extent.start // KIB, extent.zero) for extent in reader.extents()]
    assert starts == [(0, False), (64, True), (192, False), (256, True)]
    assert read_all(reader)[: 256 * KIB] == b"\1" * (64 * KIB) + bytes(128 * KIB) + b"\1" * (64 * KIB)
    reader.close()


def test_a_dirty_image_is_read(tmp_path: Path) -> None:
    """The dirty bit is about refcounts, which say what may be overwritten; a reader needs none."""
    image = create(tmp_path, "disk.qcow2", "cluster_size=64K,lazy_refcounts=on", MIB)
    write(image, "write -P 1 0 64k")
    patch(image, 72, ">Q", 1)
    reader = opened(image)
    assert read_all(reader)[: 64 * KIB] == b"\1" * (64 * KIB)
    reader.close()


def test_an_image_in_an_image_is_read(tmp_path: Path) -> None:
    """Any format may lie in any other."""
    raw = raw_disk(tmp_path / "disk.raw")
    qemu("qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-c", raw.name, "inner", cwd=tmp_path)
    qemu("qemu-img", "convert", "-f", "raw", "-O", "qcow2", "inner", "outer", cwd=tmp_path)
    outer = ImageSpec(format="qcow2", over=RawSpec(path=str(tmp_path / "outer")), name="outer")
    reader = open_reader(ImageSpec(format="qcow2", over=outer, name="inner"))
    assert read_all(reader) == raw.read_bytes()
    reader.close()


def test_plain_clusters_are_shared_where_the_file_system_can(tmp_path: Path) -> None:
    """Those of the overlay and those of its raw backing file; compressed ones and the odd end are copied."""
    with mounted("xfs", tmp_path) as folder:
        raw = folder / "raw"
        content = bytearray(random.Random(3).randbytes(8 * MIB + 512))
        raw.write_bytes(content)
        image = create(folder, "disk.qcow2", "cluster_size=64K", len(content), "-b", "raw", "-F", "raw")
        write(image, "write -P 1 1M 1M", "write -c -P 2 3M 64k", "write -z 5M 1M")
        content[MIB : 2 * MIB], content[3 * MIB : 3 * MIB + 64 * KIB] = b"\1" * MIB, b"\2" * (64 * KIB)
        content[5 * MIB : 6 * MIB] = bytes(MIB)
        target = folder / "target"
        with target.open("wb") as file:
            file.truncate(len(content))
        reader, writer = opened(image), open_file_writer(str(target), len(content))
        rest = clone(reader, writer)
        assert rest.bytes_cloned == 7 * MIB - 64 * KIB
        assert copy(rest, writer).bytes_done == 64 * KIB + 512
        assert target.read_bytes() == content
        rest.close()
        writer.close()


@pytest.mark.parametrize(
    ("field", "values", "error", "message"),
    [
        ((0, ">4s"), b"QFI\0", MalformedArchive, "not a qcow2 image"),
        ((4, ">I"), 1, UnsupportedFormat, "version 1"),
        ((4, ">I"), 4, UnsupportedFormat, "version 4"),
        ((20, ">I"), 8, MalformedArchive, r"2\^8"),
        ((20, ">I"), 63, MalformedArchive, r"2\^63"),
        ((24, ">Q"), 1 << 63, MalformedArchive, "virtual size|cannot map"),
        ((24, ">Q"), 1 << 62, MalformedArchive, "cannot map"),
        ((32, ">I"), 1, UnsupportedFormat, r"encrypted \(AES\)"),
        ((32, ">I"), 2, UnsupportedFormat, r"encrypted \(LUKS\)"),
        ((36, ">I"), 0, MalformedArchive, "L1 table of 0"),
        ((36, ">I"), (1 << 32) - 1, MalformedArchive, "over the limit"),
        ((40, ">Q"), 1 << 60, MalformedArchive, "L1 table"),
        ((40, ">Q"), 12345, MalformedArchive, "boundary"),
        ((40, ">Q"), 0, MalformedArchive, "L1 table"),
        ((60, ">I"), 65537, MalformedArchive, "65537 snapshots"),
        ((72, ">Q"), 2, MalformedArchive, "marked corrupt"),
        ((72, ">Q"), 4, MalformedArchive, "data in another file"),
        ((72, ">Q"), 8, MalformedArchive, "compression type"),
        ((72, ">Q"), 1 << 40, UnsupportedFormat, "bit 40"),
        ((72, ">Q"), 1 << 5, UnsupportedFormat, "not known here: bit 5"),
        ((96, ">I"), 7, MalformedArchive, "refcount"),
        ((100, ">I"), 80, MalformedArchive, "header length 80"),
        ((100, ">I"), 1 << 31, MalformedArchive, "header length"),
        ((104, ">B"), 1, MalformedArchive, "compression type"),
        ((116, ">I"), 1 << 30, MalformedArchive, "header extension"),
        ((8, ">Q"), 65500, None, ""),  # the name of a backing file that has no bytes is none
    ],
)
def test_a_header_that_cannot_be_is_refused(
    tmp_path: Path, field: tuple[int, str], values: int, error: type[Exception] | None, message: str
) -> None:
    image = patch(create(tmp_path, "disk.qcow2", "cluster_size=64K", MIB), *field, values)
    if error is None:
        opened(image).close()
        return
    with pytest.raises(error, match=message):
        opened(image)


def test_what_is_not_known_is_named_by_the_image_itself(tmp_path: Path) -> None:
    image = create(tmp_path, "disk.qcow2", "cluster_size=64K", MIB)
    patch(image, 72, ">Q", 1 << 7)
    with image.open("r+b") as file:  # the table of feature names begins behind the header, 8 bytes of its own before it
        file.seek(112 + 8)
        file.write(struct.pack(">BB46s", 0, 7, b"time travel"))
    with pytest.raises(UnsupportedFormat, match="not known here: time travel"):
        opened(image)


def test_compressed_with_a_type_that_is_not_known_is_refused(tmp_path: Path) -> None:
    image = create(tmp_path, "disk.qcow2", "compression_type=zstd", MIB)
    with pytest.raises(UnsupportedFormat, match="compression type 9"):
        opened(patch(image, 104, ">B", 9))


L1, L2, DATA = 0x30000, 0x40000, 0x50000  # where QEMU puts them in a new image with clusters of 64 KiB


@pytest.mark.parametrize(
    ("at", "entry", "error", "message"),
    [
        (L1, 1 << 50, MalformedArchive, "outside the file"),
        # It begins where the file ends.
        (L1 + 8, (1 << 63) | (DATA + 64 * KIB), MalformedArchive, "for guest offset 536870912, lies outside"),
        (L1, L2 + 512, MalformedArchive, "boundary"),
        (L1, L1, MalformedArchive, "over the L1 table"),
        (L1 + 8, (1 << 63) | L2, MalformedArchive, "two entries of the L1 table"),
        (L2, DATA + 512, MalformedArchive, "guest offset 0 lies on no cluster's boundary"),
        (L2, 1 << 50, DiskReadFailed, "outside the file"),
        (L2, (1 << 62) | (1 << 50), DiskReadFailed, "outside the file"),
        (L2, (1 << 62) | (0xFF << 54) | DATA, DiskReadFailed, "compressed cluster"),
    ],
)
def test_tables_that_point_to_the_wrong_place_are_refused(
    tmp_path: Path, at: int, entry: int, error: type[Exception], message: str
) -> None:
    image = create(tmp_path, "disk.qcow2", "cluster_size=64K", 600 * MIB)
    write(image, "write -P 255 0 64k")
    patch(image, at, ">Q", entry)
    with pytest.raises(error, match=message):
        opened(image).read_into(0, memoryview(bytearray(128 * KIB)))


@pytest.mark.parametrize("again", [None, (0, 5), (3, 1)])
def test_l2_tables_in_any_order_are_read_and_one_that_is_used_twice_is_refused(
    tmp_path: Path, again: tuple[int, int] | None
) -> None:
    """The order is that of the first writes. `again`: two entries of the L1 table, far from each other, for one L2 table."""
    image = create(tmp_path, "disk.qcow2", "cluster_size=64K", 6 * 512 * MIB)
    order = (4, 0, 5, 2, 1, 3)
    write(image, *(f"write -P {number + 1} {number * 512}M 64k" for number in order))
    if again is not None:
        entries = struct.unpack_from(">6Q", image.read_bytes(), L1)
        patch(image, L1 + again[0] * 8, ">Q", entries[again[1]])
        with pytest.raises(MalformedArchive, match="two entries of the L1 table"):
            opened(image)
        return
    disk, found = opened(image), memoryview(bytearray(64 * KIB))
    for number in order:
        disk.read_into(number * 512 * MIB, found)
        assert set(found) == {number + 1}
    disk.close()


def test_zero_clusters_are_refused_in_version_2(tmp_path: Path) -> None:
    image = create(tmp_path, "disk.qcow2", "cluster_size=64K,compat=0.10", MIB)
    write(image, "write -P 255 0 64k")
    patch(image, L2, ">Q", (1 << 63) | DATA | 1)
    with pytest.raises(MalformedArchive, match="version 2"):
        list(opened(image).extents())


@pytest.mark.parametrize(
    ("entry", "bitmap", "message"),
    [((1 << 63) | DATA, (1 << 32) | 1, "both allocated and zeros"), (0, 1, "no place in the file")],
)
def test_subclusters_that_contradict_themselves_are_refused(tmp_path: Path, entry: int, bitmap: int, message: str) -> None:
    image = create(tmp_path, "disk.qcow2", "cluster_size=64K,extended_l2=on", MIB)
    write(image, "write -P 255 0 64k")
    patch(image, L2, ">QQ", entry, bitmap)
    with pytest.raises(MalformedArchive, match=message):
        list(opened(image).extents())


def test_an_external_data_file_is_where_the_guest_thinks(tmp_path: Path) -> None:
    image = create(tmp_path, "disk.qcow2", "cluster_size=64K,data_file=disk.data", MIB)
    write(image, "write -P 255 0 128k")
    patch(image, L2, ">Q", (1 << 63) | 0x10000)
    with pytest.raises(MalformedArchive, match="elsewhere in the external data file"):
        list(opened(image).extents())
    patch(image, L2, ">Q", 1 << 62)
    with pytest.raises(MalformedArchive, match="is compressed"):
        list(opened(image).extents())


def test_a_small_file_that_claims_eight_exbibytes_is_refused_at_once(tmp_path: Path) -> None:
    image = create(tmp_path, "disk.qcow2", "cluster_size=2M", MIB)
    patch(image, 24, ">Q", (1 << 63) - 1)
    with image.open("r+b") as file:
        file.truncate(KIB)
    with pytest.raises(MalformedArchive, match="cannot map 9223372036854775807 bytes"):
        opened(image)


def test_an_image_in_a_stream_is_refused(tmp_path: Path) -> None:
    class Stream(RawReader):
        max_readers = 1

    with pytest.raises(UnsupportedFormat, match="front to back"):
        Qcow2Reader(Stream(str(create(tmp_path, "disk.qcow2", "cluster_size=64K", MIB))))
