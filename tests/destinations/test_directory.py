"""Volumes in a folder, on the file systems that a host may have."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from synvirt.destinations.directory import DirectoryDestination
from synvirt.errors import DiskWriteFailed
from tests.contracts.destinations import SIZE, DestinationCase, DestinationContract
from tests.fakes.clones import CopyingDirectory
from tests.needs import need, need_root

MIB = 1 << 20
PACKAGES = {"xfs": "xfsprogs", "btrfs": "btrfs-progs"}
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


@pytest.mark.parametrize("mounted", ["tmpfs", "xfs", "btrfs"], indirect=True)
class TestDestination(DestinationContract):
    @pytest.fixture
    def case(self, mounted: Path) -> DestinationCase:
        folder = mounted / "volumes"
        folder.mkdir()
        return DestinationCase(
            destination=DirectoryDestination(folder),
            another=lambda: DirectoryDestination(folder),
            volumes=lambda: [str(path) for path in folder.rglob("*") if path.is_file()],
        )


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
def test_whether_a_file_system_shares_bytes_is_tried(mounted: Path, *, shares: bool) -> None:
    assert (DirectoryDestination(mounted).why_no_clones() is None) is shares
    assert list(mounted.glob("[!l]*")) == []


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
