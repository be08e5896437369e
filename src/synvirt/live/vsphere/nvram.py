"""UEFI variables as VMware's firmware keeps them, in the VM's `.nvram` file. No I/O.

    «MRVN», CMOS, its own state … │ «EFI_NV» … │ «VMWNVRAM» │ u32 │ bytes from «VMWNVRAM» on │ variables │ 0xff …
    a variable: vendor │ attributes │ bytes of name and data │ bytes of name │ name in UTF-16, with its end │ data

VMware publishes no description. What others wrote reads the region and its records alike (virt-firmware's
`varstore/vmware.py` for one); none was tried here on a file of a real host. So whatever does not fit exactly is refused, and
stays behind. Of a signed variable they say only that 40 bytes lead its data. We read those as the UEFI specification has what
a variable was signed with: EFI_TIME, then a WIN_CERTIFICATE, which says its own length
(UEFI 2.10, EFI_VARIABLE_AUTHENTICATION_2). Numbers are little-endian.
"""

import struct
from typing import Final
from uuid import UUID

from synvirt.errors import Internal
from synvirt.machines.ovmf_store import AUTHENTICATED_BY_TIME, UefiVariable, has_keys, store

# Those of ESXi have 74 to 270 KiB.
BYTES_MAX: Final = 4 << 20
NAME_BYTES_MAX: Final = 4096
_MAGIC: Final = b"VMWNVRAM"
_REGION: Final = struct.Struct("<8sII")
_VARIABLE: Final = struct.Struct("<16sIII")
_TIME_BYTES: Final = 16
# WIN_CERTIFICATE with the GUID that says which one: no certificate follows, as it was checked when the variable was written.
_CERTIFICATE_BYTES_MIN: Final = 24


def as_store(content: bytes, *, secure_boot: bool) -> bytes | None:
    """As OVMF reads them. None where the file has none, as of a guest with BIOS or in an encrypted home; and where the VM boots
    by Secure Boot but has no platform key, so that the caller enrols keys of his own. Internal."""
    found = variables(content)
    if found is None or (secure_boot and not has_keys(found)):
        return None
    return store(found, secure_boot=secure_boot)


def variables(content: bytes) -> list[UefiVariable] | None:
    """None: no region of variables. Internal: not in the form that is known."""
    at = content.find(_MAGIC)
    if at < 0:
        return None
    try:
        return _variables(content, at)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise Internal("the UEFI variables of the .nvram file are not in the form that is known") from error


def _variables(content: bytes, start: int) -> list[UefiVariable]:
    """ValueError, struct.error, UnicodeDecodeError. Of a variable that is there twice the later one counts."""
    _, _, length = _REGION.unpack_from(content, start)
    at, end = start + _REGION.size, start + length
    if not at <= end <= len(content):
        raise ValueError(f"a region of {length} bytes")
    found: dict[tuple[bytes, str], UefiVariable] = {}
    while at < end:
        vendor, attributes, both, of_name = _VARIABLE.unpack_from(content, at)
        at += _VARIABLE.size
        if not 2 < of_name <= min(both, NAME_BYTES_MAX) or of_name % 2 or both > end - at:
            raise ValueError(f"a variable of {both} bytes with a name of {of_name}")
        name = content[at : at + of_name].decode("utf-16-le")
        if name[-1] != "\0" or "\0" in name[:-1]:
            raise ValueError("a name without its end")
        written, data = _unsigned(attributes, content[at + of_name : at + both])
        found[vendor, name] = UefiVariable(UUID(bytes_le=vendor), name[:-1], attributes, data, written)
        at += both
    return list(found.values())


def _unsigned(attributes: int, data: bytes) -> tuple[bytes, bytes]:
    """When it was signed, and what."""
    if not attributes & AUTHENTICATED_BY_TIME:
        return bytes(_TIME_BYTES), data
    (certificate,) = struct.unpack_from("<I", data, _TIME_BYTES)
    if not _CERTIFICATE_BYTES_MIN <= certificate <= len(data) - _TIME_BYTES:
        raise ValueError(f"a certificate of {certificate} bytes")
    return data[:_TIME_BYTES], data[_TIME_BYTES + certificate :]
