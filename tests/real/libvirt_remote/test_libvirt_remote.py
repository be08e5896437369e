"""libvirt_remote on a real libvirtd, by every transport: the laws of LiveAdapter, byte for byte."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.live import KeepsUefiVariables
from synvirt.live.libvirt.adapter import libvirt_remote
from synvirt.live.libvirt.host import library
from synvirt.live.sessions import StaysLoggedIn
from synvirt.sizes import MIB
from tests.contracts.live import LiveCase, LiveContract
from tests.servers.libvirt_lab import LibvirtLab, lab

TRANSPORTS = ("local", "ssh", "tls", "tcp")


@pytest.fixture(scope="module")
def host() -> Iterator[LibvirtLab]:
    with lab() as running:
        yield running


@pytest.fixture(autouse=True)
def _no_guest_outlives_its_test(host: LibvirtLab) -> Iterator[None]:
    """Emulated, it takes some thousandths of a core even where it does nothing."""
    yield
    host.kill_all()


def case_of(host: LibvirtLab, transport: str) -> LiveCase:
    domain = host.domain(host.disk("8M"))
    domain.create()
    host.write(domain, "vda", MIB, random.Random(3).randbytes(2 * MIB))
    host.write(domain, "vda", 7 * MIB, b"the end of the disk is near")

    def lose_tracking() -> None:
        for checkpoint in domain.listAllCheckpoints(0):
            checkpoint.delete(0)

    def restart() -> None:
        """First it ends what holds the domain to be read."""
        if domain.isActive():
            host.kill(domain)
        domain.create()
        host.kill(domain)

    return LiveCase(
        open=lambda: libvirt_remote(host.access(transport)),
        vm_id=domain.UUIDString(),
        content=lambda: host.content(domain, "vda"),
        write=lambda offset, data: host.write(domain, "vda", offset, data),
        snapshots=lambda: host.snapshots(domain),
        lose_tracking=lose_tracking,
        restart=restart,
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
class TestLibvirtRemote(LiveContract):
    @pytest.fixture
    def case(self, host: LibvirtLab, transport: str) -> LiveCase:
        return case_of(host, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_connection_that_is_lost_at_rest_is_made_again(host: LibvirtLab, transport: str) -> None:
    name = host.domain(host.disk()).name()
    adapter = libvirt_remote(host.access(transport))
    assert isinstance(adapter, StaysLoggedIn)

    async def names() -> set[str]:
        return {row.name for row in await adapter.list_vms()}

    async def use() -> None:
        await adapter.connect()
        try:
            assert name in await names()
            await adapter.rest()
            host.stop_libvirtd()
            host.start_libvirtd()
            assert name in await names()
        finally:
            await adapter.close()

    asyncio.run(use())
    host.connection.lookupByName(name).undefine()


UEFI = """<domain type='qemu'><name>{name}</name><memory unit='MiB'>256</memory><vcpu>1</vcpu>
<os firmware='efi'><type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/></features>
<devices><emulator>/usr/bin/qemu-system-x86_64</emulator></devices></domain>"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_uefi_variables_are_read_where_libvirt_keeps_them(host: LibvirtLab, transport: str) -> None:
    """Its user need not be able to read the file itself: libvirtd hands it out."""
    domain = host.connection.defineXML(UEFI.format(name=f"uefi-{transport}"))
    pools = host.connection.listAllStoragePools(0)
    adapter = libvirt_remote(host.access(transport))
    assert isinstance(adapter, KeepsUefiVariables)

    async def read() -> bytes | None:
        await adapter.connect()
        try:
            return await adapter.uefi_variables(domain.UUIDString())
        finally:
            await adapter.close()

    assert asyncio.run(read()) is None, "it was never started"
    domain.create()
    running = asyncio.run(read())
    domain.destroy()
    off = asyncio.run(read())
    for kept in (running, off):
        assert kept is not None
        assert kept[40:44] == b"_FVH"
        assert len(kept) in {path.stat().st_size for path in Path("/usr/share/OVMF").glob("OVMF_VARS*.fd")}
    assert len(host.connection.listAllStoragePools(0)) == len(pools), "nothing of ours is left there"
    domain.undefineFlags(library().VIR_DOMAIN_UNDEFINE_NVRAM)


def test_a_bios_guest_has_no_variables(host: LibvirtLab) -> None:
    domain = host.domain(host.disk())
    adapter = libvirt_remote(host.access("local"))
    assert isinstance(adapter, KeepsUefiVariables)

    async def read() -> bytes | None:
        await adapter.connect()
        try:
            return await adapter.uefi_variables(domain.UUIDString())
        finally:
            await adapter.close()

    assert asyncio.run(read()) is None
    domain.undefine()
