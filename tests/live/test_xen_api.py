"""xen_api held to the laws of LiveAdapter, by both ways to a disk; and what is special to a pool."""

import asyncio
import base64
import json
import random
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import AuthFailed, BadRequest, CbtReset, CbtUnsupported, Internal, SnapshotFailed, SourceUnreachable
from synvirt.live import About, SourceAccess, VmRow
from synvirt.live.recording import Recording, lines, named
from synvirt.live.xen import exports
from synvirt.live.xen.adapter import XenApi
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import VmManifest
from tests.contracts.live import LiveCase, LiveContract, in_session, read
from tests.fakes.xenserver import ADDRESSES, PASSWORD, USER, XenServer, xenserver
from tests.fakes.xenserver.server import certificate
from tests.replay import replayed

T = TypeVar("T")

CBT_BYTES, VHD_BYTES = 512 << 10, 2 << 20


def content(blocks: int, block_bytes: int) -> bytes:
    """Some blocks, a third of them zeros; the last one is not whole."""
    generator = random.Random(7)
    parts = (bytes(block_bytes) if number % 3 == 2 else generator.randbytes(block_bytes) for number in range(blocks))
    return b"".join(parts) + generator.randbytes(12 << 10)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[XenServer]:
    with xenserver(tmp_path / "pool") as running:
        yield running


def case_of(pool: XenServer, block_bytes: int, transport: str) -> LiveCase:
    store = pool.pool.add_store()
    vm_id = pool.pool.add_vm("web", [content(9, block_bytes)], store)

    def restart() -> None:
        for state in ("Running", "Halted"):
            pool.pool.power(vm_id, state)

    def write(offset: int, data: bytes) -> None:
        pool.pool.guest_writes(vm_id, offset, data)

    return LiveCase(
        open=lambda: XenApi(pool.access(transport=transport)),
        vm_id=vm_id,
        content=lambda: pool.pool.disk(vm_id).read_bytes(),
        write=write,
        snapshots=pool.pool.snapshots,
        lose_tracking=lambda: lose(pool, vm_id, transport),
        restart=restart,
        tracked_bytes=block_bytes,
    )


def lose(pool: XenServer, vm_id: str, transport: str) -> None:
    """By tracking: it was switched off and on. By VHD: somebody removed the older snapshot."""
    if transport == "nbd":
        pool.pool.lose_tracking(vm_id)
        return
    for vdi in list(pool.pool.tables["VDI"][pool.pool.vdis(vm_id)[0]]["snapshots"]):
        for vbd in list(pool.pool.tables["VDI"][vdi]["VBDs"]):
            pool.pool.vbd_destroy(vbd)
        pool.pool.vdi_destroy(vdi)


class TestByNbd(LiveContract):
    """NBD over TLS, with changed block tracking."""

    @pytest.fixture
    def case(self, pool: XenServer) -> LiveCase:
        return case_of(pool, CBT_BYTES, "nbd")


class TestByExport(LiveContract):
    """/export_raw_vdi, with deltas as differencing VHDs."""

    @pytest.fixture
    def case(self, pool: XenServer) -> LiveCase:
        return case_of(pool, VHD_BYTES, "export")


GOOD = SourceAccess("https://xen.example", {"user": "root", "password": PASSWORD})


@pytest.mark.parametrize(
    "access",
    [
        replace(GOOD, endpoint="http://xen.example"),
        replace(GOOD, endpoint="https://root:s3cret@xen.example"),
        replace(GOOD, credentials={"user": "root"}),
        replace(GOOD, options={"transport": "vddk"}),
    ],
)
def test_a_malformed_source_is_refused(access: SourceAccess) -> None:
    with pytest.raises(BadRequest) as refused:
        XenApi(access)
    assert PASSWORD not in str(refused.value)


# ── a VM as it is described ──────────────────────────────────────────────────────────────────────────────────────────


def asked(pool: XenServer, use: Callable[[XenApi], Awaitable[T]], **options: Any) -> T:
    return in_session(lambda: XenApi(pool.access(**options)), use)


def concern_ids(vm: VmManifest) -> set[str]:
    return {concern.id for concern in vm.concerns}


def test_a_vm_of_a_pool(pool: XenServer) -> None:
    store = pool.pool.add_store()
    vm_id = pool.pool.add_vm("web 1", [bytes(1 << 20), bytes(2 << 20)], store)
    vm = asked(pool, lambda adapter: adapter.inspect(vm_id))
    assert (vm.name, vm.uuid, vm.vm_id, vm.power_state) == ("web 1", vm_id, vm_id, "on")
    assert (vm.cpu_count, vm.cores_per_socket, vm.memory_bytes, vm.firmware) == (4, 2, 1 << 30, "bios")
    assert (vm.guest_os.family, vm.guest_os.name) == ("linux", "Debian GNU/Linux 12 (bookworm)")
    assert [(disk.capacity_bytes, disk.boot_order) for disk in vm.disks] == [(1 << 20, 1), (2 << 20, None)]
    assert [(nic.mac, nic.network, nic.ip_addresses) for nic in vm.nics] == [
        ("26:5a:1c:0f:33:91", "Pool-wide network associated with eth0", ("192.0.2.7", "2001:db8::7"))
    ]
    assert (vm.host, vm.cbt_available, concern_ids(vm)) == ("host 127.0.0.1", True, {"xen.read_by"})
    assert "changed block tracking" in vm.concerns[0].assessment


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


# ── ways ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── roles ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_role_that_may_too_little_is_reported_by_permission(pool: XenServer) -> None:
    """XenAPI's data model: vm-admin may do all but take a VM's snapshot."""
    pool.pool.users["clerk"] = (PASSWORD, "vm-admin")
    about = asked(pool, lambda adapter: adapter.about(), user="clerk")
    assert [(check.name, check.ok) for check in about.checks if not check.ok] == [("permission vm.snapshot", False)]
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())
    with pytest.raises(AuthFailed, match=r"lacks vm\.snapshot") as refused:
        asked(pool, lambda adapter: adapter.snapshot(vm_id, "synvirt-a-1"), user="clerk")
    assert "vm-power-admin" in str(refused.value.hint)
    assert [check.name for check in asked(pool, lambda adapter: adapter.about(), user="root").checks] == ["role"]


def test_a_wrong_password_is_refused_and_named_nowhere(pool: XenServer) -> None:
    with pytest.raises(AuthFailed) as refused:
        asked(pool, lambda adapter: adapter.list_vms(), password="wr0ng")
    assert "wr0ng" not in str(refused.value)
    assert pool.pool.sessions == {}


# ── a pool in trouble ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_coordinator_that_changes_in_the_middle_is_followed(pool: XenServer) -> None:
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())

    async def use(adapter: XenApi) -> list[VmRow]:
        await adapter.inspect(vm_id)
        pool.pool.master = ADDRESSES[1]
        return await adapter.list_vms()

    assert [row.vm_id for row in asked(pool, use)] == [vm_id]
    # And by who comes later: the members' certificates are known from before.
    assert len(asked(pool, lambda adapter: adapter.list_vms())) == 1


def test_a_stranger_as_coordinator_gets_no_password(pool: XenServer) -> None:
    pool.pool.master = ADDRESSES[1]
    with pytest.raises(SourceUnreachable, match="whose certificate is not known"):
        asked(pool, lambda adapter: adapter.list_vms())
    assert pool.pool.calls["session.login_with_password"] == 1


def test_a_session_that_the_pool_ended_is_made_again(pool: XenServer) -> None:
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())

    async def use(adapter: XenApi) -> VmManifest:
        for session in list(pool.pool.sessions):
            pool.pool.end_session(session)
        return await adapter.inspect(vm_id)

    assert asked(pool, use).vm_id == vm_id
    assert pool.pool.sessions == {}


def test_a_disk_that_an_export_left_attached_is_let_go_of(pool: XenServer) -> None:
    vm_id = pool.pool.add_vm("web", [content(2, VHD_BYTES)], pool.pool.add_store())
    pool.pool.export_faults = ["leftover"]

    async def use(adapter: XenApi) -> bytes:
        snapshot = await adapter.snapshot(vm_id, "synvirt-a-1")
        disk = (await adapter.inspect(vm_id)).disks[0]
        found, _ = await asyncio.to_thread(read, await adapter.open_disk(vm_id, snapshot, disk, None))
        await adapter.cleanup(vm_id, "synvirt-a-1")
        return found

    assert asked(pool, use, transport="export") == pool.pool.disk(vm_id).read_bytes()
    assert pool.pool.snapshots() == []
    domain = pool.pool.tables["host"][pool.pool.hosts[ADDRESSES[0]]]["control_domain"]
    assert pool.pool.tables["VM"][domain]["VBDs"] == []


@pytest.mark.parametrize("fault", ["body500", "500", "cut"])
def test_an_export_that_fails_is_never_taken_for_a_disk(pool: XenServer, fault: str) -> None:
    vm_id = pool.pool.add_vm("web", [content(2, VHD_BYTES)], pool.pool.add_store())
    pool.pool.export_faults = [fault]

    async def use(adapter: XenApi) -> bytes:
        snapshot = await adapter.snapshot(vm_id, "synvirt-a-1")
        disk = (await adapter.inspect(vm_id)).disks[0]
        return (await asyncio.to_thread(read, await adapter.open_disk(vm_id, snapshot, disk, None)))[0]

    with pytest.raises(SourceUnreachable, match=r"was lost while VDI .* was exported"):
        asked(pool, use, transport="export")
    asked(pool, lambda adapter: adapter.cleanup(vm_id, "synvirt-a-1"), transport="export")
    assert pool.pool.snapshots() == []


def test_nbd_that_is_down_is_reported_or_gone_around(pool: XenServer) -> None:
    vm_id = pool.pool.add_vm("web", [content(2, VHD_BYTES)], pool.pool.add_store())
    pool.nbd.stop()

    async def use(adapter: XenApi) -> tuple[bytes, str]:
        snapshot = await adapter.snapshot(vm_id, "synvirt-a-1")
        disk = (await adapter.inspect(vm_id)).disks[0]
        spec = await adapter.open_disk(vm_id, snapshot, disk, None)
        return (await asyncio.to_thread(read, spec))[0], spec.format

    assert asked(pool, use) == (pool.pool.disk(vm_id).read_bytes(), "xapi_export")
    with pytest.raises(SourceUnreachable, match="by no NBD that we reach"):
        asked(pool, use, transport="nbd")
    asked(pool, lambda adapter: adapter.cleanup(vm_id, "synvirt-a-1"))


def test_another_certificate_than_the_pool_names_serves_no_disk(pool: XenServer) -> None:
    vm_id = pool.pool.add_vm("web", [content(2, VHD_BYTES)], pool.pool.add_store())
    server = pool.pool.nbd_servers[0]
    other = certificate(pool.folder / "other", "xen-1.example", ADDRESSES[0])  # the right names, and another key
    nameless = certificate(pool.folder / "nameless", "xen-1.example")
    for wrong in ({"cert": other}, {"subject": "other.example"}, {"cert": nameless}):
        pool.pool.nbd_servers = [server | wrong]

        async def use(adapter: XenApi) -> None:
            snapshot = await adapter.snapshot(vm_id, "synvirt-a-1")
            disk = (await adapter.inspect(vm_id)).disks[0]
            await adapter.open_disk(vm_id, snapshot, disk, None)

        with pytest.raises(SourceUnreachable, match="by no NBD that we reach"):
            asked(pool, use, transport="nbd")


def test_secrets_of_specs_are_shown_nowhere(pool: XenServer) -> None:
    vm_id = pool.pool.add_vm("web", [content(1, VHD_BYTES)], pool.pool.add_store())

    async def use(adapter: XenApi) -> str:
        snapshot = await adapter.snapshot(vm_id, "synvirt-a-1")
        disk = (await adapter.inspect(vm_id)).disks[0]
        spec = await adapter.open_disk(vm_id, snapshot, disk, None)
        (session,) = pool.pool.sessions
        assert session not in repr(spec)
        return spec.format

    assert [asked(pool, use, transport=transport) for transport in ("nbd", "export")] == ["nbd_tls", "xapi_export"]


def test_a_vm_that_is_off_and_whose_storage_takes_no_snapshot_is_read_as_it_is(pool: XenServer) -> None:
    store = pool.pool.add_store("udev", cbt=False)
    pool.pool.tables["SR"][store]["allowed_operations"] = []
    vm_id = pool.pool.add_vm("web", [content(2, VHD_BYTES)], store)

    async def use(adapter: XenApi) -> bytes:
        snapshot = await adapter.snapshot(vm_id, "synvirt-a-1")
        disk = (await adapter.inspect(vm_id)).disks[0]
        spec = await adapter.open_disk(vm_id, snapshot, disk, None)
        return (await asyncio.to_thread(read, spec))[0]

    with pytest.raises(SnapshotFailed):
        asked(pool, use)
    pool.pool.power(vm_id, "Halted")
    assert asked(pool, use) == pool.pool.disk(vm_id).read_bytes()


def test_tracking_that_we_began_ends_with_the_last_snapshot(pool: XenServer) -> None:
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())
    vdi = pool.pool.tables["VDI"][pool.pool.vdis(vm_id)[0]]

    async def use(adapter: XenApi) -> None:
        await adapter.enable_cbt(vm_id, [vdi["uuid"]])
        await adapter.snapshot(vm_id, "synvirt-a-1")
        assert vdi["cbt_enabled"]
        await adapter.cleanup(vm_id, "synvirt-a-1")

    asked(pool, use)
    assert (vdi["cbt_enabled"], vdi["other_config"]) == (False, {})


def test_disks_that_are_left_out_are_not_held(pool: XenServer) -> None:
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20), bytes(1 << 20)], pool.pool.add_store())
    second = pool.pool.tables["VDI"][pool.pool.vdis(vm_id)[1]]["uuid"]
    asked(pool, lambda adapter: adapter.snapshot(vm_id, "synvirt-a-1", [second]))
    held = [vdi for vdi in pool.pool.tables["VDI"].values() if vdi["is_a_snapshot"]]
    assert [pool.pool.tables["VDI"][vdi["snapshot_of"]]["uuid"] for vdi in held] == [second]
    asked(pool, lambda adapter: adapter.cleanup(vm_id, "synvirt-a-1"))


def test_a_guest_that_hears_nobody_is_ended(pool: XenServer) -> None:
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())
    pool.pool.deaf.add(vm_id)
    asked(pool, lambda adapter: adapter.shutdown(vm_id))
    assert pool.pool.tables["VM"][pool.pool.vm(vm_id)]["power_state"] == "Halted"


# ── what changed ─────────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_a_disk_in_use_is_waited_for_and_goes(pool: XenServer) -> None:
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())
    asked(pool, lambda adapter: adapter.snapshot(vm_id, "synvirt-a-1"))
    pool.pool.fault("VDI.destroy", "VDI_IN_USE", "OpaqueRef:it", "destroy")
    asked(pool, lambda adapter: adapter.cleanup(vm_id, "synvirt-a-1"))
    assert pool.pool.snapshots() == []


# ── recorded ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pool_that_was_recorded_replays_and_nothing_private_is_in_its_file(pool: XenServer, tmp_path: Path) -> None:
    pool.pool.tables["network"][pool.pool.network]["name_label"] = "vlan of payroll"
    vm_id = pool.pool.add_vm(
        "payroll-7",
        [bytes(1 << 20)],
        pool.pool.add_store(),
        name_description="Ask Jane",
        NVRAM={"EFI-variables": "VkFSUwEA"},
        HVM_boot_params={"firmware": "uefi"},
    )
    recording = Recording()

    async def asked_all(adapter: XenApi) -> tuple[About, list[VmRow], VmManifest]:
        return await adapter.about(), await adapter.list_vms(), await adapter.inspect(vm_id)

    access = replace(pool.access(), recorder=recording)
    about, rows, before = in_session(lambda: XenApi(access), asked_all)
    text = "".join(lines(recording, LiveKind.XEN_API, about, named(rows, [before]), [USER, PASSWORD]))
    sessions = {one["result"] for one in answered(recording) if str(one.get("result")).startswith("OpaqueRef:")}
    assert sessions
    certificate_body = "".join(pool.pool.certificates[ADDRESSES[0]].split("-----")[2].split())[:40]
    for private in ("payroll", "Jane", USER, PASSWORD, vm_id, "26:5a:1c:0f:33:91", "192.0.2.7", "VkFSUwEA", *sessions):
        assert private not in text, private
    assert certificate_body not in text.replace("\\n", "")

    with replayed(text, tmp_path) as (endpoint, fingerprint, replay):
        again = SourceAccess(endpoint, {"user": "any", "password": "any"}, {"fingerprint_sha256": fingerprint}, tmp_path / "s")

        async def use(adapter: XenApi) -> VmManifest:
            assert (await adapter.about()).version == about.version
            (row,) = await adapter.list_vms()
            return await adapter.inspect(row.vm_id)

        vm = in_session(lambda: XenApi(again), use)
        assert replay.unknown == []
    assert (vm.power_state, vm.guest_os, vm.cbt_available) == ("on", before.guest_os, True)
    assert [disk.capacity_bytes for disk in vm.disks] == [1 << 20]
    assert vm.nics[0].mac == "02:00:00:00:00:01"
    assert vm.nics[0].network.startswith("name-")


def answered(recording: Recording) -> list[Any]:
    return [json.loads(answer.body) for *_, answer in recording.exchanges]
