"""Volumes in a folder, on the file systems that a host may have."""

import errno
import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from synvirt.destinations import DestinationAway, overlays
from synvirt.destinations.directory import DirectoryDestination
from synvirt.disks.specs import AsideWriterSpec
from synvirt.errors import DiskWriteFailed
from tests.contracts.destinations import SIZE, DestinationCase, DestinationContract, read, write
from tests.fakes.clones import CopyingDirectory
from tests.needs import need, need_root

MIB = 1 << 20
PACKAGES = {"xfs": "xfsprogs", "btrfs": "btrfs-progs", "ext4": "e2fsprogs"}
# The least that mkfs.xfs makes.
IMAGE_BYTES = 320 * MIB


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new, empty file system of the kind that the test names."""
    need_root("mount")
    kind = request.param
    if kind == "tmpfs":
        source, options = "tmpfs", ["-o", "size=64m"]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        subprocess.run([need(f"mkfs.{kind}", PACKAGES[kind]), "-q", image], check=True)
        source, options = str(image), ["-o", "loop"]
    folder = tmp_path / "mounted"
    folder.mkdir()
    subprocess.run(["mount", "-t", kind, *options, source, folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("mounted", ["tmpfs", "ext4", "xfs", "btrfs"], indirect=True)
class TestDestination(DestinationContract):
    @pytest.fixture
    def case(self, mounted: Path) -> DestinationCase:
        folder = mounted / "volumes"
        folder.mkdir()
        return DestinationCase(
            destination=DirectoryDestination(folder),
            another=lambda: DirectoryDestination(folder),
            volumes=lambda: volumes(folder),
        )


def volumes(folder: Path) -> list[str]:
    """Volumes and clones. What is kept beside a volume is never without it."""
    found = {path for path in folder.rglob("*") if path.is_file()}
    kept = {path for path in found if path.name.startswith(".")}
    for path in kept:
        assert any(path.name.startswith(f".{one.name}.") and path.parent == one.parent for one in found - kept), path
    return [str(path) for path in found - kept]


class TestTheFakeThatCopies(DestinationContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> DestinationCase:
        folder = tmp_path / "volumes"
        folder.mkdir()
        return DestinationCase(
            destination=CopyingDirectory(folder),
            another=lambda: CopyingDirectory(folder),
            volumes=lambda: [str(path) for path in folder.rglob("*") if path.is_file()],
        )


@pytest.mark.parametrize(("mounted", "shares"), [("tmpfs", False), ("xfs", True), ("btrfs", True)], indirect=["mounted"])
def test_whether_a_file_system_shares_bytes_is_tried(mounted: Path, monkeypatch: pytest.MonkeyPatch, *, shares: bool) -> None:
    assert DirectoryDestination(mounted).why_no_clones() is None
    monkeypatch.setattr(overlays, "find", lambda program: None)
    assert (DirectoryDestination(mounted).why_no_clones() is None) is shares
    assert list(mounted.glob("[!l]*")) == []


def test_no_overlays_where_the_lock_of_the_copy_is_the_lock_of_qemu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS: a rehearsal would stop the copy."""
    assert overlays.why_none(tmp_path) is None

    def refuse(*_: object) -> None:
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert "lock" in (overlays.why_none(tmp_path) or "")
    assert list(tmp_path.iterdir()) == []


def test_a_clone_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = DirectoryDestination(tmp_path)
    name, to = (destination.volume_name(uuid4(), "disk") for _ in range(2))
    destination.create(name, SIZE)

    def refuse(*_: object) -> None:
        raise DiskWriteFailed("no space left")

    monkeypatch.setattr(DirectoryDestination, "_shares", lambda *_: False)
    monkeypatch.setattr(overlays, "make", refuse)
    with pytest.raises(DiskWriteFailed, match="no space left"):
        destination.clone(name, to)
    assert volumes(tmp_path) == [str(tmp_path / name)]


def test_nothing_that_is_kept_beside_a_volume_is_taken_for_another_ones(tmp_path: Path) -> None:
    """Labels are chosen by people, and may look like names that are ours."""
    destination, job, rehearsal = DirectoryDestination(tmp_path), uuid4(), uuid4()
    labels = ("a", f"a.raw.{rehearsal}.held", "a.raw.aside", "a.raw.marks", f".a.raw.{rehearsal}.held")
    names = [destination.volume_name(job, label) for label in labels]
    for name in names:
        destination.create(name, SIZE)
    clones = [destination.volume_name(rehearsal, label) for label in labels]
    for name, clone in zip(names, clones, strict=True):
        destination.clone(name, clone)
        write(destination, name, SIZE, 0, name.encode())
    for name, clone in zip(names, clones, strict=True):
        destination.unclone(name, clone)
        assert len(volumes(tmp_path)) == len(labels) + len(labels) - names.index(name) - 1
        others = names[names.index(name) + 1 :]
        assert [isinstance(spec := destination.open(other, SIZE), AsideWriterSpec) and not spec.folds for other in others] == [
            True
        ] * len(others)
        assert read(destination, name, 0, len(name)) == name.encode()


def test_a_volume_that_was_made_is_there_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watermarks are in the store, which is durable: they would be of a file that is gone."""
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    made = DirectoryDestination(tmp_path)
    name = made.volume_name(uuid4(), "disk")
    made.create(name, 4096)
    volume = tmp_path / name
    assert synced == [volume, volume.parent, tmp_path]


def test_a_volume_that_was_removed_is_gone_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ledger entry is gone: nobody would remove it a second time."""
    made, job = DirectoryDestination(tmp_path), uuid4()
    first, second = (made.volume_name(job, label) for label in ("one", "two"))
    for name in (first, second):
        made.create(name, 4096)
    synced: list[tuple[Path, list[str]]] = []

    def fsync(descriptor: int) -> None:
        folder = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((folder, [path.name for path in folder.iterdir()]))

    monkeypatch.setattr(os, "fsync", fsync)
    for name in (first, second):
        made.destroy(name)
    assert synced == [(Path(tmp_path / first).parent, [Path(second).name]), (tmp_path, [])]


def test_the_last_two_volumes_of_a_job_are_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder goes while the second one looks into it."""
    destination = DirectoryDestination(tmp_path)
    name = destination.volume_name(uuid4(), "disk")
    destination.create(name, SIZE)
    volume = tmp_path / name
    listed = os.listdir

    def late(folder: Path) -> list[str]:
        if Path(folder) == volume.parent:
            volume.parent.rmdir()
        return listed(folder)

    monkeypatch.setattr(os, "listdir", late)
    destination.destroy(name)
    assert listed(tmp_path) == []


def test_a_link_in_place_of_a_volume_is_not_followed(tmp_path: Path) -> None:
    destination = DirectoryDestination(tmp_path / "volumes")
    name = destination.volume_name(uuid4(), "disk")
    victim = tmp_path / "victim"
    victim.write_bytes(b"")
    path = Path(destination.device(name))
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    with pytest.raises(DiskWriteFailed):
        destination.create(name, SIZE)
    assert victim.stat().st_size == 0


def test_another_user_gets_through_to_a_volume_that_is_its_own_and_lists_nothing(tmp_path: Path) -> None:
    """As a libvirtd's QEMU does; the service's umask is narrow."""
    need_root("another user")
    folder = tmp_path / "volumes"
    folder.mkdir(mode=0o751)
    for above in (folder, *folder.parents):
        above.chmod(above.stat().st_mode | 0o001)
    before = os.umask(0o027)
    try:
        destination = DirectoryDestination(folder)
        name = destination.volume_name(uuid4(), "disk")
        destination.create(name, MIB)
    finally:
        os.umask(before)
    path = Path(destination.device(name))
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
    assert subprocess.run([*as_nobody, "cat", path], capture_output=True).returncode != 0
    os.chown(path, 65534, -1)  # as libvirtd does when the guest starts
    assert subprocess.run([*as_nobody, "cat", path], stdout=subprocess.DEVNULL).returncode == 0
    assert subprocess.run([*as_nobody, "ls", path.parent], capture_output=True).returncode != 0


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ESTALE, errno.EIO])
def test_a_mount_whose_server_is_gone_is_away_and_stops_no_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A look at it raises, as nothing can be said of the folder: neither that it is mounted nor that it is not."""

    def stale(_: Path) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "is_mount", stale)
    destination = DirectoryDestination(tmp_path / "volumes", mount_point=tmp_path)
    assert destination.why_away() is not None
    volume = destination.volume_name(uuid4(), "disk")
    works: list[Callable[[], object]] = [
        destination.free_bytes,
        lambda: destination.create(volume, SIZE),
        lambda: destination.destroy(volume),
    ]
    for work in works:
        with pytest.raises(DestinationAway, match=f"the file system at {tmp_path}, .* fails: {os.strerror(number)}"):
            work()


@pytest.mark.parametrize("mounted", ["tmpfs"], indirect=True)
def test_a_folder_that_is_mounted_read_only_says_so_before_anything_is_made(mounted: Path) -> None:
    """The list of destinations shows it, and a plan is refused with it."""
    destination = DirectoryDestination(mounted)
    assert destination.free_bytes() > 0
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    with pytest.raises(DiskWriteFailed, match=f"{mounted}, cannot be used: Read-only file system") as caught:
        destination.free_bytes()
    assert "mount it for writing" in str(caught.value.hint)
