"""What xen_api finds out about a VM: its description, the ways to its disks, and what changed."""

import asyncio
import base64
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import CbtReset, CbtUnsupported, Internal, SnapshotFailed
from synvirt.live.xen import exports
from synvirt.live.xen.adapter import XenApi
from synvirt.live.xen.session import XenSession
from tests.contracts.live import read
from tests.fakes.xenserver import XenServer
from tests.live.xen.asking import CBT_BYTES, VHD_BYTES, asked, concern_ids, content

# ── a VM as it is described ─────────────────────────────────────────────────────────────────────────────


def test_a_vm_of_a_pool(pool: XenServer) -> None:
    store = pool.pool.add_store()
    vm_id = pool.pool.add_vm("web 1", [bytes(1 << 20), bytes(2 << 20)], store)
    vm = asked(pool, lambda adapter: adapter.inspect(vm_id))
    assert (vm.name, vm.uuid, vm.vm_id, vm.power_state) == ("web 1", vm_id, vm_id, "on")
    assert (vm.uuid_reversed_for, vm.serial) == (("windows",), vm_id)
    vm_id = pool.pool.add_vm("web 2", [bytes(1 << 20)], store, bios_strings={"system-serial-number": "CZ1234"})
    assert asked(pool, lambda adapter: adapter.inspect(vm_id)).serial == "CZ1234"
    assert (vm.cpu_count, vm.cores_per_socket, vm.memory_bytes, vm.firmware) == (4, 2, 1 << 30, "bios")
    assert (vm.guest_os.family, vm.guest_os.name) == ("linux", "Debian GNU/Linux 12 (bookworm)")
    assert [(disk.capacity_bytes, disk.boot_order) for disk in vm.disks] == [(1 << 20, 1), (2 << 20, None)]
    assert [(nic.mac, nic.network, nic.ip_addresses) for nic in vm.nics] == [
        ("26:5a:1c:0f:33:91", "Pool-wide network associated with eth0", ("192.0.2.7", "2001:db8::7"))
    ]
    assert (vm.host, vm.cbt_available, concern_ids(vm)) == ("host 127.0.0.1", True, {"xen.read_by"})
    assert "changed block tracking" in vm.concerns[0].assessment


@pytest.mark.parametrize(
    "change", ["its disk is attached anew", "its disk is moved to another storage", "it is found dangling"]
)
def test_a_vm_that_is_changed_while_it_is_described_lacks_no_disk(
    pool: XenServer, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Its record names attachments, and these name disks: each is read by a call of its own."""
    tables, store = pool.pool.tables, pool.pool.add_store()
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20), bytes(2 << 20)], store)
    vm, vdi = pool.pool.vm(vm_id), pool.pool.vdis(vm_id)[1]
    vbd = tables["VM"][vm]["VBDs"][1]
    asked_of, changes = XenSession.asked, [change]

    def meanwhile(self: XenSession, method: str, *parameters: Any) -> Any:
        answer = asked_of(self, method, *parameters)
        if (method, *parameters) == ("VM.get_record", vm) and "its disk is attached anew" in changes:
            changes.clear()
            pool.pool.vbd_destroy(vbd)
            pool.pool._add_vbd(vm, vdi, "1", attached=True)
        if (method, *parameters) == ("VBD.get_record", vbd) and "its disk is moved to another storage" in changes:
            changes.clear()
            pool.pool.vbd_destroy(vbd)
            pool.pool.vdi_destroy(vdi)
            pool.pool.add_disk(vm, bytes(2 << 20), store, 1)
        return answer

    monkeypatch.setattr(XenSession, "asked", meanwhile)
    monkeypatch.setattr("synvirt.live.xen.machines.READ_AGAIN_PAUSES_S", (0.01, 0.01))
    if change == "it is found dangling":
        del tables["VDI"][vdi]
    found = asked(pool, lambda adapter: adapter.inspect(vm_id))
    assert len(found.disks) == (1 if change == "it is found dangling" else 2)


@pytest.mark.parametrize(
    ("fields", "boots"),
    [({"domain_type": "hvm"}, 0), ({"domain_type": "unspecified"}, 0), ({"domain_type": "pv", "PV_bootloader": "pygrub"}, 1)],
)
def test_only_a_paravirtualised_guest_boots_from_the_disk_that_is_marked(
    pool: XenServer, fields: dict[str, Any], boots: int
) -> None:
    """For all others the firmware takes the first, for example where the marked one was moved behind it."""
    sizes = [1 << 20, 2 << 20]
    vm_id = pool.pool.add_vm("web", [bytes(size) for size in sizes], pool.pool.add_store(), **fields)
    for vbd in pool.pool.tables["VBD"].values():
        vbd["bootable"] = vbd["userdevice"] == "1"
    vm = asked(pool, lambda adapter: adapter.inspect(vm_id))
    assert [disk.capacity_bytes for disk in vm.disks if disk.boot_order] == [sizes[boots]]


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"domain_type": "pv"}, {"paravirtualised"}),
        ({"domain_type": "pvh"}, {"paravirtualised"}),
        ({"domain_type": "unspecified", "PV_bootloader": "pygrub"}, {"paravirtualised"}),
        ({"domain_type": "hvm", "PV_bootloader": "pygrub"}, set()),
        (
            {"HVM_boot_params": {"firmware": "uefi"}, "platform": {"secureboot": "true"}},
            {"uefi-state-lost", "secure-boot"},
        ),
        ({"VTPMs": ["OpaqueRef:a-tpm"]}, {"tpm"}),
        ({"power_state": "Suspended"}, {"xen.suspended"}),
        ({"power_state": "Paused"}, {"xen.suspended"}),
        ({"other_config": {"pci": "0/0000:04:00.0"}}, {"passthrough-device:0000:04:00.0", "guest-unknown"}),
    ],
)
def test_what_may_go_wrong_is_said(pool: XenServer, fields: dict[str, Any], ids: set[str]) -> None:
    guest = {"guest_metrics": "OpaqueRef:NULL"} if "other_config" in fields else {}
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store(), **fields, **guest)
    assert concern_ids(asked(pool, lambda adapter: adapter.inspect(vm_id))) == ids | {"xen.read_by"}


def test_settings_that_the_guest_does_not_have_here_are_named(pool: XenServer) -> None:
    """A Windows with its maker's licence asks for the host's SMBIOS; a disk that is reset, or only read, keeps what is written
    here; a card whose switch takes none of its frames has no link."""
    vm_id = pool.pool.add_vm(
        "web",
        [bytes(1 << 20)],
        pool.pool.add_store(),
        bios_strings={"system-manufacturer": "Dell Inc.", "system-serial-number": "OEM7", "bios-vendor": "Xen"},
        VCPUs_params={"cap": "50"},
    )
    tables = pool.pool.tables
    for vbd in tables["VBD"].values():
        vbd["mode"] = "RO"
    tables["VDI"][pool.pool.vdis(vm_id)[0]] |= {"on_boot": "reset", "name_label": "data"}
    for vif in tables["VIF"].values():
        vif |= {"qos_algorithm_type": "ratelimit", "locking_mode": "disabled"}
    vm = asked(pool, lambda adapter: adapter.inspect(vm_id))
    (found,) = [one for one in vm.concerns if one.id == "settings-not-taken-over"]
    assert found.assessment == (
        "The VM has settings that it does not have here: system-manufacturer of its SMBIOS, limits of its "
        "processors (cap), data can only be read, data is reset at each start, limits of card 26:5a:1c:0f:33:91."
    )
    assert [nic.connected for nic in vm.nics] == [False]


def test_storage_that_is_nearly_full_and_chains_that_are_long_are_said_and_refused(pool: XenServer) -> None:
    store = pool.pool.add_store("lvm", size=3 << 20)
    vm_id = pool.pool.add_vm("web", [bytes(2 << 20)], store)
    pool.pool.tables["SR"][store]["physical_utilisation"] = 2 << 20
    full = f"xen.store_full:{pool.pool.tables['SR'][store]['uuid']}"
    assert full in concern_ids(asked(pool, lambda adapter: adapter.inspect(vm_id)))
    with pytest.raises(SnapshotFailed, match="1048576 bytes free"):
        asked(pool, lambda adapter: adapter.snapshot(vm_id, "synvirt-a-1"))
    pool.pool.tables["SR"][store]["physical_size"] = 1 << 40
    under = ""
    for _ in range(30):
        layer = pool.pool.add("VDI", managed=False, sm_config={"vhd-parent": under} if under else {}, SR=store)
        under = pool.pool.tables["VDI"][layer]["uuid"]
    vdi = pool.pool.vdis(vm_id)[0]
    pool.pool.tables["VDI"][vdi]["sm_config"]["vhd-parent"] = under
    key = pool.pool.tables["VDI"][vdi]["uuid"]
    assert f"xen.chain:{key}" in concern_ids(asked(pool, lambda adapter: adapter.inspect(vm_id)))
    with pytest.raises(SnapshotFailed, match="layers"):
        asked(pool, lambda adapter: adapter.snapshot(vm_id, "synvirt-a-1"))
    assert pool.pool.snapshots() == []


# ── ways ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("store", "nbd", "config", "warm", "reported"),
    [
        ({"kind": "ext"}, True, {}, True, "NBD over TLS; deltas by changed block tracking"),
        ({"kind": "ext"}, False, {}, True, "as VHD .what is allocated.; deltas by the difference .*purpose nbd"),
        ({"kind": "nfs", "cbt": False}, True, {}, True, "NBD over TLS; deltas by the difference .*tracks no changed"),
        ({"kind": "gfs2", "cbt": False}, True, {}, False, "NBD over TLS; no deltas .*keeps no VHDs"),
        ({"kind": "udev", "cbt": False}, False, {}, False, "raw .the whole disk.; no deltas"),
        ({"kind": "ext"}, False, {"image-format": "qcow2"}, False, "raw .*kept as qcow2"),
        ({"kind": "lvm", "cbt": False}, False, {"type": "raw"}, False, "raw .*kept as raw"),
    ],
)
def test_the_way_of_each_disk_is_chosen_and_said(
    pool: XenServer, store: dict[str, Any], nbd: bool, config: dict[str, str], warm: bool, reported: str
) -> None:
    if not nbd:
        pool.pool.nbd_servers = []
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store(**store))
    pool.pool.tables["VDI"][pool.pool.vdis(vm_id)[0]]["sm_config"] |= config
    vm = asked(pool, lambda adapter: adapter.inspect(vm_id))
    assert vm.cbt_available is warm
    assert re.search(reported, vm.concerns[-1].assessment), vm.concerns[-1].assessment


def test_a_licence_without_tracking_leaves_differences(pool: XenServer) -> None:
    pool.pool.tables["pool"][pool.pool.pool]["restrictions"] = {"restrict_cbt": "true"}
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())
    vm = asked(pool, lambda adapter: adapter.inspect(vm_id))
    assert (vm.cbt_available, "licence" in vm.concerns[-1].assessment) == (True, True)


# ── what changed ────────────────────────────────────────────────────────────────────────────────────────


@given(st.binary(min_size=1, max_size=40), st.integers(1, CBT_BYTES))
def test_a_bitmap_is_read_by_whole_bytes_whichever_bit_comes_first(bitmap: bytes, last: int) -> None:
    size = (len(bitmap) - 1) * CBT_BYTES + last
    areas = exports.areas(base64.b64encode(bitmap).decode(), size)
    covered = [any(start <= at * CBT_BYTES < start + length for start, length in areas) for at in range(len(bitmap))]
    assert covered == [byte != 0 for byte in bitmap]
    assert all(length > 0 and start + length <= size for start, length in areas)


@pytest.mark.parametrize("answer", ["", "AA==", "&&&"])
def test_a_bitmap_that_does_not_cover_the_disk_is_refused(answer: str) -> None:
    with pytest.raises(Internal, match="changed blocks"):
        exports.areas(answer, CBT_BYTES + 1)


def test_tracking_that_was_switched_off_between_two_passes_is_reported(pool: XenServer) -> None:
    vm_id = pool.pool.add_vm("web", [content(2, VHD_BYTES)], pool.pool.add_store())
    vdi = pool.pool.vdis(vm_id)[0]
    key = pool.pool.tables["VDI"][vdi]["uuid"]

    async def use(adapter: XenApi) -> None:
        await adapter.enable_cbt(vm_id, [key])
        first = await adapter.snapshot(vm_id, "synvirt-a-1")
        await adapter.release(vm_id, "synvirt-a-1")
        pool.pool.vdi_disable_cbt(vdi)
        second = await adapter.snapshot(vm_id, "synvirt-a-2")
        assert second.change_ids == {}
        disk = (await adapter.inspect(vm_id)).disks[0]
        await adapter.open_disk(vm_id, second, disk, first.change_ids[key])

    with pytest.raises(CbtReset, match="switched off meanwhile"):
        asked(pool, use, transport="nbd")


REFUSALS = [
    ("LICENCE_RESTRICTION", "CBT"),
    ("SR_OPERATION_NOT_SUPPORTED", "OpaqueRef:it"),
    ("SR_BACKEND_FAILURE_44", "", "There is insufficient space", ""),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda one: one[0])
def test_a_disk_that_refuses_to_be_tracked_has_its_snapshots_compared(pool: XenServer, refusal: tuple[str, ...]) -> None:
    """It shows by trying alone. By NBD for the whole, and by VHD for what differs; in later sessions, too."""
    vm_id = pool.pool.add_vm("web", [content(5, VHD_BYTES)], pool.pool.add_store())
    vdi = pool.pool.tables["VDI"][pool.pool.vdis(vm_id)[0]]
    key = vdi["uuid"]
    pool.pool.fault("VDI.enable_cbt", *refusal)
    asked(pool, lambda adapter: adapter.enable_cbt(vm_id, [key]))
    assert vdi["other_config"].keys() == {"synvirt-untracked"}
    vm = asked(pool, lambda adapter: adapter.inspect(vm_id))
    assert re.search(rf"NBD over TLS; deltas by the difference .*refused to track it: {refusal[0]}", vm.concerns[-1].assessment)
    first = asked(pool, lambda adapter: adapter.snapshot(vm_id, "synvirt-a-1"))

    async def whole(adapter: XenApi) -> bytes:
        return (await asyncio.to_thread(read, await adapter.open_disk(vm_id, first, vm.disks[0], None)))[0]

    copy = asked(pool, whole)
    pool.pool.guest_writes(vm_id, 3 * VHD_BYTES, b"changed")
    asked(pool, lambda adapter: adapter.release(vm_id, "synvirt-a-1"))
    second = asked(pool, lambda adapter: adapter.snapshot(vm_id, "synvirt-a-2"))

    async def delta(adapter: XenApi) -> tuple[bytes, int]:
        spec = await adapter.open_disk(vm_id, second, vm.disks[0], first.change_ids[key])
        return await asyncio.to_thread(read, spec, copy)

    assert asked(pool, delta) == (pool.pool.disk(vm_id).read_bytes(), VHD_BYTES)
    asked(pool, lambda adapter: adapter.cleanup(vm_id, "synvirt-a-1"))
    asked(pool, lambda adapter: adapter.cleanup(vm_id, "synvirt-a-2"))
    assert (pool.pool.snapshots(), vdi["other_config"], vdi["cbt_enabled"]) == ([], {}, False)


@pytest.mark.parametrize(("transport", "config"), [("nbd", {}), ("auto", {"image-format": "qcow2"})])
def test_a_disk_that_can_neither_be_tracked_nor_compared_is_said(
    pool: XenServer, transport: str, config: dict[str, str]
) -> None:
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())
    vdi = pool.pool.tables["VDI"][pool.pool.vdis(vm_id)[0]]
    vdi["sm_config"] |= config
    pool.pool.fault("VDI.enable_cbt", "LICENCE_RESTRICTION", "CBT")
    with pytest.raises(CbtUnsupported, match="LICENCE_RESTRICTION: CBT; nor can its snapshots be compared"):
        asked(pool, lambda adapter: adapter.enable_cbt(vm_id, [vdi["uuid"]]), transport=transport)
    assert vdi["other_config"] == {}
