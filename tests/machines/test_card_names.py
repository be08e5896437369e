"""What a Linux calls a card by its place at its source."""

import pytest

from synvirt.machines import card_names


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
