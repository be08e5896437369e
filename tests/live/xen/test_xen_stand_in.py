"""The stand-in of a pool, asked by others: the vendor's own client, and qemu-img for its VHDs."""

import base64
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import XenAPI

from tests.fakes.xenserver import PASSWORD, USER, XenServer, vhd, xenserver
from tests.needs import need


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[XenServer]:
    with xenserver(tmp_path / "pool") as running:
        yield running


@pytest.fixture
def client(pool: XenServer) -> "Iterator[XenAPI.Session]":
    session = XenAPI.Session(pool.url, ignore_ssl=True)
    session.xenapi.login_with_password(USER, PASSWORD, "1.0", "witness")
    yield session
    session.xenapi.session.logout()
    session("close")()


def refused(use: "object", *parameters: object) -> list[str]:
    with pytest.raises(XenAPI.Failure) as failure:
        use(*parameters)  # type: ignore[operator]
    return list(failure.value.details)


def test_the_vendors_client_tracks_snapshots_and_lists_changes(pool: XenServer, client: "XenAPI.Session") -> None:
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())
    api = client.xenapi
    vm = api.VM.get_by_uuid(vm_id)
    (vbd,) = api.VM.get_VBDs(vm)
    vdi = api.VBD.get_VDI(vbd)
    assert api.VDI.get_virtual_size(vdi) == str(1 << 20)  # XenAPI's integers are texts in XML-RPC
    api.VDI.enable_cbt(vdi)
    first = api.VM.snapshot(vm, "one")
    pool.pool.guest_writes(vm_id, 3 * 65536, b"changed")
    second = api.VM.snapshot(vm, "two")
    (old,), (new,) = ([api.VBD.get_VDI(one) for one in api.VM.get_VBDs(snapshot)] for snapshot in (first, second))
    assert base64.b64decode(api.VDI.list_changed_blocks(old, new)) == bytes([0b0001_0000, 0])
    (info,) = api.VDI.get_nbd_info(new)
    assert info.keys() == {"exportname", "address", "port", "cert", "subject"}
    assert api.VDI.get_record(new)["snapshot_of"] == vdi
    assert refused(api.VDI.data_destroy, old)[0] == "VDI_IN_USE"  # while its VM's snapshot is there
    api.VM.destroy(first)
    api.VDI.data_destroy(old)
    assert api.VDI.get_type(old) == "cbt_metadata"
    assert base64.b64decode(api.VDI.list_changed_blocks(old, new)) == bytes([0b0001_0000, 0])


def test_what_the_data_model_does_not_name_is_refused(pool: XenServer, client: "XenAPI.Session") -> None:
    vm = pool.pool.vm(pool.pool.add_vm("web", [bytes(65536)], pool.pool.add_store()))
    api = client.xenapi
    assert refused(api.VM.teleport, vm) == ["MESSAGE_METHOD_UNKNOWN", "VM.teleport"]
    assert refused(api.VM.get_record, vm, vm)[0] == "MESSAGE_PARAMETER_COUNT_MISMATCH"
    assert refused(api.VM.snapshot, vm, True) == ["FIELD_TYPE_ERROR", "new_name"]
    assert refused(api.VM.get_record, "OpaqueRef:nobody") == ["HANDLE_INVALID", "VM", "OpaqueRef:nobody"]
    assert refused(api.VM.get_by_uuid, "nobody") == ["UUID_INVALID", "VM", "nobody"]
    assert refused(api.pool.set_ha_host_failures_to_tolerate, pool.pool.pool, "1")[0] == "RBAC_PERMISSION_DENIED"
    pool.pool.end_session(next(iter(pool.pool.sessions)))
    pool.pool.users[USER] = ("another", "vm-power-admin")
    assert refused(api.VM.get_record, vm)[0] in ("SESSION_INVALID", "SESSION_AUTHENTICATION_FAILED")
    pool.pool.users[USER] = (PASSWORD, "vm-power-admin")


def test_a_member_names_the_coordinator(pool: XenServer) -> None:
    session = XenAPI.Session(f"https://127.0.0.2:{pool.port}", ignore_ssl=True)
    details = refused(session.xenapi.login_with_password, USER, PASSWORD, "1.0", "witness")
    assert details == ["HOST_IS_SLAVE", "127.0.0.1"]
    session("close")()


@pytest.mark.parametrize("size", [9 << 20, (6 << 20) + 512])
def test_its_vhds_are_what_qemu_reads(tmp_path: Path, size: int) -> None:
    generator = random.Random(size)
    disk = tmp_path / "disk.raw"
    disk.write_bytes(b"".join(bytes(1 << 20) if at % 3 else generator.randbytes(1 << 20) for at in range(size >> 20)))
    with disk.open("r+b") as file:
        file.truncate(size)
    (tmp_path / "disk.vhd").write_bytes(b"".join(vhd.stream(disk)))
    # QEMU goes by the footer's geometry unless it is told.
    options = f"driver=vpc,force_size_calc=current_size,file.filename={tmp_path / 'disk.vhd'}"
    argv = [need("qemu-img", "qemu-utils"), "compare", "--image-opts", options, f"driver=raw,file.filename={disk}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_differences_are_what_qemu_reads(tmp_path: Path) -> None:
    """With `base=`: QEMU knows no parents, so what is in no block reads as zeros. Blocks are there where something differs,
    and hold what is new."""
    generator = random.Random(6)
    size, block = (9 << 20) + 777 * 512, vhd.BLOCK_BYTES
    content = bytearray(generator.randbytes(size))
    (tmp_path / "old.raw").write_bytes(content)
    for at in (3, block - 1, 3 * block, size - 2):
        content[at : at + 2] = b"ab"
    (tmp_path / "new.raw").write_bytes(content)
    changed = {0, 1, 3, 4}
    file = tmp_path / "difference.vhd"
    file.write_bytes(b"".join(vhd.stream(tmp_path / "new.raw", tmp_path / "old.raw")))
    options = f"driver=vpc,force_size_calc=current_size,file.filename={file}"
    qemu_img = need("qemu-img", "qemu-utils")
    found = subprocess.run(
        [qemu_img, "map", "--output=json", "--image-opts", options], capture_output=True, check=True, timeout=60
    )
    there = {
        at // block
        for one in json.loads(found.stdout)
        if one["data"]
        for at in range(one["start"], one["start"] + one["length"], 512)
    }
    assert there == changed
    subprocess.run(
        [qemu_img, "convert", "--image-opts", options, "-O", "raw", tmp_path / "seen.raw"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    seen = (tmp_path / "seen.raw").read_bytes()
    assert len(seen) == size
    for number in range(-(-size // block)):
        new = bytes(content[number * block : (number + 1) * block])
        assert seen[number * block : (number + 1) * block] == (new if number in changed else bytes(len(new)))
