"""Volumes in a folder, on the file systems that a host may have."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from synvirt.destinations.directory import DirectoryDestination
from synvirt.errors import DiskWriteFailed
from tests.contracts.destinations import SIZE, DestinationCase, DestinationContract, read, write
from tests.needs import need, need_root

MIB = 1 << 20
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
        subprocess.run([need(f"mkfs.{kind}", f"{kind}progs"), "-q", image], check=True)
        source, options = str(image), ["-o", "loop"]
    folder = tmp_path / "mounted"
    folder.mkdir()
    subprocess.run(["mount", "-t", kind, *options, source, folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def case_in(folder: Path, *, protects: bool) -> DestinationCase:
    folder.mkdir(exist_ok=True)
    return DestinationCase(
        destination=DirectoryDestination(folder),
        another=lambda: DirectoryDestination(folder),
        volumes=lambda: [str(path) for path in folder.rglob("*") if path.is_file()],
        protects=protects,
    )


@pytest.mark.parametrize("mounted", ["tmpfs"], indirect=True)
class TestWithoutReflinks(DestinationContract):
    @pytest.fixture
    def case(self, mounted: Path) -> DestinationCase:
        return case_in(mounted / "volumes", protects=False)


@pytest.mark.parametrize("mounted", ["xfs"], indirect=True)
class TestWithReflinks(DestinationContract):
    @pytest.fixture
    def case(self, mounted: Path) -> DestinationCase:
        return case_in(mounted / "volumes", protects=True)


@pytest.mark.parametrize("mounted", ["xfs", "btrfs"], indirect=True)
def test_what_is_protected_takes_no_room(mounted: Path) -> None:
    destination = DirectoryDestination(mounted)
    name = destination.volume_name(uuid4(), "disk")
    destination.create(name, 64 * MIB)
    write(destination, name, 64 * MIB, 0, os.urandom(32 * MIB))
    before = destination.free_bytes()
    assert destination.protect(name)
    assert before - destination.free_bytes() < 4 * MIB


@pytest.mark.parametrize("mounted", ["xfs"], indirect=True)
def test_a_protection_that_was_cut_off_is_none(mounted: Path) -> None:
    """A kill between making the twin and giving it its name."""
    destination = DirectoryDestination(mounted)
    name = destination.volume_name(uuid4(), "disk")
    destination.create(name, SIZE)
    write(destination, name, SIZE, 0, b"now")
    Path(destination.device(name) + ".unfinished").write_bytes(b"half")
    with pytest.raises(DiskWriteFailed, match="not protected"):
        destination.roll_back(name)
    assert destination.protect(name)
    destination.roll_back(name)
    assert read(destination, name, 0, 3) == b"now"
    destination.destroy(name)
    assert list(mounted.iterdir()) == []


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
