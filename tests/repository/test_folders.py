"""What a repository needs of a folder, of each kind: in memory, on this host, and offered by a peer over TLS."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from blake3 import blake3

from synvirt.errors import RepositoryDamaged, RepositoryFull, RepositoryUnreachable, StoreWriteFailed
from synvirt.repository import packs
from synvirt.repository.folder import UNFINISHED, Folder, HostFolder, put
from synvirt.repository.garbage import GRACE_S, YOUNG_S, collect
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.repository import HEADER, Repository, change_key
from synvirt.repository.session import Session
from synvirt.repository.verify import verify_point, verify_repository
from tests.backups.peers import Peer
from tests.fakes.disks import MemoryReader
from tests.repository.folders import MemoryFolder
from tests.repository.points import KEY, back_up, disk, opened, restored

MIB = 1 << 20


def _memory(_: Path) -> Iterator[Folder]:
    yield MemoryFolder()


def _directory(home: Path) -> Iterator[Folder]:
    yield HostFolder(home)


def _peer(home: Path) -> Iterator[Folder]:
    with Peer(home).served() as peer:
        yield peer.opened()


@pytest.fixture(params=[_memory, _directory, _peer], ids=["memory", "directory", "peer"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    make: Callable[[Path], Iterator[Folder]] = request.param
    yield from make(tmp_path)


def _noise(chunks: int) -> MemoryReader:
    found = disk("AAAA" * chunks)
    found.content = Random(4).randbytes(len(found.content))
    return found


def test_a_file_that_does_not_fit_leaves_no_part_of_it(folder: Folder) -> None:
    """It stayed for a week, each try left another one, and a full disk had less and less space for the next."""
    folder.make_folders([UNFINISHED, "packs"])

    def pieces() -> Iterator[bytes]:
        yield bytes(MIB)
        raise RepositoryFull("No space left on device")

    with pytest.raises(RepositoryFull):
        put(folder, "packs/one", pieces())
    assert folder.entries(UNFINISHED) == folder.entries("packs") == []


def test_a_full_file_system_is_reported_as_a_full_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that did not fit has a name that was drawn, and helps nobody."""
    folder = HostFolder(tmp_path)
    folder.make_folders([UNFINISHED, "packs"])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("synvirt.repository.folder._write_all", full)
    with pytest.raises(RepositoryFull) as failed:
        put(folder, "packs/one", [b"a pack"])
    assert failed.value.detail == "the repository is full: a new file cannot be written: No space left on device"
    assert failed.value.hint is not None
    assert failed.value.hint.startswith("free space there")


def test_points_are_stored_found_verified_and_restored(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 2 * CHUNK_BYTES)
    repository = opened(folder, new=True)
    noise = _noise(5)
    points = {back_up(repository, noise, disk("A-B")): [noise.content, disk("A-B").content]}
    points[back_up(repository, disk("AABB"))] = [disk("AABB").content]
    again = Repository(folder, KEY)
    assert set(again.point_ids()) == set(points)
    for point, contents in points.items():
        assert restored(again, point) == contents
        assert verify_point(again, point).wrong is None
    report = verify_repository(again)
    assert (report.wrongs, report.points) == ((), 2)
    assert report.packs >= 4
    third = Session(again)
    back_up(again, noise, session=third)
    assert (third.new_bytes, third.stored_bytes) == (0, 0)


def test_the_laws_of_the_calls(folder: Folder) -> None:
    assert folder.entries("") == []
    repository = opened(folder, new=True)
    assert [entry.name for entry in folder.entries("")] == ["condemned", "keys", "packs", "points", HEADER, "tmp"]
    assert folder.entries("packs") == []
    back_up(repository, disk("AAAABBBB"))
    (pack,) = folder.entries("packs")
    assert abs(folder.clock() - pack.modified_at) < 60  # a peer says whole seconds, and renews its date once a second
    whole = folder.read(f"packs/{pack.name}")
    assert len(whole) == pack.size_bytes
    assert f"{blake3(whole).hexdigest()}.pack" == pack.name
    assert folder.read(f"packs/{pack.name}", 5, 11) == whole[5:16]
    assert folder.read(f"packs/{pack.name}", 5, 0) == b""
    assert folder.read(f"packs/{pack.name}", len(whole) - 3) == whole[-3:]
    with pytest.raises(RepositoryDamaged, match="ends"):
        folder.read(f"packs/{pack.name}", len(whole) - 3, 4)
    put(folder, f"packs/{pack.name}", [whole[:9], memoryview(whole)[9:]])  # there is no harm in sending it again
    assert folder.entries("packs") == [pack] or folder.entries("packs")[0].size_bytes == pack.size_bytes
    line = f"{'0' * 64}.pack\n".encode()
    listed = f"condemned/{blake3(line).hexdigest()}"
    put(folder, listed, [line])
    assert folder.read(listed) == line
    for _ in range(2):
        folder.delete(listed)
    with pytest.raises(RepositoryDamaged, match="missing"):
        folder.read(listed)
    assert folder.entries("tmp") == []


def test_what_nothing_needs_is_collected(folder: Folder) -> None:
    repository = opened(folder, new=True)
    noise, part = _noise(4), disk("AAAA")
    part.content = noise.content[: len(part.content)]
    gone, stays = back_up(repository, noise), back_up(repository, part)
    now = folder.entries("packs")[0].modified_at + YOUNG_S + 60
    repository.remove(gone)
    assert collect(repository, now=now).bytes_moved > 0
    now = max(entry.modified_at for entry in folder.entries("condemned")) + GRACE_S + 60
    assert collect(repository, now=now).packs_deleted == 1
    assert restored(Repository(folder, KEY), stays) == [part.content]
    assert sum(entry.size_bytes for entry in folder.entries("packs")) < 2 * CHUNK_BYTES


def test_a_place_that_is_no_folder_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to("nothing")
    for name, message in (
        ("file", "is there, and is no folder"),
        ("gone", "is there, and is no folder"),
        ("x", "there is no folder"),
    ):
        with pytest.raises(RepositoryUnreachable, match=message):
            HostFolder(tmp_path / name)


def test_a_place_that_is_away_during_a_verification_damages_no_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs that were found damaged are condemned: a server that was restarted meanwhile made a repository store all again."""
    home = tmp_path / "home"
    home.mkdir()
    repository = opened(HostFolder(home), new=True)
    back_up(repository, _noise(2))
    really = os.pread

    def stale(descriptor: int, length: int, offset: int) -> bytes:
        if length >= CHUNK_BYTES:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return really(descriptor, length, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", stale)
        with pytest.raises(RepositoryUnreachable):
            verify_repository(repository)
    (home / packs.FOLDER).rename(home / "elsewhere")
    with pytest.raises(RepositoryUnreachable):
        HostFolder(home).read(f"{packs.FOLDER}/{'0' * 64}.pack")
    (home / "elsewhere").rename(home / packs.FOLDER)
    with pytest.raises(RepositoryDamaged, match="is missing"):
        HostFolder(home).read(f"{packs.FOLDER}/{'0' * 64}.pack")
    assert verify_repository(repository).wrongs == ()


def test_a_folder_whose_file_system_is_not_mounted_is_no_damage(tmp_path: Path) -> None:
    """A repository may be at the mount point itself: then the folder is there, and empty. Nothing is made in it."""
    home, empty = tmp_path / "home", tmp_path / "empty"
    home.mkdir()
    empty.mkdir()
    repository = opened(HostFolder(home), new=True)
    (home / "repository").rename(tmp_path / "header")
    with pytest.raises(RepositoryDamaged, match=f"{HEADER} is missing"):
        Repository(HostFolder(home), KEY)
    (tmp_path / "header").rename(home / "repository")
    home.rename(tmp_path / "away")
    empty.rename(home)
    works: list[Callable[[], object]] = [
        lambda: Repository(HostFolder(home), KEY),
        lambda: back_up(repository, _noise(2)),
        lambda: change_key(HostFolder(home), KEY, bytes(32)),
    ]
    for work in works:
        with pytest.raises(RepositoryUnreachable, match=f"cannot be reached in the repository's folder {home}") as caught:
            work()
        assert caught.value.hint == "mount what the folder should hold; then run it again"
        assert not caught.value.detail.startswith(UNFINISHED)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO])
def test_a_file_that_cannot_be_written_has_no_drawn_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    folder = HostFolder(tmp_path)
    folder.make_folders([UNFINISHED, packs.FOLDER])

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(StoreWriteFailed, match=r"^a new file.*: (Read-only file system|Input/output error)$") as caught:
            put(folder, "packs/x", [b"x"])
    assert ("mount it for writing" in str(caught.value.hint)) is (number == errno.EROFS)


@pytest.mark.parametrize("is_away", [True, False])
def test_an_error_of_the_whole_mount_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_away: bool) -> None:
    """A soft mount whose server is away gives the error of a bad sector."""
    repository = opened(HostFolder(tmp_path), new=True)
    back_up(repository, _noise(2))

    def unread(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", unread)
    if is_away:
        monkeypatch.setattr(os, "statvfs", unread)
    (pack,) = (tmp_path / packs.FOLDER).iterdir()
    with pytest.raises(StoreWriteFailed if is_away else RepositoryDamaged, match="Input/output error"):
        repository.folder.read(f"{packs.FOLDER}/{pack.name}")


def test_a_host_that_can_open_no_more_files_finds_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = opened(HostFolder(tmp_path), new=True)
    back_up(repository, _noise(2))
    really = os.open

    def none_left(path: object, *others: Any, **named: Any) -> int:
        if str(path).endswith(".pack"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really(path, *others, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", none_left)
    with pytest.raises(StoreWriteFailed, match="Too many open files"):
        verify_repository(repository)
