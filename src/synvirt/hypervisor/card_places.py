"""Where the guest's network cards are plugged in, so that a Linux names them as it did at its source. Pure.

A Linux names a card by its place, and has addresses in files by these names: a card that is elsewhere gets none of them.

    ens18    on i440fx: slot 18 of the first bus
    ens192   on q35: a port with the number 192 (kvm/numbered_ports.py)
    enp0s3   on q35: device 3 on bus 0
    enp2s0   on q35: the second port, which firmware and Linux give bus 2
    enp6s18  on q35: device 18 behind two bridges in the fourth port, which makes it bus 6
"""

import re
from collections.abc import Collection, Iterator, Mapping
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
# Behind the bridges. The slots of both have the same numbers, so that a Linux, which wants different names, calls those of the
# second «18-2», and a card in one by its address: but for 1, where the first has the second.
_BRIDGED: Final = range(2, 32)


@dataclass(frozen=True, slots=True)
class Place:
    """A PCI address, on domain 0 and function 0. `port`: the number of the port that is that bus; None: it has none."""

    bus: int
    slot: int
    port: int | None = None

    @property
    def is_behind_bridge(self) -> bool:
        """A port has one device, in slot 0: its bus is that of the second bridge."""
        return self.bus > 0 and self.slot > 0


def places(machine: Machine, *, numbered: bool) -> dict[str, Place]:
    """The places of the cards that keep their names, by the cards' keys. `numbered`: whether ports here can have numbers."""
    found: dict[str, Place] = {}
    older, linux = chipset_of(machine) == "pc", machine.manifest.guest_os.family == "linux"
    for key, name in _names(machine):
        place = _on_first_bus(name) if older else _on_a_bus(name) if linux else None
        if place is not None and _is_free(place, found.values()):
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
    place = Place(int(name[2]), int(name[3]))
    if place.is_behind_bridge:
        return place if _port_of(place) in _BUSES and place.slot in _BRIDGED else None
    return place if (place.bus == 0 and place.slot in _DEVICES) or place.bus in _BUSES else None


def _is_free(place: Place, taken: Collection[Place]) -> bool:
    """Whether no other card is there. Cards behind bridges are all behind the same."""
    if place in taken:
        return False
    return all(
        place.bus == other.bus
        if place.is_behind_bridge and other.is_behind_bridge
        else not set(_buses_of(place)) & set(_buses_of(other))
        for other in taken
        if place.is_behind_bridge or other.is_behind_bridge
    )


def _port_of(place: Place) -> int:
    """The port that has the bridges of a place behind them."""
    return place.bus - 2


def _buses_of(place: Place) -> range:
    """The buses that a place needs."""
    return range(_port_of(place) if place.is_behind_bridge else place.bus, place.bus + 1)


def _in_ports(machine: Machine, taken: Mapping[str, Place]) -> dict[str, Place]:
    """Each in the first port that is free."""
    buses = {bus for place in taken.values() for bus in _buses_of(place)}
    free = (bus for bus in _BUSES if bus not in buses)
    found: dict[int, tuple[str, Place]] = {}
    for key, name in _names(machine):
        number = int(name[1] or 0)
        if number in numbered_ports.NUMBERS and number not in found and (bus := next(free, None)) is not None:
            found[number] = key, Place(bus, 0, number)
    return dict(found.values())
