"""The settings of a libvirt domain that the domain made here has not, in short words. Pure.

Known are those that the domain here has, too, those with a concern of their own, and those of the old host alone. Everything
else is named, also what a newer libvirt has: so none is lost silently. What reaches into its host is not looked at: the caller
has rebuilt the domain without it (kvm/foreign_domain).
"""

from collections.abc import Iterator
from typing import Final
from xml.etree.ElementTree import Element

from synvirt.machines.texts import clean

_TOP: Final = frozenset(
    (
        *("name", "uuid", "title", "description", "metadata", "memory", "currentMemory", "vcpu", "os", "devices"),
        *("features", "cpu", "clock", "sysinfo", "on_poweroff", "on_reboot", "on_crash"),  # below
        # A machine on a new host gets a new genid, as it must; the others are how the old host runs it.
        *("genid", "pm", "resource", "seclabel", "on_lockfailure"),
    )
)
_DEVICES: Final = frozenset(
    (
        *("disk", "interface", "controller", "serial", "console", "channel", "video", "tpm"),
        # How the old host shows it; and what every domain here has.
        *("emulator", "input", "graphics", "audio", "hub", "redirdev", "memballoon", "rng"),
    )
)
_DISK: Final = frozenset(
    (
        *("driver", "source", "target", "boot", "address", "alias", "backingStore", "mirror", "blockio"),
        *("serial", "wwn", "vendor", "product", "shareable", "readonly", "transient"),  # concerns of their own
    )
)
_CARD: Final = frozenset(("source", "mac", "model", "link", "target", "boot", "address", "alias", "rom", "driver"))
_FEATURES: Final = frozenset(("acpi", "apic", "pae", "smm", "hyperv", "vmport"))
_ENDS: Final = {"on_poweroff": "destroy", "on_reboot": "restart", "on_crash": "destroy"}
_CHANNELS: Final = frozenset(("", "org.qemu.guest_agent.0", "com.redhat.spice.0", "org.spice-space.webdav.0"))


def not_taken_over(domain: Element, *, windows: bool) -> list[str]:
    """`windows`: whether its guest is a Windows, whose clock is the local time here."""
    found = [*_of_machine(domain), *_of_clock(domain, "localtime" if windows else "utc"), *_of_devices(domain)]
    return list(dict.fromkeys(clean(one) for one in found))


def _of_machine(domain: Element) -> Iterator[str]:
    yield from (tag for child in domain if isinstance(tag := child.tag, str) and tag not in _TOP)
    for kind in domain.iterfind("sysinfo/*"):
        for entry in kind.iterfind("entry"):
            # The serial number is taken over; libvirt lets no UUID be different from the domain's own.
            if (kind.tag, entry.get("name")) not in (("system", "uuid"), ("system", "serial")):
                yield f"sysinfo {kind.tag} {entry.get('name', '')}"
    if domain.find("os/smbios[@mode='host']") is not None:
        yield "the SMBIOS of its host"
    vcpu = domain.find("vcpu")
    if vcpu is not None and vcpu.get("current", vcpu.text) != vcpu.text:
        yield f"up to {vcpu.text} processors"
    if vcpu is not None and vcpu.get("cpuset"):
        yield "processors of its host (cpuset)"
    if domain.find("cpu/numa") is not None:
        yield "NUMA nodes"
    yield from (f"features {child.tag}" for child in domain.iterfind("features/*") if child.tag not in _FEATURES)
    yield from (f"{tag} {here}" for tag, usual in _ENDS.items() if (here := domain.findtext(tag, usual).strip()) != usual)


def _of_clock(domain: Element, here: str) -> Iterator[str]:
    clock = domain.find("clock")
    if clock is None or (offset := clock.get("offset", "utc")) == here:
        return
    if offset == "variable" and clock.get("basis", "utc") == here and clock.get("adjustment", "0") in ("0", "reset"):
        return
    more = (clock.get(name) for name in ("timezone", "basis", "adjustment", "start"))
    yield " ".join(("clock", offset, *filter(None, more)))


def _of_devices(domain: Element) -> Iterator[str]:
    for device in domain.iterfind("devices/*"):
        tag, model, target = device.tag, device.find("model"), device.find("target")
        if tag not in _DEVICES:
            yield " ".join(filter(None, (tag, device.get("model"))))
        elif tag == "disk" and device.get("device", "disk") == "disk":
            key = target.get("dev", "") if target is not None else ""
            yield from (f"{child.tag} of disk {key}" for child in device if child.tag not in _DISK)
        elif tag == "interface":
            mac = device.find("mac")
            name = mac.get("address", "") if mac is not None else ""
            yield from (f"{child.tag} of card {name}".strip() for child in device if child.tag not in _CARD)
        elif tag == "video" and model is not None and model.get("type", "vga") not in ("vga", "none"):
            yield f"video {model.get('type')}"
        elif tag == "tpm" and device.find("backend[@version='1.2']") is not None:
            yield "tpm version 1.2"
        elif tag == "serial" and target is not None and target.get("port", "0") != "0":
            yield f"serial port {target.get('port')}"
        elif tag == "channel" and target is not None and target.get("name", "") not in _CHANNELS:
            yield f"channel {target.get('name')}"
