"""UEFI variables from XenServer's form to OVMF's."""

import base64
import struct
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import Internal
from synvirt.live import KeepsUefiVariables
from synvirt.live.xen import nvram
from synvirt.live.xen.adapter import XenApi
from synvirt.machines import ovmf_store
from tests.contracts.live import in_session
from tests.fakes.xenserver import varstored, xenserver
from tests.fakes.xenserver.varstored import GLOBAL, NV_BS_RT, SIGNED

SECURITY = UUID("d719b2cb-3d3a-4596-a3bc-dad00e67656f")
SHIM = UUID("605dab50-e046-4300-abb6-3dd810dd8b23")
ORDER = ("BootOrder", GLOBAL, NV_BS_RT, b"\7\0")
KEY = ("PK", GLOBAL, SIGNED, b"a platform key")


def record(variables: list[varstored.Variable], **platform: str) -> dict[str, Any]:
    return {"NVRAM": varstored.nvram(variables), "platform": platform}


def held(content: bytes) -> dict[tuple[str, UUID], tuple[int, bytes]]:
    """What a variable store holds, read again by edk2's VariableFormat.h."""
    found, at = {}, 72 + 28
    while content[at : at + 2] == b"\xaa\x55":
        state, attributes = content[at + 2], *struct.unpack_from("<I", content, at + 4)
        name_bytes, data_bytes = struct.unpack_from("<II", content, at + 36)
        vendor = UUID(bytes_le=content[at + 44 : at + 60])
        name = content[at + 60 : at + 60 + name_bytes].decode("utf-16-le")
        assert (state, name[-1]) == (0x3F, "\0")
        found[name[:-1], vendor] = (attributes, content[at + 60 + name_bytes : at + 60 + name_bytes + data_bytes])
        at += -(-(60 + name_bytes + data_bytes) // 4) * 4
    assert set(content[at:0x40000]) == {0xFF}
    return found


def test_a_store_without_variables_is_the_one_that_debian_ships() -> None:
    shipped = Path("/usr/share/OVMF/OVMF_VARS_4M.fd")
    assert shipped.exists(), "apt-get install ovmf"
    assert ovmf_store.store([], secure_boot=False) == shipped.read_bytes()


def test_what_means_the_same_here_comes_along() -> None:
    boot = ("Boot0007", GLOBAL, NV_BS_RT, varstored.boot_entry("debian", varstored.of_xen()))
    lists = [("MokList", SHIM, 3, b"a key of the guest's owner"), ("db", SECURITY, SIGNED, b"keys")]
    its_own = [
        ("ConOut", GLOBAL, NV_BS_RT, b"a console of Xen's"),
        ("MTC", UUID("eb704011-1402-11d3-8e77-00a0c969723b"), NV_BS_RT, b"\1\0\0\0"),
        ("Private", SHIM, SIGNED, b"signed by somebody that OVMF has no note of"),
        ("SecureBootEnable", UUID("f0a30bc7-af08-4556-99c4-001009c93a44"), 3, b"\0"),
    ]
    content = nvram.as_store(record([ORDER, boot, KEY, *lists, *its_own], secureboot="true"))
    assert content is not None
    found = held(content)
    assert {name for name, _ in found} == {"BootOrder", "Boot0007", "PK", "db", "MokList", "SecureBootEnable"}
    assert found["Boot0007", GLOBAL] == (NV_BS_RT, boot[3])
    assert found["PK", GLOBAL] == (SIGNED, b"a platform key")
    assert next(value for (name, _), value in found.items() if name == "SecureBootEnable") == (3, b"\1")


@pytest.mark.parametrize(
    ("variables", "secureboot", "switch"),
    [
        ([ORDER, KEY], "true", b"\1"),
        ([ORDER, KEY], "auto", b"\1"),
        ([ORDER, KEY], "false", b"\0"),  # with keys, firmware would switch it on by itself
        ([ORDER], "false", None),
    ],
)
def test_secure_boot_is_as_it_was(variables: list[varstored.Variable], secureboot: str, switch: bytes | None) -> None:
    content = nvram.as_store(record(variables, secureboot=secureboot))
    assert content is not None
    assert next((data for (name, _), (_, data) in held(content).items() if name == "SecureBootEnable"), None) == switch


def test_secure_boot_without_keys_gets_this_hosts() -> None:
    """XenServer enrols the pool's keys when a VM first starts: one that never did has none."""
    assert nvram.as_store(record([ORDER], secureboot="true")) is None
    assert nvram.as_store({"NVRAM": {}, "platform": {}}) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"VARS",
        varstored.blob([ORDER], magic=b"VARZ"),
        varstored.blob([ORDER], version=2),
        varstored.blob([ORDER])[:-1],
        varstored.blob([ORDER]) + b"\0",
        varstored.blob([("", GLOBAL, 7, b"x")]),
        varstored.blob([("Empty", GLOBAL, 7, b"")]),
        varstored.blob([("A\0B", GLOBAL, 7, b"x")]),
        b"VARS" + struct.pack("<IQQ", 1, 1 << 60, 0),
        bytes(200 << 10),
    ],
)
def test_another_form_is_refused(content: bytes) -> None:
    with pytest.raises(Internal, match="UEFI variables"):
        nvram.variables(base64.b64encode(content).decode())


@given(st.binary(max_size=200), st.integers(0, 300))
def test_hostile_bytes_are_refused_or_read(noise: bytes, cut: int) -> None:
    content = varstored.blob([ORDER, KEY])
    for one in (noise, content[:cut] + noise + content[cut + len(noise) :]):
        try:
            found = nvram.variables(base64.b64encode(one).decode())
        except Internal:
            continue
        assert sum(len(each.data) for each in found) <= len(one)
        ovmf_store.store(found, secure_boot=True)


def test_more_than_fits_is_refused() -> None:
    many = [ovmf_store.UefiVariable(SHIM, f"v{number}", 7, bytes(60_000)) for number in range(5)]
    with pytest.raises(Internal, match="UEFI variables take"):
        ovmf_store.store(many, secure_boot=False)


@pytest.mark.parametrize(
    ("variables", "ids"),
    [([ORDER, KEY], set()), ([ORDER], {"uefi-state-lost", "secure-boot"}), (None, {"uefi-state-lost", "secure-boot"})],
)
def test_a_pool_hands_them_out_and_says_when_they_stay(
    tmp_path: Path, variables: list[varstored.Variable] | None, ids: set[str]
) -> None:
    given: dict[str, Any] = {"NVRAM": {"EFI-variables": "no such form"} if variables is None else varstored.nvram(variables)}
    given |= {"HVM_boot_params": {"firmware": "uefi"}, "platform": {"secureboot": "true"}}
    with xenserver(tmp_path / "pool", nbd=False) as pool:
        vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store(), **given)

        def open_() -> XenApi:
            return XenApi(pool.access())

        assert isinstance(open_(), KeepsUefiVariables)
        vm = in_session(open_, lambda adapter: adapter.inspect(vm_id))
        assert {one.id for one in vm.concerns} == ids | {"xen.read_by"}
        if variables is None:
            with pytest.raises(Internal):
                in_session(open_, lambda adapter: adapter.uefi_variables(vm_id))
        else:
            content = in_session(open_, lambda adapter: adapter.uefi_variables(vm_id))
            assert (content is None) == bool(ids)
