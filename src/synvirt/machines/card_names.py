"""What a Linux calls a network card by its place at its source (systemd.net-naming-scheme(7)). Pure."""

from typing import Final

# VirtualBox' places of its eight adapters on bus 0, which has no slots (its ConsoleImpl2.cpp).
_VIRTUALBOX: Final = (3, 8, 9, 10, 16, 17, 18, 19)
# Of a number in VMware's files: the device, the bus behind a bridge, and the bridge's function (Broadcom's KB 311606).
_FUNCTION_SHIFT, _PLACE_MASK, _NUMBER_MAX = 10, (1 << 10) - 1, (1 << 13) - 1
_BUS_LEAST: Final = 1 << 5


def in_slot(slot: int) -> str:
    """That of a card in a slot with a number."""
    return f"ens{slot}"


def on_bus(bus: int, device: int) -> str:
    """That of a card at a PCI address, in a slot without a number."""
    return f"enp{bus}s{device}"


def vmware(number: int | None) -> str | None:
    """By `pciSlotNumber`: 192 is ens192, and 1184, behind function 1 of the bridge of 160, is ens161. None: it has none yet, as
    the VM was never on, or it is on the first bus."""
    if number is None or not 0 <= number <= _NUMBER_MAX or number & _PLACE_MASK < _BUS_LEAST:
        return None
    return in_slot((number & _PLACE_MASK) + (number >> _FUNCTION_SHIFT))


def virtualbox(adapter: int) -> str | None:
    """By the adapter's number, from 0."""
    return on_bus(0, _VIRTUALBOX[adapter]) if 0 <= adapter < len(_VIRTUALBOX) else None
