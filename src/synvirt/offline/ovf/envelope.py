"""The parts of an OVF envelope: its virtual systems, and the sections, properties and configuration that count for one of them.

    Envelope
    ├── References        File: id, href, size, compression, chunkSize
    ├── DiskSection       Disk: diskId, capacity, fileRef, format, parentRef
    ├── NetworkSection
    └── VirtualSystem     Name, OperatingSystemSection, VirtualHardwareSection (`hardware`)

DMTF DSP0243 1.x and 2.x, and VMware's 0.9 before it. 0.9 and oVirt write `<Section xsi:type="ovf:DiskSection_Type">` for
DiskSection, and Content for VirtualSystem.
"""

from collections.abc import Iterator
from typing import NamedTuple
from xml.etree.ElementTree import Element

from synvirt.errors import MalformedArchive, UnsupportedFormat, VmNotFound
from synvirt.machines.texts import clean
from synvirt.nearest import LISTED_MAX, in_short
from synvirt.xml_document import attribute, child, children, local, parse, text


class Envelope(NamedTuple):
    """An envelope's root element, and the selected machine in it. `alone`: it has no other one."""

    root: Element
    system: Element
    alone: bool


def opened(data: bytes, name: str, vm: str | None) -> Envelope:
    """MalformedArchive says what is wrong in `name`. `vm`: the name or id of the selected machine, where there are several;
    UnsupportedFormat lists them, VmNotFound says that none has that name."""
    root = parse(data, name)
    if local(root.tag) != "Envelope":
        raise MalformedArchive(f"{name} is not an OVF: its root element is {local(root.tag)[:60]!r}, not Envelope")
    systems = list(_systems(root))
    return Envelope(root, _the_system(systems, name, vm), len(systems) == 1)


def _the_system(systems: list[Element], name: str, vm: str | None) -> Element:
    if not systems:
        raise MalformedArchive(f"{name} describes no virtual system")
    names = in_short([repr(system_name(system)) for system in systems])
    if vm is not None:
        # An id belongs to one VM; two VMs may share a name.
        found = [system for system in systems if clean(attribute(system, "id")) == vm] or [
            system for system in systems if system_name(system) == vm
        ]
        if len(found) != 1:
            raise VmNotFound(
                f"{name} holds {len(found) or 'no'} virtual machines called {vm[:100]!r}; it holds {names}",
                hint="Name the one that is meant by its id in the file." if found else "Name one that it holds.",
            )
        return found[0]
    if len(systems) > 1:
        raise UnsupportedFormat(
            f"{name} holds {len(systems)} virtual machines: {names}",
            hint="One import makes one VM: say which one (source_ref.vm; --vm NAME).",
            holds=tuple(system_name(system) for system in systems[:LISTED_MAX]),
        )
    return systems[0]


def _systems(element: Element) -> Iterator[Element]:
    """Collections nest. They are walked with a list, so that a deep document cannot exhaust the stack."""
    waiting = [element]
    while waiting:
        for inner in waiting.pop():
            kind = _effective_name(inner)
            if kind == "VirtualSystem":
                yield inner
            elif kind == "VirtualSystemCollection":
                waiting.append(inner)


def _effective_name(element: Element) -> str:
    """`Section xsi:type="ovf:DiskSection_Type"` is DiskSection; `Content xsi:type="ovf:VirtualSystem_Type"` VirtualSystem."""
    name = local(element.tag)
    if name in ("Section", "Content"):
        return attribute(element, "type").rpartition(":")[2].removesuffix("_Type")
    return name


def sections(element: Element, name: str) -> Iterator[Element]:
    """An element's sections of that name."""
    return (inner for inner in element if _effective_name(inner) == name)


def section(element: Element, name: str) -> Element | None:
    """The first of them."""
    return next(sections(element, name), None)


def _owners(root: Element, system: Element) -> list[Element]:
    """The envelope and the collections around the system, the outermost first."""
    waiting = [[root]]
    while waiting:
        owners = waiting.pop()
        for inner in owners[-1]:
            if inner is system:
                return owners
            if _effective_name(inner) == "VirtualSystemCollection":
                waiting.append([*owners, inner])
    return [root]


def properties(envelope: Envelope) -> dict[str, str]:
    """The values that count for the machine: properties nearer to it have priority."""
    found: dict[str, str] = {}
    for owner in (*_owners(envelope.root, envelope.system), envelope.system):
        for section in sections(owner, "ProductSection"):
            for element in children(section, "Property"):
                value = attribute(element, "value")
                if value:
                    found[attribute(element, "key")] = value
    return found


def configuration(root: Element) -> str:
    """The deployment option marked as default, else the first (DSP0243 clause 9.8)."""
    chosen_from = section(root, "DeploymentOptionSection")
    options = [] if chosen_from is None else list(children(chosen_from, "Configuration"))
    marked = next((option for option in options if attribute(option, "default").lower() in ("true", "1")), None)
    chosen = marked if marked is not None else next(iter(options), None)
    return attribute(chosen, "id")


def system_name(system: Element) -> str:
    """Never empty."""
    inner = child(section(system, "VirtualHardwareSection"), "System")
    for candidate in (text(system, "Name"), text(inner, "VirtualSystemIdentifier"), attribute(system, "id")):
        if clean(candidate):
            return clean(candidate)
    return "imported"
