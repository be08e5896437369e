"""The files that a VMDK is made of: descriptors, extents and parents, and which of them are opened."""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.blocks import DiskReader
from synvirt.disks.raw.files import RawReader
from synvirt.disks.vmdk import reader as vmdk_reader
from synvirt.disks.vmdk import sparse, tables
from synvirt.disks.vmdk.reader import VmdkReader
from synvirt.errors import DiskReadFailed, HostPathRejected, MalformedArchive, SynvirtError, UnsupportedFormat
from synvirt.sizes import MIB
from tests.contracts.readers import ReaderCase, ReaderContract
from tests.disks.block_images import assert_same_disk, bytes_of
from tests.disks.vmdk.vmdk_images import (
    COWD,
    HOSTED,
    SE_SPARSE,
    SECTOR,
    STREAM,
    Image,
    descriptor,
    grain_data,
    open_vmdk,
    write_image,
)


class TestVmdkKeepsTheLaws(ReaderContract):
    @pytest.fixture(params=["hosted", "stream", "walked", "cowd", "sesparse", "flat", "split", "snapshot", "split snapshot"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> ReaderCase:
        content = _MAKERS[request.param](tmp_path)
        return ReaderCase(open=lambda: open_vmdk(tmp_path / "disk.vmdk"), content=content)


def _one(image: Image) -> Callable[[Path], bytes]:
    def make(folder: Path) -> bytes:
        write_image(folder, "disk", image)
        return image.disk()

    return make


def _flat(folder: Path) -> bytes:
    lines = ['RW 7 FLAT "disk-flat.vmdk" 3', "RW 100 ZERO", 'RDONLY 10 VMFS "disk-flat.vmdk"']
    (folder / "disk.vmdk").write_bytes(descriptor(*lines, create_type="custom"))
    (folder / "disk-flat.vmdk").write_bytes(content := grain_data(1, 10 * SECTOR))
    return content[3 * SECTOR :] + bytes(100 * SECTOR) + content


def _split(folder: Path) -> bytes:
    parts = {"disk-s001.vmdk": HOSTED, "disk-s002.vmdk": replace(HOSTED, grains={7: 9}), "disk-s003.vmdk": STREAM}
    for name, part in parts.items():
        (folder / name).write_bytes(part.file())
    # The second has room for more than the disk has of it.
    sizes = (2048, 1999, 2048)
    lines = [f'RW {size} SPARSE "{name}"' for name, size in zip(parts, sizes, strict=True)]
    (folder / "disk.vmdk").write_bytes(descriptor(*lines, create_type="twoGbMaxExtentSparse"))
    return b"".join(part.disk()[: size * SECTOR] for part, size in zip(parts.values(), sizes, strict=True))


def _snapshot(folder: Path) -> bytes:
    content = _split(folder)
    (folder / "disk.vmdk").rename(folder / "base.vmdk")
    above = replace(COWD, capacity=6100)
    write_image(folder, "disk", above, cid=2, parent_cid=1, parent="base.vmdk")
    return above.disk(content)


def _split_snapshot(folder: Path) -> bytes:
    """Whose pieces end elsewhere than its parent's, and together after it."""
    content = _split(folder)
    (folder / "disk.vmdk").rename(folder / "base.vmdk")
    parts = [
        replace(COWD, capacity=capacity, grains={capacity // 2: at}) for at, capacity in enumerate((100, 2000, 1, 3900, 500))
    ]
    lines = [f'RW {part.capacity} VMFSSPARSE "delta-{at}.vmdk"' for at, part in enumerate(parts)]
    (folder / "disk.vmdk").write_bytes(descriptor(*lines, create_type="vmfsSparse", parent_cid=1, parent="base.vmdk"))
    disk, start = b"", 0
    for at, part in enumerate(parts):
        (folder / f"delta-{at}.vmdk").write_bytes(part.file())
        disk += part.disk(content[start : start + part.size])
        start += part.size
    return disk


_MAKERS: dict[str, Callable[[Path], bytes]] = {
    "hosted": _one(HOSTED),
    "stream": _one(STREAM),
    "walked": _one(replace(STREAM, directory=False)),
    "cowd": _one(COWD),
    "sesparse": _one(SE_SPARSE),
    "flat": _flat,
    "split": _split,
    "snapshot": _snapshot,
    "split snapshot": _split_snapshot,
}


# ── descriptors ──────────────────────────────────────────────────────────────────────────────────────────────────────

FLAT = 'RW 4 FLAT "disk-flat.vmdk" 0'


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (b"", MalformedArchive, "is not a VMDK"),
        (b"\0" * 100, MalformedArchive, "is not a VMDK"),
        (b"hello", MalformedArchive, "is not a VMDK"),
        (b"# Disk DescriptorFile\n" + b"x" * (2 << 20), MalformedArchive, "too large for a descriptor"),
        (b"CID=1\n" * 16385, MalformedArchive, "its descriptor has 16385 lines"),
        (descriptor(create_type="monolithicFlat"), MalformedArchive, "names no extents"),
        (descriptor("RW 0 ZERO", create_type="monolithicFlat"), MalformedArchive, "names no extents"),
        (
            descriptor("RW 4 FLAT disk-flat.vmdk", create_type="x"),
            MalformedArchive,
            "is 1024 bytes|describes no extent|not a file name",
        ),
        (descriptor("RW many ZERO", create_type="x"), MalformedArchive, "line 8 of its descriptor describes no extent"),
        (descriptor("RW 99999999999999999999 ZERO", create_type="x"), MalformedArchive, "larger than VMware's largest disk"),
        (descriptor(*["RW 1 ZERO"] * 5000, create_type="x"), MalformedArchive, "5000 extents"),
        (descriptor("NOACCESS 4 ZERO", create_type="x"), UnsupportedFormat, "may not be read"),
        (descriptor('RW 4 VMFSRDM "disk-rdm.vmdk"', create_type="vmfsRDM"), UnsupportedFormat, "type VMFSRDM"),
        (descriptor('RW 5 FLAT "disk-flat.vmdk" 0', create_type="x"), DiskReadFailed, "ends at 2048"),
        (descriptor('RW 4 FLAT "disk-flat.vmdk" 1', create_type="x"), DiskReadFailed, "ends at 2048"),
        (descriptor('RW 4 FLAT "missing.vmdk" 0', create_type="x"), MalformedArchive, "not there"),
        (descriptor('RW 4 SPARSE "disk-flat.vmdk"', create_type="x"), MalformedArchive, "no sparse VMDK extent"),
        (descriptor('RW 4 SPARSE "disk.vmdk"', create_type="x"), MalformedArchive, "header lies at|no sparse VMDK extent"),
        (descriptor(FLAT, create_type="x").replace(b"CID=00000001", b"CID=nonsense"), MalformedArchive, "cid is 'nonsense'"),
        (descriptor(FLAT, 'keySafe = "vmware:key/list/(pair)"', create_type="x"), UnsupportedFormat, "is encrypted"),
        (descriptor(FLAT, 'ddb.iofilters = "vmwarevmcrypt"', create_type="x"), UnsupportedFormat, "is encrypted"),
        (descriptor(FLAT, create_type="x", parent_cid=7), MalformedArchive, "does not say what its parent is called"),
        (descriptor(FLAT, create_type="x", parent_cid=7, parent="gone.vmdk"), MalformedArchive, "not there"),
    ],
)
def test_a_wrong_descriptor_is_refused(tmp_path: Path, text: bytes, error: type[SynvirtError], words: str) -> None:
    (tmp_path / "disk.vmdk").write_bytes(text)
    (tmp_path / "disk-flat.vmdk").write_bytes(bytes(2048))
    before = open_files()
    with pytest.raises(error, match=words):
        open_vmdk(tmp_path / "disk.vmdk")
    assert open_files() == before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("line_ends", [b"\n", b"\r\n"])
def test_a_descriptor_written_on_windows_in_another_encoding(tmp_path: Path, line_ends: bytes) -> None:
    text = descriptor('  RW 4\tFLAT  "Größe-flat.vmdk"  0 ', create_type="monolithicFlat", encoding="windows-1252")
    (tmp_path / "disk.vmdk").write_bytes(text.decode().encode("cp1252").replace(b"\n", line_ends))
    (tmp_path / "Größe-flat.vmdk").write_bytes(b"\7" * 2048)
    reader = open_vmdk(tmp_path / "disk.vmdk")
    assert bytes_of(reader, 0, 2048) == b"\7" * 2048
    reader.close()


@pytest.mark.parametrize(
    ("named", "python", "file"),
    [
        ("windows-1251", "cp1251", "Сервер-flat.vmdk"),
        ("windows-1250", "cp1250", "Účetnictví-flat.vmdk"),
        ("windows-1254", "cp1254", "Şirket-flat.vmdk"),
        ("windows-1253", "cp1253", "Λογιστήριο-flat.vmdk"),
        ("ISO-8859-2", "iso8859-2", "Księgowość-flat.vmdk"),
        ("GBK", "gbk", "服务器-flat.vmdk"),
        ("windows-31j", "cp932", "サーバー-flat.vmdk"),
        ("EUC-JP", "euc_jp", "サーバー-flat.vmdk"),
        ("UTF-8", "utf-8", "Сервер 服务器-flat.vmdk"),
        # None of a host: the bytes are UTF-8.
        ("utf-7", "utf-8", "Größe+AGE-flat.vmdk"),
        ("cp0000", "utf-8", "Größe-flat.vmdk"),
    ],
)
def test_a_descriptor_in_the_encoding_of_any_host(tmp_path: Path, named: str, python: str, file: str) -> None:
    text = descriptor(f'RW 4 FLAT "{file}" 0', create_type="monolithicFlat", encoding=named).decode()
    (tmp_path / "disk.vmdk").write_bytes(text.encode(python))
    (tmp_path / file).write_bytes(b"\7" * 2048)
    reader = open_vmdk(tmp_path / "disk.vmdk")
    assert bytes_of(reader, 0, 2048) == b"\7" * 2048
    reader.close()


def test_an_extent_by_itself_is_no_disk(tmp_path: Path) -> None:
    for name, content in (("a.vmdk", HOSTED.file()), ("b.vmdk", COWD.file()), ("c.vmdk", SE_SPARSE.file())):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UnsupportedFormat, match="one extent of a disk"):
            open_vmdk(tmp_path / name)


# ── other files ──────────────────────────────────────────────────────────────────────────────────────────────────────

OUTSIDE = ["../secret.vmdk", "{root}/../secret.vmdk", "json:{{}}", "nbd://localhost/x", "file:secret.vmdk", "link.vmdk"]


@pytest.mark.parametrize("where", OUTSIDE)
@pytest.mark.parametrize("kind", ["flat", "sparse", "parent"])
def test_what_leads_out_of_the_root_is_not_opened(
    tmp_path: Path, where: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "imports"
    root.mkdir()
    write_image(tmp_path, "secret", HOSTED)
    (root / "link.vmdk").symlink_to("../secret.vmdk")
    where = where.format(root=root)
    if kind == "parent":
        write_image(root, "disk", COWD, cid=2, parent_cid=1, parent=where)
    else:
        line = f'RW 4 {kind.upper()} "{where}"' + (" 0" if kind == "flat" else "")
        (root / "disk.vmdk").write_bytes(descriptor(line, create_type="x"))
    opened: list[str] = []
    really = os.open

    def watched(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor = really(path, flags, mode, dir_fd=dir_fd)
        opened.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    with pytest.raises(HostPathRejected):
        open_vmdk(root / "disk.vmdk", root)
    assert str(tmp_path / "secret.vmdk") not in opened


def test_without_a_root_no_other_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "disk.vmdk").write_bytes(descriptor(FLAT, create_type="monolithicFlat"))
    (tmp_path / "disk-flat.vmdk").write_bytes(bytes(2048))
    with pytest.raises(HostPathRejected, match="may open no other"):
        VmdkReader(RawReader(str(tmp_path / "disk.vmdk")), root=None, name="disk.vmdk")


@pytest.mark.parametrize(
    "hint", ["base.vmdk", "/vmfs/volumes/5f3c/vm/base.vmdk", "C:\\VMs\\vm\\BASE.vmdk", "{root}/vm/base.vmdk"]
)
def test_a_parent_is_found_beside_its_snapshot(tmp_path: Path, hint: str) -> None:
    folder = tmp_path / "vm"
    folder.mkdir()
    write_image(folder, "base", HOSTED, cid=1)
    write_image(folder, "disk", COWD, cid=2, parent_cid=1, parent=hint.format(root=tmp_path))
    (tmp_path / "raw").write_bytes(COWD.disk(HOSTED.disk()))
    reader = open_vmdk(folder / "disk.vmdk", tmp_path)
    assert_same_disk(reader, tmp_path / "raw")
    reader.close()


def test_a_parent_that_was_changed_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path, "base", HOSTED, cid=0xABC)
    write_image(tmp_path, "disk", COWD, parent_cid=0xABD, parent="base.vmdk")
    before = open_files()
    with pytest.raises(MalformedArchive, match="CID was 00000abd; now it is 00000abc"):
        open_vmdk(tmp_path / "disk.vmdk")
    assert open_files() == before


def test_a_chain_that_is_a_loop_or_endless_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path, "a", COWD, parent_cid=1, parent="b.vmdk")
    write_image(tmp_path, "b", COWD, parent_cid=1, parent="a.vmdk")
    write_image(tmp_path, "self", COWD, parent_cid=1, parent="self.vmdk")
    for name in ("a", "self"):
        before = open_files()
        with pytest.raises(MalformedArchive, match="loop"):
            open_vmdk(tmp_path / f"{name}.vmdk")
        assert open_files() == before
    for number in range(70):
        write_image(tmp_path, f"{number}", COWD, parent_cid=1, parent=f"{number + 1}.vmdk")
    with pytest.raises(MalformedArchive, match="more than 64"):
        open_vmdk(tmp_path / "0.vmdk")


def test_everything_is_closed_with_the_disk(tmp_path: Path) -> None:
    _snapshot(tmp_path)
    before = open_files()
    reader = open_vmdk(tmp_path / "disk.vmdk")
    reader.close()
    reader.close()
    assert open_files() == before


@pytest.mark.parametrize("make", [_snapshot, _split_snapshot])
def test_nothing_stays_open_where_a_read_fails_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], bytes]
) -> None:
    """At each read of the headers, descriptors and tables of all its files."""
    make(tmp_path)
    left, read = 0, sparse.read_at

    def failing(*arguments: Any) -> bytearray:
        nonlocal left
        left -= 1
        if left == 0:
            raise DiskReadFailed("the file system is away")
        return read(*arguments)

    for room in (vmdk_reader, sparse, tables):
        monkeypatch.setattr(room, "read_at", failing)
    before = open_files()
    for moment in count(1):
        left = moment
        try:
            open_vmdk(tmp_path / "disk.vmdk").close()
        except DiskReadFailed:
            assert open_files() == before, moment
            continue
        break
    assert moment > 10, "it has that many reads"


def test_the_markers_of_a_stream_are_found_wherever_a_read_of_them_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_image(tmp_path, "disk", replace(STREAM, directory=False))
    for sectors in range(1, 40):
        monkeypatch.setattr(tables, "_WALK_READ_BYTES", sectors * SECTOR)
        reader = open_vmdk(tmp_path / "disk.vmdk")
        assert bytes_of(reader, 0, reader.size) == STREAM.disk(), sectors
        reader.close()


def test_a_disk_in_parts_is_read_as_often_at_once_as_the_least_of_its_files_allows() -> None:
    parts: list[Any] = [SimpleNamespace(size=1, max_readers=most) for most in (64, 2, 3)]
    for beneath in parts:
        joined = vmdk_reader._Joined([part for part in parts if part is not beneath], [beneath], "disk.vmdk")
        assert joined.max_readers == 2


def test_a_chain_has_a_most_of_tables_whatever_the_number_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand small files of ours would else fill the memory with their directories."""
    monkeypatch.setattr(vmdk_reader, "_CHAIN_TABLES_MAX", 5)
    opened, of_two = vmdk_reader._Opened(None), sparse.Sparse("hosted", 2 * MIB, MIB, 1, SECTOR)
    opened.count(of_two, "disk.vmdk")
    opened.count(of_two, "disk.vmdk")
    with pytest.raises(MalformedArchive, match="over 5 grain tables"):
        opened.count(of_two, "disk.vmdk")


def test_a_stream_reader_is_refused(tmp_path: Path) -> None:
    class OnceOnly:
        size, max_readers = 1 << 20, 1

        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} was used")

    over: DiskReader = OnceOnly()  # type: ignore[assignment]
    with pytest.raises(UnsupportedFormat, match="front to back"):
        VmdkReader(over, root=None, name="disk.vmdk")


@pytest.mark.parametrize("kind", sorted(_MAKERS))
def test_all_data_that_is_not_compressed_can_be_shared(tmp_path: Path, kind: str) -> None:
    """Its places are its data extents (a volume on the same file system shares them), but for what lies in a stream."""
    (tmp_path / "raw").write_bytes(_MAKERS[kind](tmp_path))
    reader = open_vmdk(tmp_path / "disk.vmdk")
    assert_same_disk(reader, tmp_path / "raw")
    data = sum(extent.length for extent in reader.extents() if not extent.zero)
    shared = sum(place.length for place in reader.places())
    if kind in ("stream", "walked"):
        assert shared == 0
    else:  # the last piece of the split disks is a stream
        assert data - len(STREAM.grains) * STREAM.grain_bytes * ("split" in kind or "snapshot" in kind) <= shared <= data
        assert shared > 0
    reader.close()
