"""OVF descriptions (DMTF DSP0243 1.x and 2.x, and VMware's 0.9 before it) as ovftool, VirtualBox, oVirt, XenServer and others
write them → a VmManifest, and the file of each of its disks. `envelope` has the parts of a description, `disks` its disks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from synvirt.machines import concerns, reaching, smbios
from synvirt.machines.guest_os import guest_os
from synvirt.machines.texts import clean, uuid_of
from synvirt.model.machine import Concern, Disk, DiskBus, GuestOs, VmManifest
from synvirt.offline.ovf import envelope
from synvirt.offline.ovf import traits as ovf_traits
from synvirt.offline.ovf.disks import Declared, Parsed
from synvirt.offline.ovf.hardware import Attachment, Hardware
from synvirt.offline.vbox import machine as virtualbox
from synvirt.sizes import GIB
from synvirt.xml_document import attribute, child, children, text, wrong_encoding


@dataclass(frozen=True, slots=True)
class Description:
    """The manifest of a parsed OVF. `states_firmware`: BIOS is stated, not assumed."""

    manifest: VmManifest
    states_firmware: bool


def described(parsed: Parsed, data: bytes) -> Description:
    """`data`: what was parsed."""
    root, system, _ = parsed.envelope
    disks, disk_concerns = _attached(parsed, _boot_items(root, system))
    declared_encoding = wrong_encoding(data)
    if declared_encoding is not None:
        disk_concerns.append(concerns.wrong_encoding(declared_encoding))
    manifest = _manifest(root, system, parsed.hardware, disks, disk_concerns, said_of_disks=_said_of_disks(parsed, disks))
    return Description(manifest, ovf_traits.states_firmware(system, parsed.hardware))


def _boot_items(root: Element, system: Element) -> list[str]:
    """Instance ids of disks in boot order: VMware's BootOrderSection, «8 9»."""
    for owner in (system, root):
        for section in children(owner, "BootOrderSection"):
            if attribute(section, "type") in ("", "disk"):
                return attribute(section, "instanceId").split()
    return []


def _attached(parsed: Parsed, boot_items: list[str]) -> tuple[tuple[Disk, ...], list[Concern]]:
    """Each disk at a place of its own."""
    disks: dict[str, Disk] = {}
    found: list[Concern] = []
    places: set[tuple[str, int]] = set()
    default: DiskBus = "ide" if parsed.hardware.system_type.startswith(("xen", "hvm")) else "scsi"
    for item, disk in parsed.attached():
        key = disk.key
        if key in disks:
            twice = concerns.disk_named_twice(key)
            found += [] if twice in found else [twice]
            continue
        bus = disk.bus or (item.bus if item and item.bus else default)
        controller = item.controller if item and item.controller else f"{bus}0"
        unit = item.unit if item and item.unit is not None else 0
        while (controller, unit) in places:
            unit += 1
        places.add((controller, unit))
        disks[key] = Disk(
            key=key,
            label=_label(item, key, disks),
            capacity_bytes=disk.capacity_bytes,
            used_bytes=disk.used_bytes,
            format=disk.source.format or "raw",
            bus=bus,
            controller=controller,
            unit=unit,
            boot_order=_boot_order(item, disk, boot_items),
            source_path=disk.source.file.href if disk.source.file else "",
        )
        if item is None:
            found.append(concerns.unattached_disk(key))
        elif item.mode.startswith("independent"):
            found.append(concerns.independent_disk(key, item.mode))
        if disk.shared:
            found.append(concerns.shared_disk(key))
    return tuple(disks.values()), found


def _said_of_disks(parsed: Parsed, disks: tuple[Disk, ...]) -> list[str]:
    """What a disk there is, and here not: only read, or taken out of its guest while it stays the VM's."""
    labels = {disk.key: disk.label for disk in disks}
    said = []
    for item, disk in parsed.attached():
        label = labels[disk.key]
        if disk.read_only or (item is not None and item.read_only):
            said.append(f"{label} can only be read")
        if item is not None and not item.plugged:
            said.append(f"{label} is not plugged in")
    return list(dict.fromkeys(said))


def _boot_order(item: Attachment | None, disk: Declared, boot_items: list[str]) -> int | None:
    if item is not None and item.instance in boot_items:
        return boot_items.index(item.instance) + 1
    if item is not None and item.boot_order is not None:
        return item.boot_order
    return 1 if disk.boot else None


def _label(item: Attachment | None, key: str, others: Mapping[str, Disk]) -> str:
    """The exporter's name of the disk. Two disks of one VM never share a label, as it names their volumes."""
    label = clean(item.name if item and item.name else key)
    taken = {disk.label for disk in others.values()}
    return label if label not in taken else f"{label} ({clean(key)})"


def _uuid_reversed_for(machine: Element | None, hardware: Hardware) -> smbios.Families:
    """Who reads the UUID in reverse, by the product that wrote the file."""
    if machine is not None:
        return virtualbox.uuid_reversed_for(machine)
    if hardware.settings.get("uuid.bios"):
        return smbios.of_vmware(hardware.system_type)
    return smbios.WINDOWS if hardware.system_type.lower().startswith(("xen", "hvm")) else ()


def _manifest(
    root: Element,
    system: Element,
    hardware: Hardware,
    disks: tuple[Disk, ...],
    disk_concerns: list[Concern],
    *,
    said_of_disks: list[str],
) -> VmManifest:
    machine = child(system, "Machine")  # VirtualBox puts its own description of the VM beside OVF's
    uefi, secure_boot = ovf_traits.firmware(root, system, machine, hardware)
    tpm = hardware.tpm or virtualbox.has_tpm(machine)
    guest = _guest(system, machine)
    found = list(disk_concerns)
    if not disks:
        found.append(concerns.no_disks())
    for missing, value in (("processors", hardware.cpu_count), ("memory", hardware.memory_bytes)):
        if value is None:
            found.append(concerns.hardware_incomplete(missing))
    found += concerns.of_machine(uefi=uefi, secure_boot=secure_boot, tpm=tpm, guest=guest)
    found += [concerns.passthrough_device(name) for name in dict.fromkeys(hardware.passthrough)]
    if reaches := [*reaching.vmware(hardware.settings), *reaching.virtualbox(machine), *hardware.ports]:
        found.append(concerns.left_out(reaches))
    windows = guest.family == "windows"
    if settings := [
        *smbios.vmware_left_out(hardware.settings),
        *virtualbox.settings_left_out(machine, windows=windows),
        *ovf_traits.ovirt_left_out(system, windows=windows),
        *said_of_disks,
    ]:
        found.append(concerns.settings_left_out(list(map(clean, settings))))
    if ovf_traits.is_paravirtualised(hardware):
        found.append(concerns.paravirtualised())
    if hardware.media:
        found.append(concerns.removable_media_left_out(hardware.media))
    name = envelope.system_name(system)
    return VmManifest(
        vm_id=clean(attribute(system, "id")) or name,
        name=name,
        uuid=uuid_of(*virtualbox.identities(machine), hardware.settings.get("uuid.bios", ""), attribute(system, "id")),
        uuid_reversed_for=_uuid_reversed_for(machine, hardware),
        serial=virtualbox.serial(machine)
        or ovf_traits.ovirt_serial(system)
        or smbios.vmware_serial(uuid_of(hardware.settings.get("uuid.bios", "")), hardware.settings),
        firmware="uefi" if uefi else "bios",
        secure_boot=secure_boot,
        tpm=tpm,
        cpu_count=hardware.cpu_count or 1,
        cores_per_socket=hardware.cores_per_socket,
        memory_bytes=hardware.memory_bytes or GIB,
        guest_os=guest,
        cbt_reason="an offline import is a copy of files: nothing changes in them",
        disks=disks,
        nics=ovf_traits.nics(hardware, machine),
        concerns=tuple(found),
    )


def _guest(system: Element, machine: Element | None) -> GuestOs:
    section = envelope.section(system, "OperatingSystemSection")
    if section is None:
        return guest_os(vendor_id=attribute(machine, "OSType"))
    virtualbox = text(section, "OSType")
    return guest_os(
        cim_id=attribute(section, "id"),
        vendor_id=clean(attribute(section, "osType") or virtualbox or attribute(machine, "OSType")),
        description=clean(text(section, "Description")),
    )
