"""UEFI variables from a VM's `.nvram` file to OVMF's store."""

import random
import struct
from collections.abc import Iterable
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import DiskReadFailed, Internal
from synvirt.live import KeepsUefiVariables
from synvirt.live.vsphere import nvram
from synvirt.live.vsphere.adapter import VimApi
from synvirt.machines import ovmf_store
from synvirt.machines.ovmf_store import GLOBAL, SECURITY
from tests.contracts.live import in_session
from tests.fakes.vcenter import VCenter

# The simulator is built by whoever comes first.
pytestmark = pytest.mark.timeout(600)

VM = "vm-57"
NV_BS_RT = 7
SIGNED = 0x27
WRITTEN = struct.pack("<HBBBBBBIhBB", 2019, 8, 20, 0, 0, 0, 0, 0, 0, 0, 0)
PKCS7 = UUID("4aafd29d-68df-49ee-8aa9-347d375665a7")
# WIN_CERTIFICATE_UEFI_GUID: length, revision 2.0, WIN_CERT_TYPE_EFI_GUID, which one.
CERTIFICATE = struct.pack("<IHH16s", 24, 0x0200, 0x0EF1, PKCS7.bytes_le)

Variable = tuple[str, UUID, int, bytes]
ORDER: Variable = ("BootOrder", GLOBAL, NV_BS_RT, b"\7\0")
ENTRY: Variable = ("Boot0007", GLOBAL, NV_BS_RT, b"\1\0\0\0a boot entry")
KEY: Variable = ("PK", GLOBAL, SIGNED, WRITTEN + CERTIFICATE + b"a platform key")
DB: Variable = ("db", SECURITY, SIGNED, WRITTEN + CERTIFICATE + b"keys")


def written(variables: Iterable[Variable], *, end: bytes = b"\0\0") -> bytes:
    """As ESXi's firmware does, by what others found out: see live/vsphere/nvram.py."""
    records = b""
    for name, vendor, attributes, data in variables:
        spelt = name.encode("utf-16-le") + end
        records += vendor.bytes_le + struct.pack("<III", attributes, len(spelt) + len(data), len(spelt)) + spelt + data
    region = b"VMWNVRAM" + struct.pack("<II", 0, 16 + len(records)) + records
    free = b"\xff" * 4096
    before = b"MRVN" + struct.pack("<I", 1) + b"CMOS" + bytes(300) + b"\xff" * 500
    return before + b"\1EFI_NV\0\0" + struct.pack("<I", len(region) + len(free)) + region + free


def test_what_means_the_same_here_comes_along() -> None:
    older = ("BootOrder", GLOBAL, NV_BS_RT, b"\0\0\7\0")
    console = ("ConOut", GLOBAL, NV_BS_RT, b"a console of VMware's")
    content = written([older, ENTRY, console, KEY, ORDER, DB])
    found = nvram.variables(content)
    assert found is not None
    by_name = {one.name: one for one in found}
    assert by_name["BootOrder"].data == b"\7\0"  # the later one
    assert (by_name["PK"].data, by_name["PK"].written) == (b"a platform key", WRITTEN)
    assert by_name["Boot0007"].written == bytes(16)
    assert nvram.as_store(content, secure_boot=True) == ovmf_store.store(found, secure_boot=True)
    assert {one.name for one in ovmf_store.carried(found)} == {"BootOrder", "Boot0007", "PK", "db"}


def test_secure_boot_without_keys_gets_this_hosts() -> None:
    assert nvram.as_store(written([ORDER]), secure_boot=True) is None
    assert nvram.as_store(written([ORDER]), secure_boot=False) is not None


@pytest.mark.parametrize("content", [b"", b"MRVN" + bytes(8000), random.Random(3).randbytes(70_000)])
def test_a_file_of_bios_or_of_ciphertext_has_none(content: bytes) -> None:
    assert nvram.as_store(content, secure_boot=False) is None


@pytest.mark.parametrize(
    "content",
    [
        b"VMWNVRAM",
        b"VMWNVRAM" + struct.pack("<II", 0, 15),
        b"VMWNVRAM" + struct.pack("<II", 0, 1 << 31),
        b"VMWNVRAM" + struct.pack("<II", 0, 26) + bytes(10),
        written([("", GLOBAL, 7, b"x")]),
        written([("A\0B", GLOBAL, 7, b"x")]),
        written([("A", GLOBAL, 7, b"x")], end=b""),
        written([("Odd", GLOBAL, 7, b"x")], end=b"\0"),
        written([("PK", GLOBAL, SIGNED, b"short")]),
        written([("PK", GLOBAL, SIGNED, WRITTEN + struct.pack("<I", 1000) + bytes(60))]),
        written([("PK", GLOBAL, SIGNED, WRITTEN + struct.pack("<I", 8) + bytes(60))]),
    ],
)
def test_another_form_is_refused(content: bytes) -> None:
    with pytest.raises(Internal, match="UEFI variables"):
        nvram.variables(content)


@given(st.binary(max_size=200), st.integers(800, 1200))
def test_hostile_bytes_are_refused_or_read(noise: bytes, cut: int) -> None:
    content = written([ORDER, KEY, DB])
    for one in (b"VMWNVRAM" + noise, content[:cut] + noise + content[cut + len(noise) :]):
        try:
            found = nvram.variables(one)
        except Internal:
            continue
        assert sum(len(each.data) for each in found or ()) <= len(one)


def test_a_vcenter_hands_them_out_by_the_datastore(platform: VCenter) -> None:
    async def ask(adapter: VimApi) -> bytes | None:
        assert isinstance(adapter, KeepsUefiVariables)
        return await adapter.uefi_variables(VM)

    content = written([ORDER, ENTRY, KEY])
    Path(platform.control("nvram", vm=VM, secure="true")).write_bytes(content)
    assert in_session(lambda: VimApi(platform.access()), ask) == nvram.as_store(content, secure_boot=True)
    platform.fault("folder", "status:403", times=20)
    with pytest.raises((Internal, DiskReadFailed)):
        in_session(lambda: VimApi(platform.access()), ask)
