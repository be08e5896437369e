"""What a Linux calls a card by its place at its source."""

import pytest

from synvirt.machines import card_names
from synvirt.model.machine import Nic, VmManifest


@pytest.mark.parametrize(
    ("number", "name"),
    [
        *[(32, "ens32"), (33, "ens33"), (160, "ens160"), (192, "ens192"), (224, "ens224"), (256, "ens256")],
        *[(1184, "ens161"), (1216, "ens193"), (2208, "ens162"), (7424, "ens263")],
        *[(None, None), (0, None), (17, None), (-1, None), (1024, None), (1041, None), (8192, None), (10**18, None)],
    ],
)
def test_the_number_of_vmware_is_that_of_a_slot_and_a_function(number: int | None, name: str | None) -> None:
    """The first four adapters are ens160, 192, 224 and 256, the next four ens161, 193, 225 and 257. 17 is on the first bus."""
    assert card_names.vmware(number) == name


def test_virtualbox_has_its_adapters_on_bus_0() -> None:
    found = [card_names.virtualbox(number) for number in range(-1, 9)]
    assert found == [None, "enp0s3", "enp0s8", "enp0s9", "enp0s10", "enp0s16", "enp0s17", "enp0s18", "enp0s19", None]


FOUND = {"configures eth0": "/etc/network/interfaces", "configures ens9": "/etc/a, /etc/b", "mount /": "/dev/eth0 ext4"}


def machine(*names: str | None) -> VmManifest:
    nics = tuple(Nic(key=str(number), linux_name=name) for number, name in enumerate(names))
    return VmManifest(vm_id="x", name="x", nics=nics)


@pytest.mark.parametrize("names", [(None,), ("ens3", None), ("ens9", None)])
def test_settings_for_a_card_that_has_another_name_here_are_noted(names: tuple[str | None, ...]) -> None:
    (concern,) = card_names.noted(machine(*names), FOUND).concerns
    assert (concern.id, concern.category) == ("card-names", "Warning")
    assert "eth0" in concern.assessment
    assert ("ens9" in concern.assessment) == ("ens9" not in names)
    assert "/etc/network/interfaces" in concern.assessment


@pytest.mark.parametrize("names", [(), ("ens3",), ("eth0", "ens3")])
def test_a_guest_whose_cards_have_known_names_has_none_that_is_not_here(names: tuple[str | None, ...]) -> None:
    """What it says of other names is left from another time. One without a card has no use for any."""
    assert card_names.noted(machine(*names), FOUND).concerns == ()


def test_what_was_noted_before_is_noted_anew() -> None:
    once = card_names.noted(machine(None), FOUND)
    assert card_names.noted(once, FOUND) == once
    assert card_names.noted(once, {"configures": "x"}).concerns == ()
