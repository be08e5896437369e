"""What goes into a repository comes out of it, and nothing is stored twice."""

import os
import threading
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.blocks import Extent, new_buffer
from synvirt.copying import copy
from synvirt.disks.raw.files import RawReader
from synvirt.errors import (
    BackupConflict,
    BackupNotFound,
    DiskWriteFailed,
    RepositoryDamaged,
    RepositoryKeyWrong,
    RepositoryUnreachable,
)
from synvirt.repository import manifest as manifests
from synvirt.repository import packs
from synvirt.repository.disk import ChunkWriter, PointReader
from synvirt.repository.folder import UNFINISHED, HostFolder, file_system_of, put
from synvirt.repository.keys import CHUNK_BYTES, from_recovery_text, new_key, recovery_text
from synvirt.repository.repository import Repository, create
from synvirt.repository.session import Session
from synvirt.repository.verify import verify_point, verify_repository
from tests.cases import cases
from tests.contracts.readers import ReaderCase, ReaderContract
from tests.fakes.disks import MemoryReader, MemoryWriter
from tests.repository.folders import MemoryFolder
from tests.repository.points import KEY, back_up, disk, opened, restored


class TestPointReader(ReaderContract):
    @pytest.fixture(params=["aligned", "odd", "empty"])
    def case(self, request: pytest.FixtureRequest) -> ReaderCase:
        repository = opened(MemoryFolder(), new=True)
        block_bytes = {"aligned": CHUNK_BYTES // 4, "odd": 200_001, "empty": 64 << 10}[request.param]
        source = MemoryReader({"empty": "----"}.get(request.param, "AB0-----CCDDE-"), block_bytes=block_bytes)
        found = repository.manifest(back_up(repository, source)).shown.disks[0]
        return ReaderCase(open=lambda: PointReader(repository, found), content=source.content)


@cases(60)
@given(
    blocks=st.text("AB0-", min_size=1, max_size=24),
    block_bytes=st.sampled_from([CHUNK_BYTES // 4, CHUNK_BYTES // 16, 100_003, 512]),
    threads=st.sampled_from([1, 3]),
)
def test_what_is_restored_is_what_was_backed_up(blocks: str, block_bytes: int, threads: int) -> None:
    repository = opened(MemoryFolder(), new=True)
    source = MemoryReader(blocks, block_bytes=block_bytes)
    point = back_up(repository, source, threads=threads)
    again = Repository(repository.folder, KEY)
    assert restored(again, point, threads=threads) == [source.content]
    assert verify_repository(again).wrongs == ()
    assert verify_point(again, point).wrong is None


def test_a_chunk_that_is_there_is_not_stored_again() -> None:
    repository = opened(MemoryFolder(), new=True)
    first = Session(repository)
    back_up(repository, disk("AAAABBBBCCCCDDDD"), session=first)
    assert first.new_bytes == 4 * CHUNK_BYTES + manifests.PAGE_BYTES
    second = Session(repository)
    point = back_up(repository, disk("AAAABBBBXCCCDDDDAAAA"), session=second)
    assert second.new_bytes == CHUNK_BYTES + manifests.PAGE_BYTES
    assert restored(repository, point) == [disk("AAAABBBBXCCCDDDDAAAA").content]
    third = Session(repository)
    back_up(repository, disk("AAAABBBBXCCCDDDDAAAA"), session=third)
    assert (third.new_bytes, third.stored_bytes) == (0, 0)


def test_zeros_are_not_stored_whether_the_source_says_so_or_not() -> None:
    repository = opened(MemoryFolder(), new=True)
    session = Session(repository)
    point = back_up(repository, disk("----0000--00"), session=session)
    assert (session.new_bytes, session.stored_bytes) == (0, 0)
    assert [extent.zero for extent in PointReader(repository, repository.manifest(point).shown.disks[0]).extents()] == [True]


def test_large_content_fills_several_packs_and_reads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 3 * CHUNK_BYTES)
    repository = opened(MemoryFolder(), new=True)
    content = Random(7).randbytes(9 * CHUNK_BYTES + 12345)
    source = MemoryReader("-", block_bytes=len(content))
    source.content, source._extents = content, [Extent(0, len(content))]
    point = back_up(repository, source, threads=4)
    for _ in range(5):  # threads that wait for one another would do so by chance
        back_up(opened(MemoryFolder(), new=True), source, threads=4)
    assert len(repository.pack_sizes()) >= 4
    assert all(size <= 3 * CHUNK_BYTES for size in repository.pack_sizes().values())
    assert restored(Repository(repository.folder, KEY), point) == [content]


def test_a_session_has_the_memory_of_two_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is stored while the next one is filled. Memory that is new for each pack would have to be cleared each time."""
    made = Mock(side_effect=new_buffer)
    monkeypatch.setattr(packs, "PACK_BYTES", 2 * CHUNK_BYTES)
    monkeypatch.setattr(packs, "new_buffer", made)
    repository = opened(MemoryFolder(), new=True)
    content = Random(7).randbytes(12 * CHUNK_BYTES)
    source = MemoryReader("-", block_bytes=len(content))
    source.content, source._extents = content, [Extent(0, len(content))]
    point = back_up(repository, source, threads=2)
    assert len(repository.pack_sizes()) > 10
    assert made.call_count == 2
    assert restored(Repository(repository.folder, KEY), point) == [content]


class Crowded(bytearray):
    """Where memory runs out."""

    def __iadd__(self, _: object) -> "Crowded":
        raise MemoryError


def test_a_pack_without_memory_for_a_frame_is_as_it_was() -> None:
    """Else the next frame lies where the footer has the one that never came, and later backups rely on that."""
    pack = packs.Pack()
    pack.add(b"a" * 32, packs.CHUNK, b"the first", 9)
    pack._footer = Crowded(pack._footer)
    with pytest.raises(MemoryError):
        pack.add(b"b" * 32, packs.CHUNK, b"too much", 8)
    pack._footer = bytearray(pack._footer)
    pack.add(b"c" * 32, packs.CHUNK, b"the last", 8)
    assert pack.names == [b"a" * 32, b"c" * 32]
    name, content, tail = pack.closed()
    folder = MemoryFolder()
    folder.make_folders([packs.FOLDER, UNFINISHED])
    put(folder, f"{packs.FOLDER}/{name}", [content])
    entries = packs.entries_of(packs.footer_of(name, len(content), tail))
    assert [packs.read_frame(folder, name, entry) for entry in entries] == [b"the first", b"the last"]


def test_a_thread_without_memory_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the pack before the last: where that is never free again, the run hangs instead of failing."""
    monkeypatch.setattr(packs, "PACK_BYTES", 2 * CHUNK_BYTES)
    session, drawn = Session(opened(MemoryFolder(), new=True)), Random(3)
    session.add(drawn.randbytes(CHUNK_BYTES))
    with monkeypatch.context() as crowded:
        crowded.setattr(packs.Pack, "add", lambda *_: Crowded().__iadd__(b""))
        with pytest.raises(MemoryError):
            session.add(drawn.randbytes(CHUNK_BYTES))
    others = threading.Thread(target=lambda: [session.add(drawn.randbytes(CHUNK_BYTES)) for _ in range(3)], daemon=True)
    others.start()
    others.join(20)
    assert not others.is_alive()


def test_a_point_exists_only_once_its_manifest_does() -> None:
    repository = opened(MemoryFolder(), new=True)
    session = Session(repository)
    writer = ChunkWriter(session, CHUNK_BYTES)
    copy(disk("AAAA"), writer, fresh=False)
    writer.finish()
    assert repository.point_ids() == []


def test_a_disk_of_which_not_every_byte_came_is_no_disk() -> None:
    repository = opened(MemoryFolder(), new=True)
    writer = ChunkWriter(Session(repository), 2 * CHUNK_BYTES)
    writer.write(0, memoryview(b"x" * CHUNK_BYTES))
    with pytest.raises(DiskWriteFailed, match=str(CHUNK_BYTES)):
        writer.finish()
    with pytest.raises(DiskWriteFailed, match="twice"):
        writer.write(0, memoryview(b"y" * CHUNK_BYTES))
    with pytest.raises(DiskWriteFailed, match="outside"):
        writer.write(2 * CHUNK_BYTES, memoryview(b"y"))


def test_another_key_opens_nothing() -> None:
    folder = MemoryFolder()
    opened(folder, new=True)
    with pytest.raises(RepositoryKeyWrong):
        Repository(folder, new_key())


def test_no_byte_of_a_guest_is_in_the_clear() -> None:
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    back_up(repository, disk("AAAA"))
    stored = b"".join(file.content for file in folder.files.values())
    for secret in (b"A" * 64, b"guest", b"<domain", b"disk0", KEY):
        assert secret not in stored


def test_a_point_that_is_kept_cannot_be_removed() -> None:
    repository = opened(MemoryFolder(), new=True)
    point = back_up(repository, disk("AAAA"))
    repository.keep(point, kept=True)
    with pytest.raises(BackupConflict):
        repository.remove(point)
    repository.keep(point, kept=False)
    repository.remove(point)
    assert repository.point_ids() == []
    with pytest.raises(BackupNotFound):
        repository.manifest(point)


def test_a_repository_is_made_in_an_empty_folder_only(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(BackupConflict):
        create(HostFolder(tmp_path), KEY)
    with pytest.raises(RepositoryUnreachable):
        HostFolder(tmp_path / "nowhere")
    with pytest.raises(RepositoryUnreachable, match="File name too long"):
        HostFolder(tmp_path / ("0" * 300))
    with pytest.raises(RepositoryUnreachable, match="mounted"):
        HostFolder(tmp_path, is_nfs=True)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("36 35 {device} / /mnt rw,noatime master:1 - nfs4 nas:/export rw,vers=4.2", "nfs4"),
        ("36 35 {device} / /a\\040folder rw shared:5 master:1 - nfs nas:/export rw", "nfs"),
        ("36 35 {device} / / rw - ext4 /dev/vda rw", "ext4"),
        ("36 35 250:77 / /mnt rw - nfs4 nas:/export rw", None),
        ("36 35 250:77 / /mnt rw {device} - nfs4 nas:/export rw", None),
        ("no line of that kind", None),
    ],
)
def test_a_repository_of_kind_nfs_lies_on_nfs(line: str, kind: str | None, tmp_path: Path) -> None:
    """The kernel's table of mounts is played: an export can be mounted only where the kernel has NFS."""
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 1 250:78 / / rw - tmpfs none rw\n{line.format(device=f'{os.major(device)}:{os.minor(device)}')}\n")
    assert file_system_of(tmp_path, mounts) == kind
    if kind in ("nfs", "nfs4"):
        assert HostFolder(tmp_path, is_nfs=True, mounts=mounts).room()[0] > 0
    else:
        with pytest.raises(RepositoryUnreachable, match="no NFS export is mounted"):
            HostFolder(tmp_path, is_nfs=True, mounts=mounts)


def test_the_kernel_says_what_a_file_system_is() -> None:
    assert file_system_of(Path("/proc/self")) == "proc"


def test_a_folder_of_this_host_holds_a_sparse_disk(tmp_path: Path) -> None:
    image, folder = tmp_path / "disk.raw", tmp_path / "repository"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(12 * CHUNK_BYTES)
        file.seek(5 * CHUNK_BYTES + 5)
        file.write(Random(1).randbytes(3 * CHUNK_BYTES))
    create(HostFolder(folder), KEY)
    repository = Repository(HostFolder(folder), KEY)
    reader = RawReader(str(image))
    point = back_up(repository, reader)
    reader.close()
    assert [restored(repository, point)[0] == image.read_bytes()] == [True]
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 5 * CHUNK_BYTES
    assert list((folder / "tmp").iterdir()) == []
    assert verify_repository(Repository(HostFolder(folder), KEY)).wrongs == ()


@pytest.mark.parametrize("missing", [0, CHUNK_BYTES // 2, CHUNK_BYTES - 1])
def test_a_disk_of_which_a_byte_never_came_is_none(missing: int) -> None:
    content = memoryview(bytearray(b"x" * CHUNK_BYTES))
    writer = ChunkWriter(Session(opened(MemoryFolder(), new=True)), 2 * CHUNK_BYTES)
    writer.write(0, content)
    writer.write(CHUNK_BYTES, content[:missing])
    writer.write(CHUNK_BYTES + missing + 1, content[missing + 1 :])
    with pytest.raises(DiskWriteFailed, match=f"nothing came for the disk's bytes from offset {CHUNK_BYTES} on"):
        writer.finish()


def test_a_file_that_is_missing_from_a_folder_is_damage(tmp_path: Path) -> None:
    (tmp_path / "packs").mkdir()
    with pytest.raises(RepositoryDamaged, match="missing"):
        HostFolder(tmp_path).read("packs/none")


@given(st.binary(min_size=32, max_size=32))
def test_a_recovery_key_is_the_key(master: bytes) -> None:
    text = recovery_text(master)
    assert from_recovery_text(text.lower().replace("-", " ")) == master
    other = "A" if text[0] != "A" else "B"
    for wrong in (other + text[1:], text[:-2], "", "ä"):
        with pytest.raises(RepositoryKeyWrong):
            from_recovery_text(wrong)


def test_a_restore_writes_no_zeros() -> None:
    repository = opened(MemoryFolder(), new=True)
    point = back_up(repository, disk("AAAA----BBBB"))
    writer = MemoryWriter(3 * CHUNK_BYTES)
    copy(PointReader(repository, repository.manifest(point).shown.disks[0]), writer)
    assert sum(length for _, length in writer.written) == 2 * CHUNK_BYTES
