"""The UUID and the serial number that a guest's firmware shows.

SMBIOS has the UUID as sixteen bytes (DSP0134 section 7.2.1). Since version 2.6 its first three fields are little-endian;
before, each firmware chose. Windows reads them as little-endian always, Linux and others as big-endian up to version 2.5. So
guests may read another UUID than the platform names: the bytes of each of the first three fields are in reverse order,
71404d56-... for 564d4071-....

    platform                     bytes           version   read in reverse by
    VMware, hardware up to 12    big-endian      2.4       Windows             (Broadcom KB 344089)
    VMware, hardware from 13 on  big-endian      2.7       all                 (VMware KB 53609)
    Xen                          big-endian      2.4       Windows             (AWS, «identify_ec2_instances»)
    VirtualBox                   big-endian      2.5       Windows
    VirtualBox, newer machines   little-endian   2.5       all but Windows     (VBoxManage modifyvm --system-uuid-le)
    Hyper-V, generation 1        little-endian   2.3       Linux               (virt-who, pull request 421)
    Hyper-V, generation 2; QEMU  little-endian   2.8, 3    nobody

QEMU shows every guest the domain's UUID as it is. So the domain of a guest that read its own in reverse gets the reversed one.
"""

import re
from collections.abc import Iterator, Mapping

from synvirt.machines.texts import is_true
from synvirt.model.machine import Family

Families = tuple[Family, ...]

WINDOWS: Families = ("windows",)
ALL: Families = ("windows", "linux", "other")
_VMWARE_SINCE_2_7 = 13
_VMWARE = re.compile(r"(?:vmx-)?(\d{1,3})", re.ASCII)
# Strings of SMBIOS end with a zero byte and have no bound (DSP0134 section 6.1.3); one from a file has.
_STRING = re.compile(r"[\x20-\x7e]{1,255}")


def of_vmware(version: str) -> Families:
    """Who reads `uuid.bios` in reverse. `version`: of the virtual hardware, `vmx-19` or `19`."""
    found = _VMWARE.fullmatch(version.strip().lower())
    return ALL if found and int(found[1]) >= _VMWARE_SINCE_2_7 else WINDOWS


def of_virtualbox(*, little_endian: bool) -> Families:
    """`little_endian`: SmbiosUuidLittleEndian in the machine's settings."""
    return ("linux", "other") if little_endian else WINDOWS


def of_hyperv(*, generation: int) -> Families:
    """Where nothing says which system the guest has, it is rather Windows, which reads its own as it is."""
    return ("linux",) if generation == 1 else ()


def serial_of(written: str) -> str | None:
    """A serial number; None, where it is none that a firmware can show."""
    return text if _STRING.fullmatch(text := written.strip()) else None


def vmware_serial(uuid: str | None, settings: Mapping[str, str]) -> str | None:
    """VMware's firmware makes the serial number from `uuid.bios`: `VMware-42 3e fd 65 a7 3d e1 59-a5 6d dd 25 28 9f 8b 0c`
    (kubev2v/forklift, pull request 2188), unless the settings give one. Not known is the host's, and the short one that is made
    for macOS. `settings`: of a .vmx or ExtraConfig, keys in lower case."""
    if is_true(settings.get("serialnumber.reflecthost")):
        return None
    if given := settings.get("serialnumber"):
        return serial_of(given)
    if is_true(settings.get("smbios.use12charserialnumber")):
        return None
    digits = (uuid or "").replace("-", "").lower()
    if not re.fullmatch(r"[0-9a-f]{32}", digits):
        return None
    return f"VMware-{_pairs(digits[:16])}-{_pairs(digits[16:])}"


def ahv_serial(vm_id: str, bios_uuid: str | None) -> str | None:
    """AHV starts QEMU with the VM's id in capital letters (`-uuid b329c3cb-… -smbios type=1,manufacturer=Nutanix,product=AHV,
    serial=B329C3CB-…`). None, where the guest sees another UUID than that: which of the two it then is, no source says."""
    return vm_id.upper() if re.fullmatch(r"[0-9a-f-]{36}", vm_id) and bios_uuid in (None, vm_id) else None


def vmware_left_out(settings: Mapping[str, str]) -> Iterator[str]:
    """The settings of VMware's SMBIOS that the guest does not have here: values of its own, or of its host, which licences of a
    maker ask for. `settings`: as for `vmware_serial`."""
    yield from (key for key in sorted(settings) if key.endswith(".reflecthost") and is_true(settings[key]))
    yield from (key for key in ("board-id", "hw.model", "smbios.assettag") if settings.get(key))
    if is_true(settings.get("smbios.use12charserialnumber")) and not settings.get("serialnumber"):
        yield "smbios.use12charserialnumber"


def _pairs(digits: str) -> str:
    return " ".join(digits[at : at + 2] for at in range(0, len(digits), 2))
