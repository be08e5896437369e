"""Facts from disks that are no files or devices here: on an export's socket, and in a Ceph pool."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from uuid import uuid4

import pytest

from synvirt.destinations.rbd import RbdDestination
from synvirt.disks import open_writer
from synvirt.disks.nbd.server import NbdServer
from synvirt.disks.raw.files import RawReader
from synvirt.disks.rbd import spec_of
from synvirt.disks.specs import RbdPlace, RbdSpec
from synvirt.guests.inside.looker import opened_disk
from synvirt.guests.inside.looking import facts_of, loaders_of
from synvirt.guests.inside.opening import SERVED, by_socket, opened
from synvirt.model.facts import NOT_READ
from synvirt.sizes import KIB, MIB
from tests.guests.linux_trees import LINUX, planted
from tests.guests.test_inside import ext4
from tests.guests.test_loaders import SHIM, Image, image
from tests.running.forked_small import by_python
from tests.running.processes import until
from tests.servers import ceph

__all__ = ["image"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file system with a Linux."""
    made = tmp_path_factory.mktemp("made") / "root.img"
    ext4(made, planted(tmp_path_factory.mktemp("tree")))
    return made


@pytest.fixture
def serving() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def served(disk: Path, serving: ExitStack, folder: Path) -> str:
    reader = RawReader(str(disk))
    serving.callback(reader.close)
    server = NbdServer(reader)
    serving.callback(server.close)
    socket = folder / f"{disk.stem}.socket"
    server.listen(socket)
    return by_socket(str(socket))


def linux_of(found: dict[str, str]) -> dict[str, str]:
    return {name: found[name] for name in LINUX if name in found}


def test_an_export_is_read_as_the_disk_under_it(root: Path, image: Image, tmp_path: Path, serving: ExitStack) -> None:
    blank = tmp_path / "blank.img"
    blank.write_bytes(bytes(MIB))
    with by_python():
        found = facts_of([str(blank), served(root, serving, tmp_path)])
    assert found == facts_of([str(blank), str(root)])
    assert linux_of(found) == LINUX
    disk = image(SHIM)
    loaders = loaders_of([str(root), served(disk, serving, tmp_path)])
    assert [(one.number, one.path.lower()) for one in loaders] == [(1, r"\efi\debian\shimx64.efi")]


def test_any_bytes_of_an_export(tmp_path: Path, serving: ExitStack) -> None:
    drawn, content = Random(39), Random(7).randbytes(3 * MIB + 700)
    (tmp_path / "disk").write_bytes(content)
    [connection] = opened(served(tmp_path / "disk", serving, tmp_path), None, serving).descriptors
    disk = opened_disk(f"{SERVED}{os.dup(connection)}")
    serving.callback(disk.close)
    assert disk.size == len(content)
    for length in (1, 512, 64 * KIB, 64 * KIB + 1, 2 * MIB, 4 * MIB):
        for _ in range(20):
            at = drawn.randrange(len(content) + 10)
            assert disk.pread(length, at) == content[at : at + length], (length, at)


def test_an_export_that_is_gone_is_a_row_that_says_so(root: Path, tmp_path: Path, serving: ExitStack) -> None:
    place = served(root, serving, tmp_path)
    serving.close()
    assert facts_of([place]) == {f"{NOT_READ} disks": "they cannot be opened here"}
    assert loaders_of([place]) == []


@pytest.mark.timeout(300)
def test_an_image_in_a_pool_is_read_by_a_process_that_ends(root: Path, tmp_path: Path) -> None:
    with ceph.cluster() as conf:
        place = RbdPlace(conf=str(conf), client="admin", pool=ceph.POOL)
        destination = RbdDestination(place)
        name, size = destination.volume_name(uuid4(), "disk"), root.stat().st_size
        destination.create(name, size)
        writer = open_writer(destination.open(name, size))
        with root.open("rb") as file:
            while block := file.read(4 * MIB):
                writer.write(file.tell() - len(block), memoryview(block))
        writer.flush()
        writer.close()
        device = destination.device(name)
        assert spec_of(device) == RbdSpec(place=place, image=name)
        with by_python():
            found = facts_of([device])
        assert found == facts_of([str(root)])
        assert linux_of(found) == LINUX
        absent = destination.device(destination.volume_name(uuid4(), "disk"))
        [(what, why)] = facts_of([absent]).items()
        assert what == f"{NOT_READ} disks"
        assert "the volume" in why
        assert loaders_of([absent]) == []
        until(lambda: not processes("synvirt.guests.inside.pool", name))


def processes(*words: str) -> list[str]:
    """Those that have all these words in their command."""
    found = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            command = one.read_bytes().decode(errors="replace")
            found += [command] if all(word in command for word in words) else []
    return found


def test_a_name_of_another_kind_is_no_image_in_a_pool() -> None:
    place = RbdPlace(conf="/etc/a:b/ceph.conf", client="x", pool="vms")
    device = RbdDestination(place).device(f"synvirt.{uuid4()}.disk")
    assert spec_of(device).place == place
    for wrong in ("rbd:vms/x", "nbd:vms/x:id=a:conf=/c", "rbd:vms/x:conf=/c:id=a"):
        with pytest.raises(ValueError, match=r"no name|unpack|is not a name"):
            spec_of(wrong)
