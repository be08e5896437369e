"""The chipset, and the places of network cards, by which a Linux names them: what a guest gets here of its source's."""

from xml.etree import ElementTree as ET

import pytest

from synvirt.model.machine import Chipset, Nic, VmManifest
from tests.fakes.hypervisor import HOST
from tests.hypervisor.test_domain_xml import LINUX, build, fixed, volumes


def machine(chipset: Chipset | None, *slots: int | None, model: str = "virtio", **fields: object) -> VmManifest:
    nics = tuple(Nic(key=str(number), model=model, slot=slot) for number, slot in enumerate(slots))
    return LINUX.model_copy(update={"chipset": chipset, "nics": nics, **fields})


def made(manifest: VmManifest, disk_bus: str | None = None) -> tuple[str | None, list[str | None], list[str]]:
    """Of its domain: the chipset, and for each card its slot and its model."""
    root = ET.fromstring(build(fixed(manifest, disk_bus=disk_bus), volumes(manifest), HOST).xml)
    cards = root.findall("devices/interface")
    places = [None if (place := card.find("address")) is None else place.get("slot") for card in cards]
    models = [model.get("type", "") for model in root.iterfind("devices/interface/model")]
    kind = root.find("os/type")
    return None if kind is None else kind.get("machine"), places, models


@pytest.mark.parametrize("bus", ["virtio", "scsi", "sata", "ide"])
def test_a_guest_of_the_older_chipset_keeps_it_and_the_slots_of_its_cards(bus: str) -> None:
    """A real Debian calls the first one ens18 there, and enp1s0 on q35."""
    assert made(machine("pc", 18, 3), disk_bus=bus)[:2] == ("pc", ["0x12", "0x03"])


def test_a_slot_that_a_card_cannot_have_is_left_to_libvirt() -> None:
    """The chipset's own, the screen's, one that another card has, and one that there is not."""
    assert made(machine("pc", 18, 1, 2, 18, 32, None))[1] == ["0x12", None, None, None, None, None]


@pytest.mark.parametrize("chipset", ["q35", None])
def test_cards_of_another_chipset_have_no_slots_here(chipset: Chipset | None) -> None:
    assert made(machine(chipset, 18))[:2] == ("q35", [None])
    assert made(machine(chipset, 18), disk_bus="ide")[:2] == ("pc", [None])


def test_secure_boot_needs_the_newer_chipset() -> None:
    assert made(machine("pc", 18, firmware="uefi", secure_boot=True))[:2] == ("q35", [None])
    assert made(machine("pc", 18, firmware="uefi"))[:2] == ("pc", ["0x12"])


@pytest.mark.parametrize("model", ["e1000e", "vmxnet3"])
def test_the_older_chipset_has_no_card_of_pci_express(model: str) -> None:
    assert made(machine("pc", 18, model=model), disk_bus="sata")[2] == ["e1000"]
    assert made(machine("q35", 18, model=model), disk_bus="sata")[2] == ["e1000e"]
