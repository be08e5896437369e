"""Where the guest's network cards are plugged in, so that a Linux names them as it did at its source. Pure.

A Linux names a card by its place, and has addresses in files by these names: a card that is elsewhere gets none of them.

    ens18    on i440fx: slot 18 of the first bus
    ens192   on q35: a port with the number 192 (kvm/numbered_ports.py)
    enp0s3   on q35: device 3 on bus 0
    enp2s0   on q35: the second port, which firmware and Linux give bus 2
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from synvirt.hypervisor.hardware import chipset_of
from synvirt.hypervisor.machine import Machine
from synvirt.kvm import numbered_ports

_NAME: Final = re.compile(r"en(?:s(\d{1,4})|p(\d{1,2})s(\d{1,2}))")
# On the first PCI bus of i440fx 0 to 2 are the chipset's own and the screen's, and 31 is the last one.
_SLOTS: Final = range(3, 32)
# On bus 0 of q35 0 and 1 are the host bridge and the screen, and the chipset's own begin at 26.
_DEVICES: Final = range(2, 26)
# libvirt makes a port for each bus up to the one that a card is on. More are on no machine that we know.
_BUSES: Final = range(1, 33)


@dataclass(frozen=True, slots=True)
class Place:
    """A PCI address, on domain 0 and function 0. `port`: the number of the port that is that bus; None: it has none."""

    bus: int
    slot: int
    port: int | None = None


def places(machine: Machine, *, numbered: bool) -> dict[str, Place]:
    """The places of the cards that keep their names, by the cards' keys. `numbered`: whether ports here can have numbers."""
    found: dict[str, Place] = {}
    older, linux = chipset_of(machine) == "pc", machine.manifest.guest_os.family == "linux"
    for key, name in _names(machine):
        place = _on_first_bus(name) if older else _on_a_bus(name) if linux else None
        if place is not None and place not in found.values():
            found[key] = place
    return found if older or not linux or not numbered else found | _in_ports(machine, found)


def _names(machine: Machine) -> Iterator[tuple[str, re.Match[str]]]:
    for nic in machine.manifest.nics:
        if name := _NAME.fullmatch(nic.linux_name or ""):
            yield nic.key, name


def _on_first_bus(name: re.Match[str]) -> Place | None:
    slot = int(name[1] or 0)
    return Place(0, slot) if slot in _SLOTS else None


def _on_a_bus(name: re.Match[str]) -> Place | None:
    if name[2] is None:
        return None
    bus, slot = int(name[2]), int(name[3])
    return Place(bus, slot) if (bus == 0 and slot in _DEVICES) or (bus in _BUSES and slot == 0) else None


def _in_ports(machine: Machine, taken: Mapping[str, Place]) -> dict[str, Place]:
    """Each in the first port that is free."""
    buses = {place.bus for place in taken.values()}
    free = (bus for bus in _BUSES if bus not in buses)
    found: dict[int, tuple[str, Place]] = {}
    for key, name in _names(machine):
        number = int(name[1] or 0)
        if number in numbered_ports.NUMBERS and number not in found and (bus := next(free, None)) is not None:
            found[number] = key, Place(bus, 0, number)
    return dict(found.values())
