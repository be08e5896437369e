"""The VirtualHardwareSection of an OVF: items become processors, memory, controllers, disk attachments and NICs.

An item is a CIM_ResourceAllocationSettingData (DSP1041); OVF 2.x (DSP0243 clause 8) writes disks and NICs as StorageItem and
EthernetPortItem, too. `InstanceId` is OVF 0.9's and oVirt's spelling. Names: see `xml_document`.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple
from xml.etree.ElementTree import Element

from synvirt.errors import MalformedArchive
from synvirt.offline.ovf import envelope
from synvirt.offline.units import quantity_bytes
from synvirt.xml_document import attribute, child, children, text

if TYPE_CHECKING:  # the command line opens disks, and does not wait for pydantic
    from synvirt.model.machine import DiskBus

# A real VM has a few dozen; VMware's maximum (4 SCSI, 4 SATA, 4 NVMe controllers, all full) is under 400.
_ITEMS_MAX = 2000
# The plan's limit for a target.
_CPUS_MAX = 1024
_MEMORY_MAX_BYTES = 64 << 40

# CIM_ResourceAllocationSettingData.ResourceType
_CPU, _MEMORY, _NIC = 3, 4, 10
_REMOVABLE = frozenset({14, 15, 16})
# Serial and parallel ports; one with an address is a file, a device or a connection of the host.
_PORTS = frozenset({21, 22})
_CONTROLLERS: "dict[int, DiskBus]" = {5: "ide", 6: "scsi", 7: "scsi", 8: "scsi", 20: "sata"}
# «Other storage device» (20) and vendors' own types have their kind in ResourceSubType, in VMware's or VirtualBox's words.
_SUBTYPES: "tuple[tuple[str, DiskBus], ...]" = (
    ("nvme", "nvme"),
    ("ahci", "sata"),
    ("sata", "sata"),
    ("scsi", "scsi"),
    ("ide", "ide"),
)
# oVirt numbers its NIC models.
_OVIRT_NICS = {"1": "rtl8139", "2": "e1000", "3": "virtio", "5": "virtio", "6": "e1000e"}
# What says that a card has no link: the standard's word, and oVirt's for the link and for a card that is taken out.
_LINKED = ("AutomaticAllocation", "Linked", "IsPlugged")
_MAC = re.compile(r"([0-9a-fA-F]{2})[:-]?" * 5 + r"([0-9a-fA-F]{2})")
_REFERENCE = re.compile(r"(?:ovf:)?/{0,2}(?:(disk|file)/)?(.+)", re.IGNORECASE)
_PASSTHROUGH = re.compile(r"vmware\.pci\.passthrough|vmware\.scsi\.passthrough|vmware\.usb\.host", re.IGNORECASE)


class Attachment(NamedTuple):
    """A hard disk item: its place, and the id of its content."""

    instance: str
    references: tuple[str, ...]
    bus: "DiskBus | None"
    controller: str
    unit: int | None
    name: str
    mode: str
    boot_order: int | None
    read_only: bool = False
    plugged: bool = True


class Adapter(NamedTuple):
    """A NIC item, as `model.machine.Nic` has it; `slot`: VMware's number of its place."""

    key: str
    mac: str | None
    model: str
    network: str
    connected: bool
    slot: int | None


class Hardware(NamedTuple):
    """`cpu_count` and `memory_bytes` are None, where no item has them. `media_references`: ids of disks or files in drives for
    removable media, with CD images."""

    system_type: str = ""
    cpu_count: int | None = None
    cores_per_socket: int = 1
    memory_bytes: int | None = None
    attachments: tuple[Attachment, ...] = ()
    nics: tuple[Adapter, ...] = ()
    media: tuple[str, ...] = ()
    media_references: frozenset[str] = frozenset()
    passthrough: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    tpm: bool = False
    settings: Mapping[str, str] = MappingProxyType({})


class _Controller(NamedTuple):
    bus: "DiskBus"
    name: str


def of(opened: envelope.Envelope) -> Hardware:
    """The hardware of the envelope's machine."""
    section = envelope.section(opened.system, "VirtualHardwareSection")
    return Hardware() if section is None else _parsed(section, envelope.configuration(opened.root))


def _parsed(section: Element, configuration: str) -> Hardware:
    """`configuration` is the deployment option whose items count (DSP0243 clause 9.8); empty where there are none."""
    items = _chosen_items(section, configuration)
    controllers = _controllers(items)
    cpu = next((item for item in items if _type(item) == _CPU), None)
    memory = next((item for item in items if _type(item) == _MEMORY), None)
    disks: list[Attachment] = []
    media: list[str] = []
    media_references: set[str] = set()
    for item in items:
        if (_type(item) in _CONTROLLERS and not _is_disk(item)) or _type(item) in (_CPU, _MEMORY, _NIC):
            continue
        if _type(item) in _REMOVABLE:
            media.extend(_element_name(item) for resource in children(item, "HostResource") if (resource.text or "").strip())
            media_references.update(_resources(item))
        elif _is_disk(item):
            disks.append(_attachment(item, controllers))
    return Hardware(
        system_type=text(child(section, "System"), "VirtualSystemType"),
        cpu_count=None if cpu is None else _cpu_count(cpu),
        cores_per_socket=1 if cpu is None else _cores_per_socket(cpu),
        memory_bytes=None if memory is None else _memory_bytes(memory),
        attachments=_by_unit(disks),
        nics=tuple(_nic(item, number) for number, item in enumerate(item for item in items if _type(item) == _NIC)),
        media=tuple(media),
        media_references=frozenset(media_references),
        passthrough=tuple(_element_name(item) for item in items if _PASSTHROUGH.search(text(item, "ResourceSubType"))),
        ports=tuple(
            _element_name(item) for item in items if _type(item) in _PORTS and (text(item, "Address") or _resources(item))
        ),
        tpm=any("tpm" in text(item, "ResourceSubType").lower() for item in items),
        settings=_settings(section),
    )


def _chosen_items(section: Element, configuration: str) -> list[Element]:
    """Leaves out range markers (`ovf:bound`) and items of other deployment options; an item of the chosen option replaces the
    general item with its InstanceID."""
    chosen: list[Element] = []
    for item in children(section, "Item", "StorageItem", "EthernetPortItem"):
        if attribute(item, "bound") not in ("", "normal"):
            continue
        wanted = attribute(item, "configuration").split()
        if wanted and configuration not in wanted:
            continue
        if wanted:
            chosen = [other for other in chosen if _instance(other) != _instance(item)]
        chosen.append(item)
        if len(chosen) > _ITEMS_MAX:
            raise MalformedArchive(f"the virtual hardware has over {_ITEMS_MAX} items; no VM has")
    return chosen


def _controllers(items: list[Element]) -> dict[str, _Controller]:
    """By instance id. A number in its name is the controller's address on its bus, if that address is free."""
    found: dict[str, _Controller] = {}
    taken: set[str] = set()
    for item in items:
        bus = _controller_bus(item)
        if bus is None:
            continue
        address = text(item, "Address") or text(item, "BusNumber")
        number = int(address) if _is_small_number(address) else 0
        while f"{bus}{number}" in taken:
            number += 1
        taken.add(f"{bus}{number}")
        found[_instance(item)] = _Controller(bus, f"{bus}{number}")
    return found


def _controller_bus(item: Element) -> "DiskBus | None":
    kind = _type(item)
    if kind not in _CONTROLLERS or _is_disk(item):
        return None
    # VMware writes NVMe, VirtualBox NVMe and virtio-scsi as type 20.
    subtype = text(item, "ResourceSubType").lower()
    if kind == 20:
        return next((bus for word, bus in _SUBTYPES if word in subtype), _CONTROLLERS[kind])
    return _CONTROLLERS[kind]


def _is_disk(item: Element) -> bool:
    """Disk drive (17), storage extent (19), logical disk (31); or any other item that names a disk of the package, such as
    VMware's NVDIMM (20)."""
    if _type(item) in (17, 19, 31):
        return True
    return any("/disk/" in (resource.text or "") for resource in children(item, "HostResource"))


def _attachment(item: Element, controllers: dict[str, _Controller]) -> Attachment:
    controller = controllers.get(text(item, "Parent"))
    unit = text(item, "AddressOnParent")
    connection = _xen_connection(text(item, "Connection"))
    if not unit and connection:
        unit = connection.get("device", "")
    order = text(item, "BootOrder")
    if not order and connection.get("bootable") == "true":
        order = "1"
    return Attachment(
        instance=_instance(item),
        references=_references(item),
        bus=None if controller is None else controller.bus,
        controller="" if controller is None else controller.name,
        unit=int(unit) if _is_small_number(unit) else None,
        name=_element_name(item),
        mode=_settings(item).get("backing.diskmode", ""),
        boot_order=int(order) if _is_small_number(order) and order != "0" else None,
        read_only=text(item, "IsReadOnly").lower() == "true" or connection.get("mode") in ("r", "ro"),
        plugged=text(item, "IsPlugged").lower() != "false",
    )


def _by_unit(disks: list[Attachment]) -> tuple[Attachment, ...]:
    """In the items' order, but those of one controller by their units, as firmware boots them: VirtualBox writes its items as
    the disks were attached, and an item of a deployment option comes after those that it is among."""
    ordered = list(disks)
    for controller in {disk.controller for disk in disks if disk.controller}:
        places = [place for place, disk in enumerate(disks) if disk.controller == controller and disk.unit is not None]
        sorted_ones = sorted((disks[place] for place in places), key=lambda disk: disk.unit or 0)
        for place, disk in zip(places, sorted_ones, strict=True):
            ordered[place] = disk
    return tuple(ordered)


def _references(item: Element) -> tuple[str, ...]:
    """Disk or file ids that the item may mean, the most likely first: `ovf:/disk/vmdisk1`, `/disk/vmdisk1`, oVirt's
    `group/image`, and the item's own id, as oVirt may use the disk's."""
    return tuple(dict.fromkeys([*_resources(item), _instance(item)]))


def _resources(item: Element) -> Iterator[str]:
    for resource in children(item, "HostResource"):
        match = _REFERENCE.fullmatch((resource.text or "").strip())
        if match is not None:
            yield match[2]
            yield match[2].rpartition("/")[2]


def _nic(item: Element, number: int) -> Adapter:
    mac = _MAC.fullmatch(text(item, "Address") or text(item, "MACAddress"))
    model = text(item, "ResourceSubType")
    slot = _settings(item).get("slotinfo.pcislotnumber", "")
    return Adapter(
        key=_instance(item) or f"nic{number}",
        mac=":".join(mac.groups()).lower() if mac else None,
        model=_OVIRT_NICS.get(model, model.lower()),
        network=text(item, "Connection"),
        connected=not any(text(item, name).lower() in ("false", "0") for name in _LINKED),
        slot=int(slot) if _is_small_number(slot) else None,
    )


def _cpu_count(item: Element) -> int | None:
    """None, where the item does not say it."""
    if not any(text(item, name) for name in ("VirtualQuantity", "num_of_sockets", "cpu_per_socket", "threads_per_cpu")):
        return None
    # oVirt counts sockets, cores and threads; its VirtualQuantity, where there is one, is their product.
    product = _count(item, "num_of_sockets", 1) * _count(item, "cpu_per_socket", 1) * _count(item, "threads_per_cpu", 1)
    return min(_count(item, "VirtualQuantity", product), _CPUS_MAX)


def _cores_per_socket(item: Element) -> int:
    cores = _count(item, "CoresPerSocket", _count(item, "cpu_per_socket", 1))
    # For the guest oVirt's threads of a core are processors, too; its versions before 4.0 do not count them.
    threads = _count(item, "threads_per_cpu", 1)
    # A topology that does not divide evenly is ignored: no hypervisor would start it.
    return next((each for each in (cores * threads, cores) if (_cpu_count(item) or 1) % each == 0), 1)


def _memory_bytes(item: Element) -> int | None:
    if not text(item, "VirtualQuantity"):
        return None
    # Without a unit everybody means MiB: OVF 0.9's default, which VirtualBox and others still use.
    size = quantity_bytes(text(item, "VirtualQuantity"), text(item, "AllocationUnits") or "MegaBytes", "the memory item")
    if not 0 < size <= _MEMORY_MAX_BYTES:
        raise MalformedArchive(f"the memory item: {size} bytes is not a size of a VM's memory")
    return size


def _count(item: Element, name: str, default: int) -> int:
    value = text(item, name)
    if not value:
        return default
    if not _is_small_number(value) or int(value) == 0:
        raise MalformedArchive(f"the processor item: {name} is {value[:40]!r}")
    return int(value)


def _settings(element: Element) -> dict[str, str]:
    """VMware's Config and ExtraConfig, XenServer's VirtualSystemOtherConfigurationData: keys in lower case."""
    found = {
        attribute(setting, "key").lower(): attribute(setting, "value") for setting in children(element, "Config", "ExtraConfig")
    }
    for setting in children(element, "VirtualSystemOtherConfigurationData"):
        name = attribute(setting, "Name") or text(setting, "Name")
        found[name.lower()] = attribute(setting, "Value") or text(setting, "Value")
    return found


def _xen_connection(connection: str) -> dict[str, str]:
    """XenServer: «device=0,bootable=true,mode=w,vdi=vdi-…»."""
    pairs = (part.partition("=") for part in connection.split(",") if "=" in part)
    return {key.strip().lower(): value.strip().lower() for key, _, value in pairs}


def _type(item: Element) -> int:
    value = text(item, "ResourceType")
    return int(value) if _is_small_number(value) else -1


def _instance(item: Element) -> str:
    return text(item, "InstanceID") or text(item, "InstanceId")


def _element_name(item: Element) -> str:
    return text(item, "ElementName") or text(item, "Caption") or text(item, "ResourceSubType")


def _is_small_number(value: str) -> bool:
    return value.isascii() and value.isdigit() and len(value) <= 6
