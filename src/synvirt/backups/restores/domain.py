"""The definition of a restore point's domain for this host: the point's own XML, rewritten. Pure
(libvirt.org/formatdomain.html).

    foreign     the point's own, without what may reach into this host (kvm/foreign_domain.py)
    renewed     another machine: a name, UUID and MAC addresses of its own; what two machines cannot share is left out
    isolated    renewed, and with its own disks only: it reaches nothing else, and nothing reaches it; for a boot test
    with_disks  the disks on the volumes that they were restored to

Each difference from the point that a person should know is a warning: a code and a sentence.
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET  # only written here: what is read goes through xml_document

from synvirt import xml_document
from synvirt.errors import RepositoryDamaged
from synvirt.hypervisor import Early, Volume
from synvirt.hypervisor.domain_xml import SOURCE_TYPES, disk_source, early_disk
from synvirt.kvm import foreign_domain
from synvirt.kvm.identity import JOB_NAMESPACE
from synvirt.kvm.translated import translated

ET.register_namespace("synvirt", JOB_NAMESPACE)

DIFFERS = "E_BAK_DOMAIN_DIFFERS"
AGENT = "org.qemu.guest_agent.0"
ET.register_namespace("qemu", "http://libvirt.org/schemas/domain/qemu/1.0")
# Parts of an allowed machine that lead out of it.
_SHOWING = ("serial", "console", "graphics", "audio", "redirdev")


@dataclass(frozen=True, slots=True)
class Place:
    """A disk's present place: `device_type` as in destinations: file, block or rbd. `early`: its place until that is
    complete."""

    path: str
    device_type: str = "file"
    format: str = "raw"
    early: Early | None = None


@dataclass
class Rewritten:
    """The domain while it is rewritten. `differences`: from the domain that was backed up.
    `firmware`: the path that its loader had; `console_log`: its console was written to a file."""

    root: ET.Element
    differences: list[str] = field(default_factory=list)
    firmware: str | None = None
    console_log: bool = False

    @property
    def xml(self) -> str:
        return ET.tostring(self.root, encoding="unicode")

    @property
    def devices(self) -> ET.Element:
        """The element `devices`, made where it is missing."""
        found = self.root.find("devices")
        return ET.SubElement(self.root, "devices") if found is None else found


ReadXml = Callable[[str], ET.Element]


def read_here(xml: str) -> ET.Element:
    """Reads the XML in this process. RepositoryDamaged."""
    return xml_document.parse(xml, "the restore point's domain XML", wrong=RepositoryDamaged)


def foreign(xml: str, own: Rewritten | None = None, read: ReadXml = read_here) -> Rewritten:
    """The domain of a restore point, which is untrusted. `own`: this host's definition of the same guest, which is trusted.
    `read`: parses its XML."""
    found = foreign_domain.rebuilt(parsed(xml, read).root, None if own is None else own.root)
    return Rewritten(found.root, list(found.left_out), found.firmware, found.console_log)


def parsed(xml: str, read: ReadXml = read_here) -> Rewritten:
    """The description by this host's libvirt, unchanged. RepositoryDamaged, if it is no domain's XML."""
    root = read(xml)
    if root.tag != "domain":
        raise RepositoryDamaged(f"the restore point's domain XML is that of a {root.tag}")
    return Rewritten(root)


def targets(domain: Rewritten) -> list[str]:
    """The targets of the disks with data, in the domain's order."""
    return [target_of(disk) for disk in domain.devices.iterfind("disk") if _holds_data(disk)]


def renewed(domain: Rewritten, *, name: str, run_id: uuid.UUID, mac: Callable[[int], str]) -> None:
    """Another machine than the one that was backed up, of a `foreign` domain: logs, sockets and labels are left out already.
    `run_id` is its UUID, and the mark that we made it. `mac`: gives the address of the card with a number."""
    root = domain.root
    _text(root, "name", name)
    _text(root, "uuid", str(run_id))
    for entry in root.iterfind("sysinfo/system/entry[@name='uuid']"):
        entry.text = str(run_id)  # libvirt refuses a different one here
    _mark(root, run_id)
    new_generation(domain)
    for number, address in enumerate(root.iterfind("devices/interface/mac")):
        address.set("address", mac(number))
    for graphics in root.iterfind("devices/graphics"):
        if graphics.get("port", "-1") != "-1":
            domain.differences.append(f"its {graphics.get('type')} screen gets a port of its own, not {graphics.get('port')}")
        graphics.attrib.pop("port", None)
        graphics.attrib.pop("tlsPort", None)
        graphics.set("autoport", "yes")


def renamed(domain: Rewritten, name: str) -> None:
    """Gives the domain another name, in place."""
    _text(domain.root, "name", name)


def log_console(domain: Rewritten, path: str) -> None:
    """Writes the console to a file of this host's choice, if it was written to a file before."""
    serial = domain.devices.find("serial")
    if domain.console_log and serial is not None:
        serial.insert(0, ET.Element("log", file=path, append="on"))


def same_variables(domain: Rewritten, other: Rewritten) -> None:
    """Uses the file of the other's UEFI variables."""
    for path in ("os/loader", "os/nvram"):
        mine, its = domain.root.find(path), other.root.find(path)
        if mine is not None and its is not None:
            mine.text = its.text
            if template := its.get("template"):
                mine.set("template", template)


def new_generation(domain: Rewritten) -> None:
    """The guest goes back in time and must see that: libvirt makes a new id."""
    if (generation := domain.root.find("genid")) is not None:
        generation.text = None


def _mark(root: ET.Element, run_id: uuid.UUID) -> None:
    metadata = root.find("metadata")
    if metadata is None:
        metadata = ET.SubElement(root, "metadata")
    ET.SubElement(metadata, f"{{{JOB_NAMESPACE}}}job", id=str(run_id))


def with_disks(domain: Rewritten, places: Mapping[str, Place], *, wanted: frozenset[str]) -> None:
    """Puts the disks on `places`, by target. Disks with data that are not `wanted` are left out, and so are discs that are not
    here."""
    for disk in domain.devices.findall("disk"):
        target = target_of(disk)
        if target in places:
            _place(disk, places[target])
        elif _holds_data(disk):
            domain.devices.remove(disk)
            why = "it was not asked for" if target not in wanted else "it is not part of the restore point"
            domain.differences.append(f"its disk {target} is left out: {why}")
        elif (gone := _missing_file(disk)) is not None:
            _take_out(disk)
            domain.differences.append(f"what was in its drive {target} is not on this host: {gone}")


def _place(disk: ET.Element, place: Place) -> None:
    for name in ("source", "backingStore", "mirror", "auth", "encryption", "transient"):
        for element in disk.findall(name):
            disk.remove(element)
    if place.early is not None:
        for old in disk.findall("driver"):
            disk.remove(old)
        disk.set("type", "file")
        early_disk(disk, place.early)
        return
    disk.set("type", SOURCE_TYPES.get(place.device_type, place.device_type))
    driver = disk.find("driver")
    if driver is None:
        driver = ET.Element("driver", name="qemu")
        disk.insert(0, driver)
    driver.set("type", place.format)
    if place.device_type != "block":
        # These ask for O_DIRECT, which a file system may not support; the guest's writes are as safe without it.
        for attribute in ("cache", "io"):
            driver.attrib.pop(attribute, None)
    disk_source(disk, Volume(target_of(disk), place.path, place.device_type))


def _missing_file(disk: ET.Element) -> str | None:
    source = disk.find("source")
    path = None if source is None else source.get("file") or source.get("dev")
    return path if path is not None and not Path(path).exists() else None


def _take_out(disk: ET.Element) -> None:
    for name in ("source", "backingStore"):
        for element in disk.findall(name):
            disk.remove(element)
    disk.set("type", "file")


def isolated(domain: Rewritten, *, serial_log: str) -> None:
    """A `foreign` domain, whose drives are empty, cut off: its cards stay without a cable. Its console is written to
    `serial_log`."""
    root, devices = domain.root, domain.devices
    for element in [child for child in devices if child.tag in _SHOWING]:
        devices.remove(element)
    for channel in devices.findall("channel[@type]"):
        if channel.get("type") != "unix":
            devices.remove(channel)
    for interface in devices.findall("interface"):
        _unplug(interface)
    for event in ("on_poweroff", "on_crash"):
        _text(root, event, "destroy")
    _look_at(devices, serial_log)


def _look_at(devices: ET.Element, serial_log: str) -> None:
    """Adds what shows the signs of a boot: a console, a screen, the agent."""
    serial = ET.SubElement(devices, "serial", type="pty")
    ET.SubElement(serial, "log", file=serial_log, append="on")
    ET.SubElement(serial, "target", port="0")
    # A Unix socket, as other users of the host could open a port.
    ET.SubElement(ET.SubElement(devices, "graphics", type="vnc"), "listen", type="socket")
    if not any(_is_agent(channel) for channel in devices.findall("channel")):
        channel = ET.SubElement(devices, "channel", type="unix")
        ET.SubElement(channel, "target", type="virtio", name=AGENT)


def _is_agent(channel: ET.Element) -> bool:
    target = channel.find("target")
    return target is not None and target.get("name") == AGENT


def _unplug(interface: ET.Element) -> None:
    """Unplugs the card, which stays in its slot as the guest knows it: with type user and its link down, no packet leaves
    QEMU. The firmware does not start from it, or it would wait 20 s for the link of a guest whose network comes first."""
    kept = {child.tag: child for child in interface if child.tag in ("mac", "model", "address")}
    interface.clear()
    interface.set("type", "user")
    interface.extend(kept.values())
    ET.SubElement(interface, "link", state="down")
    ET.SubElement(interface, "rom", enabled="no")


def emulated(domain: Rewritten) -> None:
    """For a host where KVM does not work: slow, but it runs."""
    if domain.root.get("type") != "kvm":
        return
    domain.root.set("type", "qemu")
    for cpu in domain.root.findall("cpu"):
        translated(cpu)
    for hyperv in domain.root.findall("features/hyperv"):
        found = domain.root.find("features")
        assert found is not None
        found.remove(hyperv)
    domain.differences.append("it is emulated, which is slow: KVM does not work on this host")


def has_uefi(domain: Rewritten) -> bool:
    """Whether the definition must name its firmware; else it is the BIOS, or libvirt chooses."""
    found = domain.root.find("os/loader")
    return found is not None and (found.get("type") == "pflash" or domain.root.find("os/nvram") is not None)


def name_firmware(domain: Rewritten) -> None:
    """Makes the choice of a UEFI firmware ours where it was libvirt's: it would begin with variables of its own."""
    system = domain.root.find("os")
    if system is None or system.get("firmware") != "efi" or has_uefi(domain):
        return
    loader = system.find("loader")
    if loader is None:
        loader = ET.SubElement(system, "loader")
    loader.set("type", "pflash")
    if system.find("firmware/feature[@name='secure-boot'][@enabled='yes']") is None:
        return
    loader.set("secure", "yes")
    # libvirt adds it by itself for a firmware that it chose; for another one it must be in the XML.
    features = domain.root.find("features")
    if features is None:
        features = ET.SubElement(domain.root, "features")
    smm = features.find("smm")
    if smm is None:
        smm = ET.SubElement(features, "smm")
    smm.set("state", "on")


def wants_secure_boot(domain: Rewritten) -> bool:
    """Whether the domain's loader is one for Secure Boot."""
    found = domain.root.find("os/loader")
    return found is not None and found.get("secure") == "yes"


def with_firmware(domain: Rewritten, code: str, template: str, own: str | None = None) -> None:
    """Sets this host's firmware; its UEFI variables are copied from `template` to `own` at the first start."""
    system, loader = domain.root.find("os"), domain.root.find("os/loader")
    if system is None or loader is None:
        return
    # libvirt refuses a definition with both its own earlier choice and the request to choose.
    system.attrib.pop("firmware", None)
    for request in system.findall("firmware"):
        system.remove(request)
    loader.text = code
    loader.set("readonly", "yes")
    loader.set("type", "pflash")
    nvram = system.find("nvram")
    if nvram is None:
        nvram = ET.SubElement(system, "nvram")
    nvram.text = own
    nvram.attrib.clear()
    nvram.set("template", template)


def without_firmware(domain: Rewritten) -> None:
    """Sets the BIOS, as the host chooses it."""
    if (system := domain.root.find("os")) is not None:
        for element in [*system.findall("loader"), *([] if system.get("firmware") else system.findall("nvram"))]:
            system.remove(element)


def lacking(domain: Rewritten, *, bridges: Callable[[str], bool], networks: Callable[[str], bool]) -> list[str]:
    """What this host lacks to start the domain, which libvirt would report only at the start."""
    found = []
    for number, interface in enumerate(domain.devices.findall("interface"), 1):
        source: Any = interface.find("source")
        if source is None:
            continue
        bridge, network = source.get("bridge"), source.get("network")
        if interface.get("type") == "bridge" and bridge and not bridges(bridge):
            found.append(f"the bridge {bridge} of its network card {number}")
        if interface.get("type") == "network" and network and not networks(network):
            found.append(f"the network {network} of its network card {number}")
    return found


def _holds_data(disk: ET.Element) -> bool:
    return disk.get("device", "disk") not in ("cdrom", "floppy")


def target_of(disk: ET.Element) -> str:
    """The target of a disk in the guest (`vda`); empty, if it names none."""
    target = disk.find("target")
    return "" if target is None else target.get("dev", "")


def _text(parent: ET.Element, tag: str, text: str) -> None:
    found = parent.find(tag)
    if found is None:
        found = ET.SubElement(parent, tag)
    found.text = text
