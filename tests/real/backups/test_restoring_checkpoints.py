"""Restores in place of a guest with checkpoints on real libvirt: what is left of them in images that were not restored."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from synvirt.backups.sources import bitmap
from synvirt.backups.sources.bitmap import delete_checkpoint
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.live.libvirt.manifest import data_disks, parse
from synvirt.programs import ProgramFailed
from tests.needs import need
from tests.real.backups.restores import Room

XML = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>
<disk type='file'><driver name='qemu' type='qcow2'/><source file='{folder}/vda.qcow2'/><target dev='vda'/></disk>
<disk type='file'><driver name='qemu' type='qcow2'/><source file='{folder}/vdb.qcow2'/><target dev='vdb'/></disk>
</devices></domain>"""
CHECKPOINT = """<domaincheckpoint><name>{name}</name><disks><disk name='vda' checkpoint='bitmap'/>
<disk name='vdb' checkpoint='bitmap'/></disks></domaincheckpoint>"""
CLOSED = 1  # VIR_DOMAIN_DESTROY_GRACEFUL: QEMU closes its images


@pytest.fixture
def room(host: LibvirtHost, data_dir: Path, tmp_path: Path) -> Iterator[Room]:
    made = Room(host, data_dir, tmp_path)
    yield made
    made.close()


def bitmaps(image: Path) -> list[str]:
    told = json.loads(
        subprocess.run(["qemu-img", "info", "-U", "--output=json", image], check=True, capture_output=True).stdout
    )
    return [one["name"] for one in told["format-specific"]["data"].get("bitmaps", [])]


@pytest.mark.parametrize("disks", [("vda",), ()], ids=["one disk", "all disks"])
def test_checkpoints_go_with_their_bitmaps_in_the_disks_that_are_not_restored(room: Room, disks: tuple[str, ...]) -> None:
    """Nobody would know of them, and each costs the guest time with every write."""
    folder, uuid, name = room.folder / "images", uuid4(), f"checkpoints-{uuid4().hex[:8]}"
    then = folder / "then.raw"
    then.write_bytes(b"then".ljust(1 << 20, b"x"))
    for target in ("vda", "vdb"):
        convert = [need("qemu-img", "qemu-utils"), "convert", "-f", "raw", "-O", "qcow2"]
        subprocess.run([*convert, then, folder / f"{target}.qcow2"], check=True)
    domain = room.connection.use().defineXML(XML.format(name=name, uuid=uuid, folder=folder))
    point = room.point(domain.XMLDesc(0), {"vda": then, "vdb": then}, vm_id=uuid, vm_name=name)
    domain.create()
    for number in (1, 2):
        domain.checkpointCreateXML(CHECKPOINT.format(name=f"synvirt-abc-{number}"), 0)
    domain.destroyFlags(CLOSED)
    paths = {target: folder / f"{target}.qcow2" for target, _ in data_disks(parse(domain.XMLDesc(0)))}
    both = ["synvirt-abc-1", "synvirt-abc-2"]
    assert {target: sorted(bitmaps(path)) for target, path in paths.items()} == {"vda": both, "vdb": both}
    run = room.restored(point, target="in_place", disks=disks)
    assert (run.status, run.error) == ("completed", None)
    domain = room.connection.use().lookupByUUIDString(str(uuid))
    assert domain.listAllCheckpoints(0) == []
    assert {target: bitmaps(path) for target, path in paths.items()} == {"vda": [], "vdb": []}
    domain.create()  # it starts with what it has now


def test_a_checkpoint_goes_from_the_disks_that_have_it_though_one_was_replaced(room: Room) -> None:
    """Its guest runs: it was started on a restored disk before the restore had removed its checkpoints."""
    folder, uuid = room.folder / "images", uuid4()
    create = [need("qemu-img", "qemu-utils"), "create", "-q", "-f", "qcow2"]
    paths = {target: folder / f"{target}.qcow2" for target in ("vda", "vdb")}
    for path in paths.values():
        subprocess.run([*create, path, "8M"], check=True)
    domain = room.connection.use().defineXML(XML.format(name=f"checkpoints-{uuid.hex[:8]}", uuid=uuid, folder=folder))
    domain.create()
    for name in ("synvirt-abc-1", "synvirt-def-2", "synvirt-abc-3"):
        domain.checkpointCreateXML(CHECKPOINT.format(name=name), 0)
    domain.destroyFlags(CLOSED)
    subprocess.run([*create, folder / "new", "8M"], check=True)
    (folder / "new").replace(paths["vda"])
    domain.create()
    for gone, left in (("synvirt-abc-1", ["synvirt-abc-3", "synvirt-def-2"]), ("synvirt-abc-3", ["synvirt-def-2"])):
        delete_checkpoint(domain, gone)
        assert sorted(one.getName() for one in domain.listAllCheckpoints(0)) == left
        domain.destroyFlags(CLOSED)
        assert {target: sorted(bitmaps(path)) for target, path in paths.items()} == {"vda": [], "vdb": left}
        domain.create()
    domain.checkpointCreateXML(CHECKPOINT.format(name="synvirt-abc-4"), 0)
    delete_checkpoint(domain, "synvirt-def-2")
    delete_checkpoint(domain, "synvirt-abc-4")
    domain.destroyFlags(CLOSED)
    assert [bitmaps(path) for path in paths.values()] == [[], []]
    assert domain.listAllCheckpoints(0) == []


def test_a_checkpoint_stays_known_while_its_bitmap_cannot_be_removed(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guest was just being started, or qemu-img was killed. The bitmap stayed forever, and nobody knew of it."""
    image, uuid, first = room.folder / "images" / "vda.qcow2", uuid4(), "synvirt-abc-1"
    for path in (image, image.with_name("vdb.qcow2")):
        create = [need("qemu-img", "qemu-utils"), "create", "-q", "-f", "qcow2", str(path), "8M"]
        subprocess.run(create, check=True)
    domain = room.connection.use().defineXML(XML.format(name=f"checkpoints-{uuid.hex[:8]}", uuid=uuid, folder=image.parent))
    domain.create()
    domain.checkpointCreateXML(CHECKPOINT.format(name=first), 0)
    domain.destroyFlags(CLOSED)
    with subprocess.Popen([need("qemu-io", "qemu-utils"), image], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.read(1)  # it asks what to do: the image is open
        with pytest.raises(ProgramFailed, match="lock"):
            delete_checkpoint(domain, first)
        holder.communicate()
    with monkeypatch.context() as patched:
        patched.setattr(bitmap, "image_tool", lambda *_, **__: ["sh", "-c", "kill -9 $$"])
        with pytest.raises(ProgramFailed, match="qemu-img was ended by SIGKILL"):
            delete_checkpoint(domain, first)
    assert [one.getName() for one in domain.listAllCheckpoints(0)] == bitmaps(image) == [first]
    delete_checkpoint(domain, first)
    assert (domain.listAllCheckpoints(0), bitmaps(image)) == ([], [])
