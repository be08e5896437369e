"""The settings of a machine at a platform that reach into its host: programs, files, devices and folders there, in the
platform's words. None of them is taken over; they are named, so that none is lost silently.
"""

import re
from collections.abc import Iterator, Mapping
from xml.etree.ElementTree import Element

from synvirt.machines.texts import clean, is_true
from synvirt.xml_document import attribute, child, children

# VMware's keys, in lower case: ports that are files, pipes, devices or addresses of the host, and shared folders.
_VMWARE = re.compile(r"((?:serial|parallel)\d{1,2}\.(?:filename|vspc)|sharedfolder\d{1,3}\.hostpath)")
# XenAPI's: what starts the machine, and what replaces the host's own device model.
_XEN = ("PV_kernel", "PV_ramdisk", "PV_bootloader")
_XEN_PLATFORM = ("device-model", "firmware", "loader")
# Windows' names of things that are no files: a named pipe of this host or another, a device, a console.
_WINDOWS = re.compile(r"\\\\(?:[.?]\\|[^\\]+\\pipe\\)", re.IGNORECASE)


def vmware(entries: Mapping[str, str]) -> list[str]:
    """`entries`: of a .vmx or an OVF's ExtraConfig. Only devices that are present are reported."""
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
            # VirtualBox's hidden access to its devices: any file as a disk, any firmware, any ROM.
            if attribute(item, "name").startswith("VBoxInternal"):
                yield clean(attribute(item, "name"))


# Keys of a real configuration are nested up to six levels deep.
_HYPERV_DEPTH_MAX = 32


def hyperv(keys: Mapping[str, object]) -> list[str]:
    """`keys`: of a Hyper-V configuration. Any name counts, as there is no public list. A drive (`pathname`) is reported as a
    disk without a file. A key that is deeper than any real one is reported, and not looked into."""
    found: list[str] = []
    level: list[tuple[str, Mapping[str, object]]] = [("", keys)]
    seen: set[int] = set()
    for depth in range(_HYPERV_DEPTH_MAX + 1):
        inner: list[tuple[str, Mapping[str, object]]] = []
        for above, node in level:
            for key, value in node.items():
                if isinstance(value, Mapping) and depth < _HYPERV_DEPTH_MAX:
                    if id(value) not in seen:
                        seen.add(id(value))
                        inner.append((_named(above, key), value))
                elif isinstance(value, Mapping) or (isinstance(value, str) and key != "pathname" and _names_device(value)):
                    found.append(_named(above, key))
        level = inner
    return found


def _named(above: str, key: str) -> str:
    return clean(f"{above}.{key}".lstrip("."))


def _names_device(value: str) -> bool:
    return _WINDOWS.match(value.strip()) is not None


def xen(vm: Mapping[str, object], platform: Mapping[str, object]) -> list[str]:
    """`vm`: XenAPI's record. Programs of XenServer itself (pygrub, qemu-upstream-compat) appear as a name, files as a path."""
    found = [name for name in _XEN if "/" in str(vm.get(name) or "")]
    return found + [f"platform:{name}" for name in _XEN_PLATFORM if "/" in str(platform.get(name) or "")]
