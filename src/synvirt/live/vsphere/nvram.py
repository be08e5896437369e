"""UEFI variables in the form of VMware's firmware, in the VM's `.nvram` file. No I/O.

    «MRVN», CMOS, its own state … │ «EFI_NV» … │ «VMWNVRAM» │ u32 │ bytes from «VMWNVRAM» on │ variables │ 0xff …
    a variable: vendor │ attributes │ bytes of name and data │ bytes of name │ name in UTF-16, with its end │ data

VMware publishes no description. Other readers agree on the region and its records (for example virt-firmware's
`varstore/vmware.py`); none was tried here on a file of a real host. So anything that does not fit exactly is refused, and is
not copied. About a signed variable they only say that 40 bytes precede its data. We read those in the UEFI specification's form
of a signature: EFI_TIME, then a WIN_CERTIFICATE, which has its own length (UEFI 2.10, EFI_VARIABLE_AUTHENTICATION_2). Numbers
are little-endian.
"""

import struct
from typing import Final
from uuid import UUID

from synvirt.errors import Internal
from synvirt.machines.ovmf_store import AUTHENTICATED_BY_TIME, UefiVariable, has_keys, store

# Files of ESXi have 74 to 270 KiB.
BYTES_MAX: Final = 4 << 20
NAME_BYTES_MAX: Final = 4096
_MAGIC: Final = b"VMWNVRAM"
_REGION: Final = struct.Struct("<8sII")
_VARIABLE: Final = struct.Struct("<16sIII")
_TIME_BYTES: Final = 16
# WIN_CERTIFICATE with the GUID of its kind: no certificate follows, as it was checked when the variable was written.
_CERTIFICATE_BYTES_MIN: Final = 24


def as_store(content: bytes, *, secure_boot: bool) -> bytes | None:
    """The store in OVMF's form. None, where the file has none (a guest with BIOS, or an encrypted home), or where the VM uses
    Secure Boot but has no platform key, so that the caller enrols its own keys. Internal."""
    found = variables(content)
    if found is None or (secure_boot and not has_keys(found)):
        return None
    return store(found, secure_boot=secure_boot)


def variables(content: bytes) -> list[UefiVariable] | None:
    """None: no region of variables. Internal: not in the known form."""
    at = content.find(_MAGIC)
    if at < 0:
        return None
    try:
        return _variables(content, at)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise Internal("the UEFI variables of the .nvram file are not in the form that is known") from error


def _variables(content: bytes, start: int) -> list[UefiVariable]:
    """ValueError, struct.error, UnicodeDecodeError. If a variable is there twice, the later one counts."""
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
    """The time of the signature, and the signed data."""
    if not attributes & AUTHENTICATED_BY_TIME:
        return bytes(_TIME_BYTES), data
    (certificate,) = struct.unpack_from("<I", data, _TIME_BYTES)
    if not _CERTIFICATE_BYTES_MIN <= certificate <= len(data) - _TIME_BYTES:
        raise ValueError(f"a certificate of {certificate} bytes")
    return data[:_TIME_BYTES], data[_TIME_BYTES + certificate :]
