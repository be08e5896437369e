"""What a Linux calls a domain's network cards, by their places in the XML (libvirt.org/formatdomain.html), which is hostile."""

import re
from typing import Final
from xml.etree.ElementTree import Element

from synvirt.kvm import numbered_ports
from synvirt.machines import card_names
from synvirt.model.machine import Chipset, chipset_named

_ZERO: Final = re.compile(r"(0x)?0{1,4}")
# As libvirt writes buses, slots and functions.
_HEX: Final = re.compile(r"0x([0-9a-f]{1,2})")


def chipset_of(domain: Element) -> Chipset | None:
    """The domain's."""
    kind = domain.find("os/type")
    return None if kind is None else chipset_named(kind.get("machine", ""))


def linux_name(domain: Element, card: Element) -> str | None:
    """By the slot on the first bus of i440fx; on q35 by the port, if that has a number, else by the PCI address. None: it
    cannot be known."""
    address = card.find("address[@type='pci']")
    if address is None or any(not _ZERO.fullmatch(address.get(part, "0")) for part in ("domain", "function")):
        return None
    bus, slot = _number(address.get("bus", "0x00")), _number(address.get("slot"))
    match chipset_of(domain):
        case "pc" if bus == 0 and slot is not None:
            return card_names.in_slot(slot)
        case "q35" if bus == 0 and slot is not None:
            return card_names.on_bus(0, slot)
        case "q35" if bus is not None and slot == 0:
            return _in_port(domain, bus)
        case _:
            return None


def _in_port(domain: Element, index: int) -> str | None:
    """Firmware and Linux number the buses in the order of the ports' addresses. With other bridges they are not known."""
    bridges = [one for one in domain.iterfind("devices/controller[@type='pci']") if one.get("model") != "pcie-root"]
    placed = [(place, one) for one in bridges if one.get("model") == "pcie-root-port" and (place := _place(one))]
    if len(placed) < len(bridges):
        return None
    numbers = numbered_ports.numbers_in(domain)
    for bus, (_, port) in enumerate(sorted(placed, key=lambda found: found[0]), 1):
        if port.get("index") == str(index):
            number = numbered_ports.number_of(port)
            return card_names.on_bus(bus, 0) if number is None or number not in numbers else card_names.in_slot(number)
    return None


def _place(port: Element) -> tuple[int, int] | None:
    """Its slot and function on bus 0."""
    address = port.find("address[@type='pci']")
    if address is None or not _ZERO.fullmatch(address.get("bus", "")):
        return None
    slot, function = _number(address.get("slot")), _number(address.get("function"))
    return None if slot is None or function is None else (slot, function)


def _number(text: str | None) -> int | None:
    found = _HEX.fullmatch(text or "")
    return int(found[1], 16) if found else None
