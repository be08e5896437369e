"""Restores and a boot test by a libvirtd, as the appliance has one: it opens sockets and files as another process than ours."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from synvirt.hypervisor.libvirt_host import LibvirtHost
from tests.real.backups.restores import Room
from tests.real.guests import WRITES, boot_sector
from tests.servers.libvirt_lab import LibvirtLab, lab

XML = """<domain type='qemu'><name>x</name><uuid>3f1b7c1a-6e55-4a53-9bf5-5f3a5a8f2f11</uuid><memory unit='MiB'>64</memory>
<vcpu>1</vcpu><os><type arch='x86_64' machine='q35'>hvm</type></os><devices>
<disk type='file'><driver name='qemu' type='raw'/><source file='/gone'/><target dev='vda' bus='virtio'/></disk>
<interface type='network'><source network='no-such-network'/><model type='virtio'/></interface></devices></domain>"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[LibvirtLab]:
    with lab(boots=True) as running:
        yield running


@pytest.mark.timeout(300)
def test_a_point_boots_and_becomes_a_domain_of_a_libvirtd(daemon: LibvirtLab) -> None:
    uri = f"qemu+unix:///system?socket={daemon.socket}"
    folder = daemon.folder / "r"  # a Unix socket lies below it
    (folder / "libvirt/serial").mkdir(parents=True)  # of the host's own libvirtd it is virtlogd's
    with closing(LibvirtHost(uri, folder, boot_activity_s=6)) as host, closing(Room(host, folder, folder, uri=uri)) as room:
        point = room.point(XML, {"vda": boot_sector(Path(folder, "disk.raw"), WRITES)})
        run = room.ended(room.backups.boot_test(point.id))
        assert run.error is None, run.error
        found = room.backups.points.get(point.id).boot_test
        assert found is not None
        assert (found.result, found.sign) == ("booted", "activity")
        assert room.names() == set()
        assert list(room.scratch().iterdir()) == []
        run = room.restored(point, target="new_domain", name="restored")
        assert run.error is None, run.error
        assert "the network no-such-network" in run.warnings[0].message
        assert room.names() == {"restored"}
