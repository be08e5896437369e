"""What a Linux calls a network card by its place at its source (systemd.net-naming-scheme(7)), and whether it needs that name.
Pure."""

from collections.abc import Mapping
from typing import Final

from synvirt.model.machine import Concern, VmManifest
from synvirt.nearest import in_short

NAMED_OTHERWISE: Final = "card-names"
_FACT: Final = "configures "

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


def noted(manifest: VmManifest, facts: Mapping[str, str]) -> VmManifest:
    """The manifest of a Linux guest with a concern, where it has settings for a network card by a name that none has here.
    `facts`: of its disks (model/facts.py). Of a guest whose cards all have known names nothing is said: settings for others are
    left from another time."""
    kept = {nic.linux_name for nic in manifest.nics}
    found = {name: value for fact, value in facts.items() if (name := fact.removeprefix(_FACT)) != fact and name not in kept}
    concerns = [_named_otherwise(found)] if found and None in kept else []
    return manifest.with_concerns(concerns, in_place_of=lambda id_: id_ == NAMED_OTHERWISE)


def _named_otherwise(found: Mapping[str, str]) -> Concern:
    files = sorted({file for value in found.values() for file in value.split(", ")})
    return Concern(
        id=NAMED_OTHERWISE,
        category="Warning",
        label="Network cards named otherwise",
        assessment=f"The guest has settings for {in_short(sorted(found))} ({in_short(files)}), and a network card may have "
        "another name here: then it gets no address.",
        remedy="Have it find the card by its MAC address, which is kept, at the source or here on its console: match: "
        "macaddress (netplan), MACAddress= (systemd), mac-address= instead of interface-name= (NetworkManager).",
    )
