"""Traits of a machine in the words of OVF exporters: the standard has no words for firmware, PV guests or MAC addresses."""

import re
from collections.abc import Iterator
from xml.etree.ElementTree import Element

from synvirt.machines import card_names
from synvirt.machines.smbios import serial_of
from synvirt.machines.texts import is_true, uuid_of
from synvirt.model.machine import Nic
from synvirt.offline.ovf.hardware import Adapter, Hardware
from synvirt.offline.vbox import machine as virtualbox
from synvirt.xml_document import attribute, child, text

# oVirt's names of the zone in which most guests' clocks are.
_UTC = frozenset({"Etc/GMT", "GMT Standard Time", "UTC", "Etc/UTC"})


def is_paravirtualised(hardware: Hardware) -> bool:
    """XenServer's words: a machine with hardware (HVM) has a boot policy, a PV guest a Xen boot loader or a kernel."""
    settings = hardware.settings
    if settings.get("hvm_boot_policy"):
        return False
    return bool(settings.get("pv_bootloader") or settings.get("pv_kernel")) or hardware.system_type.lower().startswith("xen-")


def firmware(root: Element, system: Element, machine: Element | None, hardware: Hardware) -> tuple[bool, bool]:
    """(UEFI?, Secure Boot?) in VMware's, XenServer's, VirtualBox's and oVirt's words. A BIOS that is stated has no Secure Boot:
    vSphere and XenServer keep the option of a VM whose firmware was changed back."""
    settings = hardware.settings
    boot = settings.get("hvm_boot_params", "").lower()
    secure = is_true(settings.get("bootoptions.efisecurebootenabled")) or is_true(settings.get("uefi.secureboot.enabled"))
    stated = settings.get("firmware", "").lower()
    if stated == "bios" or "firmware=bios" in boot:
        return False, False
    uefi = stated in ("efi", "uefi") or "firmware=uefi" in boot
    secure = secure or "secureboot=true" in settings.get("platform", "").lower()
    uefi = uefi or virtualbox.is_uefi(machine)
    bios_type = text(system, "BiosType")
    if bios_type:
        # oVirt renumbered in 4.4: «the cluster's default» is now 0.
        version = re.match(r"(\d{1,4})\.(\d{1,4})", attribute(root, "version"))
        first = 3 if version and (int(version[1]), int(version[2])) >= (4, 4) else 2
        uefi = uefi or bios_type in (str(first), str(first + 1))
        secure = secure or bios_type == str(first + 1)
    return uefi or secure, secure


def states_firmware(system: Element, hardware: Hardware) -> bool:
    """VirtualBox omits BIOS, its default, in its own part; the standard has no word for firmware."""
    stated = "firmware" in hardware.settings or "firmware=" in hardware.settings.get("hvm_boot_params", "").lower()
    return stated or bool(text(system, "BiosType")) or child(system, "Machine") is not None


def ovirt_serial(system: Element) -> str | None:
    """oVirt's policies for the serial number: 0 is the host's, 1 the VM's id, 2 one that a person gave. Without one the
    cluster's counts, which the file does not have."""
    match text(system, "SerialNumberPolicy"):
        case "1":
            return uuid_of(attribute(system, "id"))
        case "2":
            return serial_of(text(system, "CustomSerialNumber"))
    return None


def ovirt_left_out(system: Element, *, windows: bool) -> Iterator[str]:
    """What a guest of oVirt has and not here: its host's serial number, and a clock in a zone, where here a Windows has the
    local time and no other guest."""
    if text(system, "SerialNumberPolicy") == "0":
        yield "its host's serial number"
    zone = text(system, "TimeZone")
    if zone and (windows or zone not in _UTC):
        yield f"a clock in {zone}"


def nics(hardware: Hardware, machine: Element | None) -> tuple[Nic, ...]:
    """VirtualBox writes an item for each enabled adapter, in order; the MAC addresses, and which cables are pulled, only in its
    own part."""
    found = tuple(_nic(adapter) for adapter in hardware.nics)
    adapters = virtualbox.nics(machine)
    if len(adapters) != len(found):
        return found
    return tuple(
        nic.model_copy(
            update={
                "mac": nic.mac or adapter.mac,
                "connected": nic.connected and adapter.connected,
                "linux_name": adapter.linux_name,
            }
        )
        for nic, adapter in zip(found, adapters, strict=True)
    )


def _nic(adapter: Adapter) -> Nic:
    fields = adapter._asdict()
    slot = fields.pop("slot")
    return Nic(**fields, linux_name=card_names.vmware(slot))
