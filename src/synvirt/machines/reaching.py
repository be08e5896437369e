"""What in a platform's settings of a machine reaches into its host: programs, files, devices and folders there, in the
platform's words. Nothing of it is taken over; it is named, so that nobody misses it in silence.
"""

import re
from collections.abc import Iterator, Mapping
from xml.etree.ElementTree import Element

from synvirt.machines.texts import clean, is_true
from synvirt.xml_document import attribute, child, children

# VMware's keys, in lower case: ports that are files, pipes, devices or addresses of the host, and folders that are shared.
_VMWARE = re.compile(r"((?:serial|parallel)\d{1,2}\.(?:filename|vspc)|sharedfolder\d{1,3}\.hostpath)")
# XenAPI's: what starts the machine, and what takes the place of the host's own device model.
_XEN = ("PV_kernel", "PV_ramdisk", "PV_bootloader")
_XEN_PLATFORM = ("device-model", "firmware", "loader")
# Windows' names of what is no file: a named pipe of this host or another, a device, a console.
_WINDOWS = re.compile(r"\\\\(?:[.?]\\|[^\\]+\\pipe\\)", re.IGNORECASE)


def vmware(entries: Mapping[str, str]) -> list[str]:
    """`entries`: of a .vmx or an OVF's ExtraConfig. Those of devices that are there."""
    return sorted(
        key
        for key, value in entries.items()
        if value and _VMWARE.fullmatch(key) and is_true(entries.get(f"{key.partition('.')[0]}.present", "true"))
    )


def virtualbox(machine: Element | None) -> list[str]:
    """`machine`: VirtualBox's element of that name."""
    return [] if machine is None else list(dict.fromkeys(_virtualbox(machine)))


def _virtualbox(machine: Element) -> Iterator[str]:
    hardware = child(machine, "Hardware")
    for name in ("UART", "LPT"):
        section = child(hardware, name)
        for port in () if section is None else children(section, "Port"):
            if attribute(port, "path"):
                yield f"{name} {clean(attribute(port, 'slot'))}".strip()
    for above in (machine, hardware):
        folders, extra = child(above, "SharedFolders"), child(above, "ExtraData")
        for folder in () if folders is None else children(folders, "SharedFolder"):
            yield f"shared folder {clean(attribute(folder, 'name'))}"
        for item in () if extra is None else children(extra, "ExtraDataItem"):
            # VirtualBox's back door to its devices: any file as a disk, any firmware, any ROM.
            if attribute(item, "name").startswith("VBoxInternal"):
                yield clean(attribute(item, "name"))


# Keys of a real configuration lie in up to six others.
_HYPERV_DEPTH_MAX = 32


def hyperv(keys: Mapping[str, object]) -> list[str]:
    """`keys`: of a Hyper-V configuration, whatever their names: there is no public list of those. A drive (`pathname`) is
    reported as a disk that has no file. What lies deeper than any real key is reported, and not looked at."""
    found: list[str] = []
    level: list[tuple[str, Mapping[str, object]]] = [("", keys)]
    seen: set[int] = set()
    for depth in range(_HYPERV_DEPTH_MAX + 1):
        inner: list[tuple[str, Mapping[str, object]]] = []
        for above, node in level:
            for key, value in node.items():
                name = clean(f"{above}.{key}".lstrip("."))
                if isinstance(value, Mapping) and depth < _HYPERV_DEPTH_MAX:
                    if id(value) not in seen:
                        seen.add(id(value))
                        inner.append((name, value))
                elif isinstance(value, Mapping) or (isinstance(value, str) and key != "pathname" and _names_device(value)):
                    found.append(name)
        level = inner
    return found


def _names_device(value: str) -> bool:
    return _WINDOWS.match(value.strip()) is not None


def xen(vm: Mapping[str, object], platform: Mapping[str, object]) -> list[str]:
    """`vm`: XenAPI's record. What XenServer has itself (pygrub, qemu-upstream-compat) comes as a name, a file as its path."""
    found = [name for name in _XEN if "/" in str(vm.get(name) or "")]
    return found + [f"platform:{name}" for name in _XEN_PLATFORM if "/" in str(platform.get(name) or "")]
