"""Restores in place on real libvirt: what is not as it should be, and what an operator does while its disks are copied."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from synvirt.backups.working import Copying
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.jobs.orders import DiskOrder
from tests.real.backups.restores import Room

XML = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>
<disk type='file'><driver name='qemu' type='raw'/><source file='{path}'/><target dev='vda'/></disk></devices></domain>"""


@pytest.fixture
def room(host: LibvirtHost, data_dir: Path, tmp_path: Path) -> Iterator[Room]:
    made = Room(host, data_dir, tmp_path)
    yield made
    made.close()


def test_a_guest_that_is_renamed_meanwhile_keeps_its_new_name(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """libvirt refuses a definition of its UUID by another name: its disks were replaced by then, and the rest never was."""
    path, uuid, copy = room.folder / "images/vda.raw", uuid4(), Copying.copy
    old, new = f"old-{uuid.hex[:8]}", f"new-{uuid.hex[:8]}"
    path.write_bytes(b"then" * 1024)
    definition = XML.format(name=old, uuid=uuid, path=path)
    domain = room.connection.use().defineXML(definition.replace("64</memory>", "96</memory>"))
    point = room.point(definition, {"vda": path}, vm_id=uuid, vm_name=old)
    path.write_bytes(b"now")

    def renamed_then(copying: Copying, order: DiskOrder) -> None:
        copy(copying, order)
        domain.rename(new)

    monkeypatch.setattr(Copying, "copy", renamed_then)
    run = room.restored(point, target="in_place")
    assert (run.status, run.error) == ("completed", None)
    assert run.domain is not None
    assert (run.domain.name, path.read_bytes()) == (new, b"then" * 1024)
    found = room.connection.use().lookupByUUIDString(str(uuid))
    assert (found.name(), found.info()[1]) == (new, 64 * 1024)
    assert room.store.ledgers.owned("run", host="local") == []
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_the_disks_of_one_file_system_share_its_room(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them alone has room: the restore failed when the first was copied."""
    paths, uuid = [room.folder / "images" / name for name in ("vda.raw", "vdb.raw")], uuid4()
    more = f"<disk type='file'><source file='{paths[1]}'/><target dev='vdb'/></disk></devices>"
    definition = XML.format(name=f"room-{uuid.hex[:8]}", uuid=uuid, path=paths[0]).replace("</devices>", more)
    for path in paths:
        path.write_bytes(b"then" * 1024)
    room.connection.use().defineXML(definition)
    point = room.point(definition, dict(zip(("vda", "vdb"), paths, strict=True)), vm_id=uuid)
    for path in paths:
        path.write_bytes(b"now")
    free = [8191]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    run = room.restored(point, target="in_place")
    assert run.error is not None
    assert (run.error.code, run.progress.bytes_done) == ("E_BAK_DISK_WRITE_FAILED", 0)
    assert "disk vda and vdb would be written beside what is there now: that needs 8192 bytes" in run.error.message
    assert {path.name: path.read_bytes() for path in paths[0].parent.iterdir()} == dict.fromkeys(("vda.raw", "vdb.raw"), b"now")
    free[0] += 1
    run = room.restored(point, target="in_place")
    assert (run.status, run.error) == ("completed", None)
    assert [path.read_bytes() for path in paths] == [b"then" * 1024] * 2
