"""A source VM's manifest, the plan's wishes and the copied volumes, as libvirt's domain XML (libvirt.org/formatdomain.html).

Pure: the same machine and host give the same bytes, UUID, serial numbers and MAC addresses, so that defining twice changes
nothing. Names, networks and models come from foreign files: what libvirt would refuse or misread is replaced here. hardware.py
chooses the guest's bus, card and machine type; differences.py lists what differs from the source.
"""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as ET  # only written here: what is read goes through xml_document

from synvirt.disks import rbd
from synvirt.errors import DomainDefineFailed, Internal
from synvirt.hypervisor import Early, Volume
from synvirt.hypervisor.card_places import Place, places
from synvirt.hypervisor.differences import differences
from synvirt.hypervisor.hardware import (
    BUSES,
    bus_now,
    bus_of,
    card,
    chipset_of,
    disk_serials,
    large_sectors,
    macs,
    memory_bytes,
    processors,
    serial_of,
    uuid_of,
)
from synvirt.hypervisor.machine import Machine
from synvirt.kvm import numbered_ports
from synvirt.kvm.identity import JOB_NAMESPACE, not_the_drivers
from synvirt.kvm.translated import translated
from synvirt.model.job import Domain
from synvirt.model.machine import Chipset, DiskBus, Nic, VmManifest, letters

ET.register_namespace("synvirt", JOB_NAMESPACE)

# libvirt makes files named after the domain, with its own endings: so the limit is well under the 255 bytes of a file name.
NAME_LIMIT_BYTES = 120
# libvirt puts as many disks on one SCSI controller. Those that are missing it adds by itself, as LSI Logic's, whose driver many
# guests lack.
SCSI_DISKS_OF_ONE = 7
# Features that Windows expects of a Hyper-V host, and without which it is slower or deadlocks; those that need only KVM.
HYPERV_FEATURES = ("relaxed", "vapic", "vpindex", "runtime", "synic", "stimer", "reset", "frequencies", "tlbflush", "ipi")

_UNSAFE = re.compile(r"[^\w.+-]+")
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Firmware:
    """A UEFI build: the code, and the variable store that each domain gets a copy of. `kept`: that is the source's own."""

    code: str
    variables: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Host:
    """What this host offers a domain. `network`: for cards that the plan does not map; `plain_network`: what a mapped name
    without a prefix means."""

    accelerator: Literal["kvm", "tcg"]
    serial_log: str  # a pattern with {uuid}
    network: str = "user"
    plain_network: Literal["network", "bridge"] = "bridge"
    uefi: Firmware | None = None
    uefi_secure: Firmware | None = None
    tpm: bool = False
    # The domain's copy of the variables. None: libvirt names it after the domain, and takes one that is there.
    variables: str | None = None
    # Whether its ports of PCI Express can have numbers (kvm/numbered_ports.py).
    numbered_ports: bool = False


def build(machine: Machine, volumes: list[Volume], host: Host) -> Domain:
    """The domain of this machine. DomainDefineFailed, where this host cannot run it.

    Without volumes it is a draft, asked for its name, UUID and MAC addresses and for what is missing here.
    """
    manifest = machine.manifest
    name = safe_name(machine.target.name or manifest.name, fallback=f"vm-{str(machine.id)[:8]}")
    if machine.rehearsed:
        name = f"{name}-rehearsal-{str(machine.id)[:8]}"
    bus, identity = bus_now(machine), uuid_of(machine)
    root = ET.Element("domain", type="kvm" if host.accelerator == "kvm" else "qemu")
    _text(root, "name", name)
    _text(root, "uuid", str(identity))
    _text(root, "title", " ".join(_NOT_XML.sub("", manifest.name).splitlines()).strip() or name)
    mark = {"id": str(machine.id), "bus": str(bus), **({"unplugged": "yes"} if machine.rehearsed else {})}
    ET.SubElement(ET.SubElement(root, "metadata"), f"{{{JOB_NAMESPACE}}}job", mark)
    _text(root, "memory", str(memory_bytes(machine)), unit="b")
    _firmware(root, machine, host)
    _processor(root, machine, host)
    _clock(root, manifest, host)
    for event, action in (("on_poweroff", "destroy"), ("on_reboot", "restart"), ("on_crash", "destroy")):
        _text(root, event, action)
    devices = ET.SubElement(root, "devices")
    _disks(devices, machine, manifest, volumes, bus)
    addresses, kept = macs(machine), places(machine, numbered=host.numbered_ports)
    for number, nic in enumerate(manifest.nics):
        if machine.rehearsed:
            element = _rehearsed_interface(devices, machine, nic, addresses[nic.key], number)
        else:
            element = _interface(devices, machine, nic, addresses[nic.key], host)
        if place := kept.get(nic.key):
            _address(element, place)
    _ports(root, devices, kept)
    _fixtures(devices, identity, manifest, chipset_of(machine), host)
    ET.indent(root)
    xml = ET.tostring(root, encoding="unicode") + "\n"
    uefi = _uefi(manifest, host)
    found = differences(
        machine,
        name=name,
        network=lambda nic: _network(machine, nic, host),
        places=kept,
        tpm=host.tpm,
        variables=uefi is not None and uefi.kept,
    )
    return Domain(name=name, uuid=str(identity), xml=xml, differences=found)


def safe_name(wanted: str, *, fallback: str) -> str:
    """A name that libvirt, a file system and a shell all accept. A plain number would mean the number of a running domain, and
    one name is the driver's own."""
    name = _UNSAFE.sub("-", wanted).encode("utf-8", "ignore")[:NAME_LIMIT_BYTES].decode("utf-8", "ignore").strip("-.")
    return f"vm-{name}" if name.isdecimal() else not_the_drivers(name) or fallback


# ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _uefi(manifest: VmManifest, host: Host) -> Firmware | None:
    return host.uefi_secure if manifest.secure_boot else host.uefi


def _firmware(root: ET.Element, machine: Machine, host: Host) -> None:
    manifest = machine.manifest
    os_element = ET.SubElement(root, "os")
    _text(os_element, "type", "hvm", arch="x86_64", machine=chipset_of(machine))
    if serial := serial_of(machine):
        ET.SubElement(os_element, "smbios", mode="sysinfo")
        _text(ET.SubElement(ET.SubElement(root, "sysinfo", type="smbios"), "system"), "entry", serial, name="serial")
    features = ET.SubElement(root, "features")
    ET.SubElement(features, "acpi")
    ET.SubElement(features, "apic")
    if manifest.guest_os.family == "windows" and host.accelerator == "kvm":
        # KVM alone has them.
        hyperv = ET.SubElement(features, "hyperv", mode="custom")
        for feature in HYPERV_FEATURES:
            ET.SubElement(hyperv, feature, state="on")
        ET.SubElement(hyperv, "spinlocks", state="on", retries="8191")
    if manifest.firmware == "bios":
        if manifest.guest_os.family != "windows":
            # The messages of firmware and boot loader are all that a disk that does not boot shows.
            ET.SubElement(os_element, "bios", useserial="yes")
        return
    firmware = _uefi(manifest, host)
    if firmware is None:
        what = "UEFI with secure boot" if manifest.secure_boot else "UEFI"
        raise DomainDefineFailed(f"{manifest.name} needs {what} firmware, and this host has none", hint="apt-get install ovmf")
    secure = {"secure": "yes"} if manifest.secure_boot else {}
    if secure:
        ET.SubElement(features, "smm", state="on")  # it protects the variables; libvirt demands it
    _text(os_element, "loader", firmware.code, **{"readonly": "yes", "type": "pflash", **secure})
    variables = ET.SubElement(os_element, "nvram", template=firmware.variables)
    variables.text = host.variables


def _processor(root: ET.Element, machine: Machine, host: Host) -> None:
    sockets, cores = processors(machine)
    _text(root, "vcpu", str(sockets * cores))
    cpu = ET.SubElement(root, "cpu", mode="host-model")
    ET.SubElement(cpu, "topology", sockets=str(sockets), cores=str(cores), threads="1")
    if host.accelerator != "kvm":
        translated(cpu)


def _clock(root: ET.Element, manifest: VmManifest, host: Host) -> None:
    windows = manifest.guest_os.family == "windows"
    clock = ET.SubElement(root, "clock", offset="localtime" if windows else "utc")
    ET.SubElement(clock, "timer", name="rtc", tickpolicy="catchup")
    ET.SubElement(clock, "timer", name="pit", tickpolicy="delay")
    ET.SubElement(clock, "timer", name="hpet", present="no")
    if windows and host.accelerator == "kvm":
        ET.SubElement(clock, "timer", name="hypervclock", present="yes")


# ── disks and cards ──────────────────────────────────────────────────────────────────────────────────────────────────


def _disks(devices: ET.Element, machine: Machine, manifest: VmManifest, volumes: list[Volume], bus: DiskBus) -> None:
    """The disks, in the manifest's order, as old guests name their disks by it; with the source's boot order."""
    by_key = {volume.disk_key: volume for volume in volumes}
    disks = [disk for disk in manifest.disks if disk.key in by_key]
    if len(disks) != len(volumes):
        raise Internal(f"job {machine.id}: volumes {sorted(by_key)} for disks {[disk.key for disk in manifest.disks]}")
    boot = sorted(disks, key=lambda disk: disk.boot_place)
    serials = disk_serials(machine)
    for number, disk in enumerate(disks):
        volume = by_key[disk.key]
        kind = SOURCE_TYPES[volume.device_type] if volume.early is None else "file"
        element = ET.SubElement(devices, "disk", type=kind, device="disk")
        # A block device has its own cache (zfs) and takes O_DIRECT; the file system of a file may not.
        direct = {"cache": "none", "io": "native"} if volume.device_type == "block" else {}
        if volume.early is not None:
            early_disk(element, volume.early)
        else:
            form = "raw" if volume.over is None else "qcow2"
            ET.SubElement(element, "driver", {"name": "qemu", "type": form, "discard": "unmap", **direct})
            disk_source(element, volume)
            if volume.over is not None:
                _beneath(element, volume.over)
        its_bus = bus_of(number, bus)
        ET.SubElement(element, "target", dev=BUSES[its_bus].prefix + letters(number), bus=its_bus)
        if (sectors := large_sectors(disk, its_bus)) is not None:
            ET.SubElement(element, "blockio", logical_block_size=sectors, physical_block_size=sectors)
        _text(element, "serial", serials[disk.key])
        ET.SubElement(element, "boot", order=str(boot.index(disk) + 1))
    if model := BUSES[bus].controller:
        for number in range(-(-len(disks) // SCSI_DISKS_OF_ONE)):
            ET.SubElement(devices, "controller", type=bus, index=str(number), model=model)


def _beneath(element: ET.Element, path: str) -> None:
    """The raw file under an overlay. It ends the chain: what a guest writes into its disk names no further file."""
    backing = ET.SubElement(element, "backingStore", type="file")
    ET.SubElement(backing, "format", type="raw")
    ET.SubElement(backing, "source", file=path)
    ET.SubElement(backing, "backingStore")


# How long QEMU waits for an export that is gone: less than guests wait for a disk (mostly 30 s). Then the guest is paused, and
# tries again when it is resumed.
RECONNECT_S = 10


def early_disk(element: ET.Element, early: Early) -> None:
    """A disk of a guest that runs before its volume is whole (early.py)."""
    ET.SubElement(
        element,
        "driver",
        {"name": "qemu", "type": "qcow2", "error_policy": "stop", "rerror_policy": "stop", "discard": "unmap"},
    )
    ET.SubElement(element, "source", file=early.top)
    backing = ET.SubElement(element, "backingStore", type="network")
    ET.SubElement(backing, "format", type="raw")
    source = ET.SubElement(backing, "source", protocol="nbd")
    ET.SubElement(source, "host", transport="unix", socket=early.socket)
    ET.SubElement(source, "reconnect", delay=str(RECONNECT_S))
    ET.SubElement(backing, "backingStore")


# What a destination calls the devices of its volumes, and what libvirt does.
SOURCE_TYPES = {"file": "file", "block": "block", "rbd": "network"}


def disk_source(element: ET.Element, volume: Volume) -> None:
    """Adds what QEMU opens to a disk element without a source."""
    if volume.device_type != "rbd":
        ET.SubElement(element, "source", {"dev" if volume.device_type == "block" else "file": volume.path})
        return
    spec = rbd.spec_of(volume.path)
    client = spec.place.client
    if client != "admin":
        # QEMU itself finds only the key of client.admin. Another client's key is in the secret that Ceph's documentation makes.
        auth = ET.SubElement(element, "auth", username=client)
        ET.SubElement(auth, "secret", type="ceph", usage=f"client.{client} secret")
    source = ET.SubElement(element, "source", protocol="rbd", name=f"{spec.place.pool}/{spec.image}")
    ET.SubElement(source, "config", file=spec.place.conf)


def _network(machine: Machine, nic: Nic, host: Host) -> tuple[str, str]:
    """What the card is connected to: user, network or bridge, and its name."""
    mapped = {entry.source: entry.target for entry in machine.target.network_map}
    kind, _, name = mapped.get(nic.network, host.network).partition(":")
    if kind not in ("user", "network", "bridge"):
        kind, name = host.plain_network, mapped.get(nic.network, host.network)
    return kind, _NOT_XML.sub("", name)


def _interface(devices: ET.Element, machine: Machine, nic: Nic, mac: str, host: Host) -> ET.Element:
    kind, name = _network(machine, nic, host)
    element = ET.SubElement(devices, "interface", type=kind)
    ET.SubElement(element, "mac", address=mac)
    if kind != "user":
        ET.SubElement(element, "source", {kind: name})
    ET.SubElement(element, "model", type=card(machine, nic))
    if not nic.connected:
        ET.SubElement(element, "link", state="down")
    ET.SubElement(element, "rom", enabled="no")  # its network boot waits seconds for a key at each start; we boot from disks
    return element


def _rehearsed_interface(devices: ET.Element, machine: Machine, nic: Nic, mac: str, number: int) -> ET.Element:
    """The card of a rehearsed guest, in the same place. Its frames go to the process at the end of its wire. Its own type is
    user and its link is down, so no packet leaves QEMU in another way."""
    wired = number < len(machine.wires)
    element = ET.SubElement(devices, "interface", type="client" if wired else "user")
    ET.SubElement(element, "mac", address=mac)
    if wired:
        ET.SubElement(element, "source", address="127.0.0.1", port=str(machine.wires[number]))
    ET.SubElement(element, "model", type=card(machine, nic))
    if not wired or not nic.connected:
        ET.SubElement(element, "link", state="down")
    ET.SubElement(element, "rom", enabled="no")
    return element


def _address(element: ET.Element, place: Place) -> None:
    where = {"bus": f"0x{place.bus:02x}", "slot": f"0x{place.slot:02x}"}
    ET.SubElement(element, "address", {"type": "pci", "domain": "0x0000", **where, "function": "0x0"})


def _ports(root: ET.Element, devices: ET.Element, kept: Mapping[str, Place]) -> None:
    """The ports that need numbers; bridges, and the ports up to theirs, as libvirt would put its own ones behind them. libvirt
    makes all others."""
    numbers = {place.bus: place.port for place in kept.values() if place.port is not None}
    bridged = next((place.bus for place in kept.values() if place.is_behind_bridge), 0)
    for bus in sorted({*numbers, *range(1, bridged - 1)}):
        port = ET.SubElement(devices, "controller", type="pci", index=str(bus), model="pcie-root-port")
        if bus in numbers:
            ET.SubElement(port, "alias", name=numbered_ports.alias(numbers[bus]))
    if bridged:
        for bus, model, slot in ((bridged - 1, "pcie-to-pci-bridge", 0), (bridged, "pci-bridge", 1)):
            _address(ET.SubElement(devices, "controller", type="pci", index=str(bus), model=model), Place(bus - 1, slot))
    numbered_ports.add(root, numbers.values())


def _fixtures(devices: ET.Element, identity: uuid.UUID, manifest: VmManifest, chipset: Chipset, host: Host) -> None:
    serial = ET.SubElement(devices, "serial", type="pty")
    ET.SubElement(serial, "log", file=host.serial_log.format(uuid=identity), append="on")
    ET.SubElement(serial, "target", port="0")
    channel = ET.SubElement(devices, "channel", type="unix")
    ET.SubElement(channel, "target", type="virtio", name="org.qemu.guest_agent.0")
    if manifest.guest_os.family != "linux":
        ET.SubElement(devices, "input", type="tablet", bus="usb")  # else the pointer drifts from the viewer's
    # A Unix socket: other users of the host cannot open it, so it needs no password.
    ET.SubElement(ET.SubElement(devices, "graphics", type="vnc"), "listen", type="socket")
    ET.SubElement(ET.SubElement(devices, "video"), "model", type="vga")
    if manifest.tpm and host.tpm:
        # CRB came with TPM 2.0; guests of the older chipset know TIS.
        model = "tpm-crb" if chipset == "q35" else "tpm-tis"
        ET.SubElement(ET.SubElement(devices, "tpm", model=model), "backend", type="emulator", version="2.0")
    ET.SubElement(devices, "memballoon", model="virtio")
    rng = ET.SubElement(devices, "rng", model="virtio")
    _text(rng, "backend", "/dev/urandom", model="random")


def _text(parent: ET.Element, tag: str, text: str, **attributes: str) -> None:
    ET.SubElement(parent, tag, attributes).text = text
