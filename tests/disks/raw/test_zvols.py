"""A volume whose link udev has taken away meanwhile: its device is found by the volume's name, and another's never."""

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from synvirt.backups.restores import present
from synvirt.disks import open_reader, open_writer
from synvirt.disks.raw import direct, files, zvols
from synvirt.disks.specs import BlockWriterSpec, RawSpec, written
from synvirt.errors import DiskWriteFailed, SourceUnsupported
from synvirt.jobs.caging import cage_of
from synvirt.jobs.copying_disks import exclusively
from synvirt.jobs.orders import CopyOrder, DiskOrder
from tests.devices import loop_device

MIB = 1 << 20
NAME = "tank/vms/disk"


@dataclass(frozen=True, slots=True)
class Host:
    """`link`: of the volume. `node`: its device, which the kernel calls zd16; zd0 is another volume's."""

    link: Path
    node: Path


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Loop devices that answer as volumes do."""
    for folder in ("block", "dev", "zvol/tank/vms"):
        (tmp_path / folder).mkdir(parents=True)
    backings = [tmp_path / name for name in ("zd0", "zd16")]
    for backing in backings:
        (tmp_path / "block" / backing.name).touch()
        backing.touch()
        os.truncate(backing, MIB)
    with loop_device(backings[0]) as another, loop_device(backings[1]) as device:
        for name, leads_to in (("zd0", another), ("zd16", device)):
            (tmp_path / "dev" / name).symlink_to(leads_to)
        names = {Path(another).stat().st_rdev: "tank/another", Path(device).stat().st_rdev: NAME}
        monkeypatch.setattr(zvols, "LINKS", f"{tmp_path}/zvol/")
        monkeypatch.setattr(zvols, "NODES", tmp_path / "dev")
        monkeypatch.setattr(zvols, "BLOCKS", tmp_path / "block")
        for module in (zvols, present):
            monkeypatch.setattr(module, "zvol_name", lambda descriptor: names[os.fstat(descriptor).st_rdev])
        link = tmp_path / "zvol" / NAME
        link.symlink_to(device)
        yield Host(link, tmp_path / "dev" / "zd16")


def test_a_link_leads_to_its_device(host: Host) -> None:
    assert zvols.device_of(str(host.link)) == str(host.node.resolve())


@pytest.mark.parametrize("path", ["/dev/sda", "tank/vms/disk", "/dev/zvol"])
def test_what_is_no_link_of_a_volume_is_left_alone(path: str) -> None:
    assert zvols.device_of(path) == path


def test_a_volume_without_its_link_is_found_by_its_name(host: Host) -> None:
    host.link.unlink()
    assert zvols.device_of(str(host.link)) == str(host.node)


def test_a_volume_that_is_not_there_is_no_other_one(host: Host) -> None:
    gone = host.link.with_name("gone")
    assert zvols.device_of(str(gone)) == str(gone)
    with pytest.raises(DiskWriteFailed, match="gone cannot be opened: No such file"):
        open_writer(BlockWriterSpec(path=str(gone), size_bytes=MIB))


def test_it_is_written_and_read_without_its_link(host: Host) -> None:
    host.link.unlink()
    spec = BlockWriterSpec(path=str(host.link), size_bytes=MIB)
    writer = open_writer(spec)
    writer.write(0, memoryview(b"mine".ljust(4096)))
    writer.flush()
    writer.close()
    reader, buffer = open_reader(written(spec)), bytearray(4)
    reader.read_into(0, memoryview(buffer))
    reader.close()
    assert buffer == b"mine"


def test_a_link_that_goes_while_it_is_opened_takes_no_direct_writes_away(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real = files.open_block_writer

    def opened(path: str, size: int) -> files.RawWriter:
        found = real(path, size)
        host.link.unlink()
        return found

    monkeypatch.setattr(direct, "open_block_writer", opened)
    monkeypatch.setattr(zvols, "BLOCKS", host.link.parent)
    writer = direct.open_direct_writer(str(host.link), MIB)
    writer.close()
    assert isinstance(writer, direct.DirectWriter)


def test_a_cage_lets_the_device_itself_be_opened(host: Host) -> None:
    """With the link and without it: it may go, and come, when the worker is in its cage already."""
    disk = DiskOrder(key="a", reader=RawSpec(path="/source"), writer=BlockWriterSpec(path=str(host.link), size_bytes=MIB))
    assert set(cage_of(CopyOrder(disks=(disk,))).writes) == {str(host.link), str(host.node.resolve())}
    host.link.unlink()
    cage = cage_of(CopyOrder(disks=(disk,)))
    assert set(cage.writes) == {str(host.link), str(host.node)}
    assert cage.reads == ("/source",)


def test_a_file_that_must_lie_under_a_folder_gives_no_device(host: Host, tmp_path: Path) -> None:
    (tmp_path / "imports").mkdir()
    reader = RawSpec(path=str(host.link), beneath=str(tmp_path / "imports"))
    disk = DiskOrder(key="a", reader=reader, writer=BlockWriterSpec(path="/volume", size_bytes=MIB))
    cage = cage_of(CopyOrder(disks=(disk,)))
    assert (cage.reads, cage.opened) == ((), ())


def test_a_restore_in_place_never_takes_a_volume_without_its_link_for_no_volume(host: Host) -> None:
    """It would make no snapshot of it, and so have no way back."""
    assert present.zfs_volume(str(host.link)) == NAME
    host.link.unlink()
    assert present.zfs_volume(str(host.link)) == NAME
    with pytest.raises(SourceUnsupported, match="gone cannot be opened"):
        present.zfs_volume(str(host.link.with_name("gone")))


def test_one_worker_writes_a_volume_whose_link_is_gone(host: Host) -> None:
    """The lock is the volume's, and so is that of a worker which finds the link again."""
    spec = BlockWriterSpec(path=str(host.link), size_bytes=MIB)
    device = host.link.resolve()
    host.link.unlink()
    with exclusively(spec), device.open("rb") as another, pytest.raises(BlockingIOError):
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
