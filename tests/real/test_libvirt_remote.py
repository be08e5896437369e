"""libvirt_remote on a real libvirtd, by every transport: the laws of LiveAdapter, byte for byte."""

import random
from collections.abc import Iterator

import pytest

from synvirt.live.libvirt_remote import libvirt_remote
from synvirt.model import MIB
from tests.contracts.live import LiveCase, LiveContract
from tests.libvirt_lab import LibvirtLab, lab

TRANSPORTS = ("local", "ssh", "tls", "tcp")


@pytest.fixture(scope="module")
def host() -> Iterator[LibvirtLab]:
    with lab() as running:
        yield running


def case_of(host: LibvirtLab, transport: str) -> LiveCase:
    domain = host.domain(host.disk("8M"))
    domain.create()
    host.write(domain, "vda", MIB, random.Random(3).randbytes(2 * MIB))
    host.write(domain, "vda", 7 * MIB, b"the end of the disk is near")

    def lose_tracking() -> None:
        for checkpoint in domain.listAllCheckpoints(0):
            checkpoint.delete(0)

    return LiveCase(
        open=lambda: libvirt_remote(host.access(transport)),
        vm_id=domain.UUIDString(),
        content=lambda: host.content(domain, "vda"),
        write=lambda offset, data: host.write(domain, "vda", offset, data),
        snapshots=lambda: host.snapshots(domain),
        lose_tracking=lose_tracking,
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
class TestLibvirtRemote(LiveContract):
    @pytest.fixture
    def case(self, host: LibvirtLab, transport: str) -> LiveCase:
        return case_of(host, transport)
