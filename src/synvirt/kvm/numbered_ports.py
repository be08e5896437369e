"""Ports of PCI Express that have numbers of their own, in a domain's XML.

A Linux names a network card by the number of the slot that it is in: ens192 (systemd.net-naming-scheme(7)). For PCI Express
that is the number of its port (PCI Express Base 7.5.3.9, Slot Capabilities: Physical Slot Number), QEMU's property `slot`.
libvirt has no word for it, so it is set as libvirt.org/drvqemu.html describes: by `qemu:override`, from libvirt 8.5 on, as
earlier ones crash with some devices. A guest uses these numbers only where devices are plugged in by PCI Express itself and not
by ACPI (QEMU 6.1 or later).
"""

import re
from collections.abc import Iterable
from typing import Final
from xml.etree import ElementTree as ET  # only for writing: foreign XML is read by xml_document

from synvirt.kvm.library import module

NAMESPACE: Final = "http://libvirt.org/schemas/domain/qemu/1.0"
ET.register_namespace("qemu", NAMESPACE)

# Those with such a libvirt come with a QEMU of that age.
_LIBVIRT_LEAST: Final = 8_005_000
# The field has 13 bits, and systemd takes 0 for none.
NUMBERS: Final = range(1, 1 << 13)

_ARGUMENTS: Final = ("-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off")
# libvirt takes names from others only with this prefix.
_ALIAS: Final = re.compile(r"ua-slot-(\d{1,4})")
_COMMAND_LINE: Final = f"{{{NAMESPACE}}}commandline"
_OVERRIDE: Final = f"{{{NAMESPACE}}}override"
PARTS: Final = frozenset({_COMMAND_LINE, _OVERRIDE})


def possible() -> bool:
    """Whether this host's libvirt can do it."""
    try:
        return bool(module().getVersion() >= _LIBVIRT_LEAST)
    except ImportError:
        return False


def alias(number: int) -> str:
    """The name of the controller that is the port."""
    return f"ua-slot-{number}"


def number_of(controller: ET.Element) -> int | None:
    """Its port's number by its name; None, where it has none."""
    name = controller.find("alias")
    found = None if name is None else _ALIAS.fullmatch(name.get("name", ""))
    return int(found[1]) if found and int(found[1]) in NUMBERS else None


def add(root: ET.Element, numbers: Iterable[int]) -> None:
    """Gives the ports of these names their numbers."""
    ordered = sorted(numbers)
    if not ordered:
        return
    line = ET.SubElement(root, _COMMAND_LINE)
    for argument in _ARGUMENTS:
        ET.SubElement(line, f"{{{NAMESPACE}}}arg", value=argument)
    override = ET.SubElement(root, _OVERRIDE)
    for number in ordered:
        device = ET.SubElement(override, f"{{{NAMESPACE}}}device", alias=alias(number))
        front = ET.SubElement(device, f"{{{NAMESPACE}}}frontend")
        ET.SubElement(front, f"{{{NAMESPACE}}}property", name="slot", type="unsigned", value=str(number))


def numbers_in(root: ET.Element) -> frozenset[int]:
    """The numbers of a domain's ports, where it has them as `add` gives them, and nothing else of QEMU's own; else none."""
    ports = {number_of(controller) for controller in root.iterfind("devices/controller[@model='pcie-root-port']")}
    numbers = frozenset(number for number in ports if number is not None)
    wanted = ET.Element("domain")
    add(wanted, numbers)
    return numbers if _of_qemu(root) == _of_qemu(wanted) else frozenset()


def _of_qemu(root: ET.Element) -> list[object]:
    return sorted((_plain(child) for child in root if str(child.tag).startswith(f"{{{NAMESPACE}}}")), key=repr)


def _plain(element: ET.Element) -> object:
    children = [_plain(child) for child in element]
    return element.tag, sorted(element.attrib.items()), sorted(children, key=repr) if element.tag == _OVERRIDE else children
