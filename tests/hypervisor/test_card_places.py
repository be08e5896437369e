"""The chipset, and the places of network cards, by which a Linux names them: what a guest gets here of its source's."""

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from synvirt.kvm import numbered_ports
from synvirt.model.machine import Chipset, GuestOs, Nic, VmManifest
from tests.fakes.hypervisor import HOST
from tests.hypervisor.test_domain_xml import LINUX, build, fixed, volumes

NUMBERED = replace(HOST, numbered_ports=True)


def machine(chipset: Chipset | None, *names: str | None, model: str = "virtio", **fields: object) -> VmManifest:
    nics = tuple(Nic(key=str(number), model=model, linux_name=name) for number, name in enumerate(names))
    return LINUX.model_copy(update={"chipset": chipset, "nics": nics, **fields})


def made(manifest: VmManifest, disk_bus: str | None = None) -> tuple[str | None, list[str | None], list[str]]:
    """Of its domain: the chipset, and for each card its place (bus-slot) and its model."""
    root = ET.fromstring(build(fixed(manifest, disk_bus=disk_bus), volumes(manifest), NUMBERED).xml)
    found = [card.find("address") for card in root.findall("devices/interface")]
    places = [None if place is None else f"{place.get('bus')}-{place.get('slot')}" for place in found]
    models = [model.get("type", "") for model in root.iterfind("devices/interface/model")]
    kind = root.find("os/type")
    return None if kind is None else kind.get("machine"), places, models


def ports(manifest: VmManifest) -> dict[str | None, int | None]:
    """The numbers of its domain's ports, by their buses."""
    root = ET.fromstring(build(fixed(manifest), volumes(manifest), NUMBERED).xml)
    found = {one.get("index"): numbered_ports.number_of(one) for one in root.iterfind("devices/controller[@type='pci']")}
    assert {number for number in found.values() if number is not None} == numbered_ports.numbers_in(root)
    return found


@pytest.mark.parametrize("bus", ["virtio", "scsi", "sata", "ide"])
def test_a_guest_of_the_older_chipset_keeps_it_and_the_slots_of_its_cards(bus: str) -> None:
    """A real Debian calls the first one ens18 there, and enp1s0 on q35."""
    assert made(machine("pc", "ens18", "ens3"), disk_bus=bus)[:2] == ("pc", ["0x00-0x12", "0x00-0x03"])


def test_a_slot_that_a_card_cannot_have_is_left_to_libvirt() -> None:
    """The chipset's own, the screen's, one that another card has, one that there is not, and names that say no slot."""
    names = ("ens18", "ens1", "ens2", "ens18", "ens32", "enp0s3", "eth0", None)
    assert made(machine("pc", *names))[1] == ["0x00-0x12", *[None] * 7]


@pytest.mark.parametrize("chipset", ["q35", None])
def test_a_card_of_a_slot_with_a_number_is_in_a_port_with_that_number(chipset: Chipset | None) -> None:
    """As VMware's: a real Debian calls it ens192 then. Of two cards with one number the second is left to libvirt."""
    manifest = machine(chipset, "ens192", "ens161", "ens192", "ens0", "ens8192", "eno1", "eth0", None)
    assert made(manifest)[:2] == ("q35", ["0x01-0x00", "0x02-0x00", *[None] * 6])
    assert ports(manifest) == {"1": 192, "2": 161}


def test_a_card_without_a_numbered_slot_keeps_its_address() -> None:
    """As VirtualBox' cards on bus 0, and libvirt's in ports."""
    assert made(machine("q35", "enp0s3", "enp0s8", "enp0s3", "enp0s1", "enp0s31"))[1] == ["0x00-0x03", "0x00-0x08", *[None] * 3]
    assert made(machine("q35", "enp3s0", "enp1s0", "enp1s2", "enp33s0"))[1] == ["0x03-0x00", "0x01-0x00", None, None]
    assert ports(machine("q35", "enp1s0")) == {}


def bridges(manifest: VmManifest) -> list[tuple[str | None, str | None, str]]:
    """Of its domain, all that it makes of PCI itself: index and model, and the place of a bridge."""
    root = ET.fromstring(build(fixed(manifest), volumes(manifest), NUMBERED).xml)
    found = [(one, one.find("address")) for one in root.iterfind("devices/controller[@type='pci']")]
    where = [(one, "" if place is None else f"{place.get('bus')}-{place.get('slot')}") for one, place in found]
    return [(one.get("index"), one.get("model"), place) for one, place in where]


def test_cards_behind_the_bridges_of_proxmox_ve_are_behind_bridges_with_the_same_numbers() -> None:
    """A real Debian calls them so. libvirt would put the ports of buses 1 to 4 behind those that come after the bridges."""
    manifest = machine("q35", "enp6s18", "enp6s19", "enp2s0")
    assert made(manifest)[1] == ["0x06-0x12", "0x06-0x13", "0x02-0x00"]
    ports_before = [(str(bus), "pcie-root-port", "") for bus in range(1, 5)]
    assert bridges(manifest) == [*ports_before, ("5", "pcie-to-pci-bridge", "0x04-0x00"), ("6", "pci-bridge", "0x05-0x01")]


def test_no_other_card_is_on_the_buses_that_bridges_need() -> None:
    """Only one bus has bridges, and none where no port can be before."""
    assert made(machine("q35", "enp6s18", "enp4s0", "enp5s0", "enp7s18"))[1] == ["0x06-0x12", None, None, None]
    assert made(machine("q35", "enp4s0", "enp6s18", "enp7s18"))[1] == ["0x04-0x00", None, "0x07-0x12"]
    assert made(machine("q35", "enp2s18", "enp6s1", "enp6s32"))[1] == [None] * 3
    assert made(machine("q35", "enp3s18", "ens192"))[1] == ["0x03-0x12", "0x04-0x00"]
    assert ports(machine("q35", "enp3s18", "ens192")) == {"1": None, "4": 192, "2": None, "3": None}


def test_ports_with_numbers_are_where_no_other_card_has_its_bus() -> None:
    manifest = machine("q35", "enp1s0", "ens192", "enp3s0", "ens224")
    assert made(manifest)[1] == ["0x01-0x00", "0x02-0x00", "0x03-0x00", "0x04-0x00"]
    assert ports(manifest) == {"2": 192, "4": 224}


def test_only_a_linux_names_its_cards_so() -> None:
    windows = machine(None, "ens192", "enp0s3", guest_os=GuestOs(family="windows"))
    assert made(windows)[1] == [None, None]
    assert ports(windows) == {}


def test_a_host_whose_libvirt_has_no_numbers_says_which_names_are_lost() -> None:
    manifest = machine(None, "ens192", "enp0s3", None)
    domain = build(fixed(manifest), volumes(manifest), HOST)
    assert "qemu:" not in domain.xml
    assert [one.source for one in domain.differences if one.what.startswith("name of")] == ["ens192"]
    assert not [one for one in build(fixed(manifest), volumes(manifest), NUMBERED).differences if "name of" in one.what]


def test_secure_boot_needs_the_newer_chipset() -> None:
    secure = machine("pc", "ens18", firmware="uefi", secure_boot=True)
    assert made(secure)[:2] == ("q35", ["0x01-0x00"])
    assert ports(secure) == {"1": 18}
    assert made(machine("pc", "ens18", firmware="uefi"))[:2] == ("pc", ["0x00-0x12"])


@pytest.mark.parametrize("model", ["e1000e", "vmxnet3"])
def test_the_older_chipset_has_no_card_of_pci_express(model: str) -> None:
    assert made(machine("pc", "ens18", model=model), disk_bus="sata")[2] == ["e1000"]
    assert made(machine("q35", "ens18", model=model), disk_bus="sata")[2] == ["e1000e"]
