"""xen_api held to the laws of LiveAdapter, by both ways to a disk; its roles, and what it records."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from synvirt.errors import AuthFailed, BadRequest
from synvirt.live import About, SourceAccess, VmRow
from synvirt.live.recording import Recording, lines, named
from synvirt.live.xen.adapter import XenApi
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import VmManifest
from tests.contracts.live import LiveCase, LiveContract, in_session
from tests.fakes.xenserver import ADDRESSES, PASSWORD, USER, XenServer
from tests.live.xen.asking import CBT_BYTES, VHD_BYTES, asked, content
from tests.servers.replay import replayed


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


# ── roles ───────────────────────────────────────────────────────────────────────────────────────────────


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


# ── recorded ────────────────────────────────────────────────────────────────────────────────────────────


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
