"""A host to restore guests on that has a hypervisor in memory."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.backups.restores import in_place, present
from synvirt.backups.restores.host import RestoreHost
from synvirt.destinations import Destination
from synvirt.destinations.directory import DirectoryDestination
from synvirt.jobs.exports import Exports
from synvirt.kvm.connection import Connection
from tests.fakes.exports import FakeExports
from tests.fakes.hypervisor import FakeHypervisor

# A guest of one disk, as FakeGuests has them.
XML = """<domain type='qemu'><name>web</name><uuid>6b3f5f0a-2c1c-4f0e-9d3c-0d7e4ff3a111</uuid><memory unit='MiB'>64</memory>
<vcpu>1</vcpu><os><type arch='x86_64' machine='q35'>hvm</type></os><devices><disk type='file' device='disk'>
<driver name='qemu' type='raw'/><source file='/images/web'/><target dev='vda' bus='virtio'/></disk></devices></domain>"""


class FakeRestoreHost(RestoreHost):
    """Its domains are those of the fake hypervisor."""

    def domain(self, lookup: str, key: str) -> Any | None:
        assert isinstance(self.hypervisor, FakeHypervisor)
        for uuid, found in self.hypervisor.domains.items():
            if key == {"lookupByName": found.domain.name, "lookupByUUIDString": str(uuid)}[lookup]:
                return SimpleNamespace(isActive=lambda found=found: found.running)
        return None


def restore_host_of(
    folder: Path, hypervisor: FakeHypervisor, *, exports: Exports | None = None, destination: Destination | None = None
) -> RestoreHost:
    """`folder` gets `volumes` and `instant`."""
    (folder / "volumes").mkdir(exist_ok=True)
    return FakeRestoreHost(
        hypervisor=hypervisor,
        connection=Connection("qemu:///embed?root=/nowhere", lambda: None),
        destinations={"here": destination or DirectoryDestination(folder / "volumes")},
        tpm_folder=lambda: folder / "tpm",
        scratch=lambda: folder / "scratch",
        screens=folder / "screens",
        boot_timeout_s=1,
        alone=lambda vm_id, stop: nullcontext(),
        exports=exports or FakeExports(folder / "instant"),
    )


def as_a_volume(monkeypatch: pytest.MonkeyPatch, zfs: Callable[..., object]) -> None:
    """Devices are the zfs volume tank/volume, of a pool with room. `zfs` takes the commands of a restore in place."""
    pool = SimpleNamespace(properties=lambda *_: {"available": str(1 << 40), "refcompressratio": "1.00"})
    monkeypatch.setattr(present, "Zfs", lambda: pool)
    monkeypatch.setattr(present, "zfs_volume", lambda path: "tank/volume")
    monkeypatch.setattr(in_place, "Zfs", lambda: zfs)
