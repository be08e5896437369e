"""Restores in place on real libvirt: what an operator does with the guest while its disks are copied."""

from collections.abc import Iterator
from pathlib import Path
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
