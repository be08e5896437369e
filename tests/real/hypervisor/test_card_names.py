"""A Linux that sees its network cards where their names come from, on real QEMU."""

import re
import shutil
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.hypervisor import Volume
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.kvm import numbered_ports
from synvirt.migrations.landing import machine_of
from synvirt.model.machine import Disk, GuestOs, Nic, VmManifest
from synvirt.sample import build, disk
from synvirt.sizes import MIB
from tests.contracts.hypervisors import job, never
from tests.needs import lacking, need
from tests.real.guests import LOGIN

# What udev reads (systemd, udev-builtin-net_id.c): the cards' PCI addresses, and the addresses of slots.
SHOWS = """
for card in /sys/class/net/*/device; do
    echo "CARD $(cat ${card%device}address) $(basename $(readlink -f $card/..))"
done
for slot in /sys/bus/pci/slots/*; do echo "SLOT ${slot##*/} $(cat $slot/address)"; done
"""


def names(console: str) -> dict[str, str]:
    """By MAC address, what systemd calls each card: by the slot with a number at its address, else by the address."""
    slots = {address: name for name, address in re.findall(r"SLOT (\d+) ([0-9a-f:]+)", console) if name != "0"}
    found: dict[str, str] = {}
    for mac, address in re.findall(r"CARD (52:[0-9a-f:]+) ([0-9a-f:]+)\.0", console):
        bus, device = (int(part, 16) for part in address.split(":")[1:])
        found[mac] = f"ens{slots[address]}" if address in slots else f"enp{bus}s{device}"
    return found


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for program, package in (("syslinux", "syslinux"), ("mcopy", "mtools"), ("mke2fs", "e2fsprogs")):
        need(program, package)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "ROOT_INIT", disk.ROOT_INIT.split("while :; do")[0] + SHOWS + LOGIN)
        sample = build(tmp_path_factory.mktemp("image"), payload_mib=0, name="cards", keep_raw=True)
    assert sample.raw is not None
    return sample.raw


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("chipset", "wanted"),
    [
        ("pc", ("ens18", "ens3")),
        (None, ("ens192", "enp0s3", "enp5s0", "ens161")),
        ("q35", ("enp6s18", "enp2s0", "enp6s23")),
    ],
    ids=["i440fx", "q35", "bridges"],
)
def test_a_linux_names_its_cards_as_at_its_source(
    host: LibvirtHost, image: Path, tmp_path: Path, chipset: str | None, wanted: tuple[str, ...]
) -> None:
    if chipset is None and not numbered_ports.possible():
        lacking("needs libvirt 8.5")
    macs = [f"52:54:00:00:00:{number:02x}" for number in range(len(wanted))]
    manifest = VmManifest(
        vm_id="x",
        name=f"cards {chipset}",
        disks=(Disk(key="disk1", label="disk1", capacity_bytes=image.stat().st_size),),
        nics=tuple(Nic(key=name, mac=mac, linux_name=name) for name, mac in zip(wanted, macs, strict=True)),
        chipset=chipset,
        guest_os=GuestOs(family="linux"),
        memory_bytes=256 * MIB,
    )
    migration = job(manifest)
    own = shutil.copyfile(image, tmp_path / "own.raw")
    domain = host.domain_xml(machine_of(migration), [Volume("disk1", str(own), "file")])
    host.define(domain)
    host.start(UUID(domain.uuid))
    try:
        host.wait_until_booted(migration.id, 240, never)
        assert names(host.console_log(UUID(domain.uuid)).read_text(errors="replace")) == dict(zip(macs, wanted, strict=True))
    finally:
        host.undefine(UUID(domain.uuid), migration.id)
