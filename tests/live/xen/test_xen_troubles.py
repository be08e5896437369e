"""xen_api with a pool in trouble: another coordinator, ended sessions, failing exports, disks in use."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from synvirt.errors import Conflict, SnapshotFailed, SourceUnreachable
from synvirt.live import GuestStaysOn, VmRow
from synvirt.live.form import Place
from synvirt.live.xen import exports
from synvirt.live.xen.adapter import XenApi
from synvirt.live.xen.session import Login, XapiFailure, XenSession
from synvirt.model.access import SourceOptions
from synvirt.model.machine import VmManifest
from synvirt.model.plan import Shutdown
from tests.contracts.live import in_session, read
from tests.fakes.xenserver import ADDRESSES, XenServer
from tests.fakes.xenserver.server import certificate
from tests.live.xen.asking import VHD_BYTES, asked, content

# ── a pool in trouble ───────────────────────────────────────────────────────────────────────────────────


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


# ── what changed ────────────────────────────────────────────────────────────────────────────────────────


def test_a_disk_in_use_is_waited_for_and_goes(pool: XenServer) -> None:
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())
    asked(pool, lambda adapter: adapter.snapshot(vm_id, "synvirt-a-1"))
    pool.pool.fault("VDI.destroy", "VDI_IN_USE", "OpaqueRef:it", "destroy")
    asked(pool, lambda adapter: adapter.cleanup(vm_id, "synvirt-a-1"))
    assert pool.pool.snapshots() == []


# ── several sessions at once ────────────────────────────────────────────────────────────────────────────


def at_once(use: Callable[[int, int], object], rounds: int = 50) -> None:
    """In eight threads: `use(thread, round)`, each round begun together."""
    barrier = Barrier(8)

    def run(thread: int) -> None:
        for number in range(rounds):
            barrier.wait(60)
            try:
                use(thread, number)
            except BaseException:
                barrier.abort()
                raise

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(run, thread) for thread in range(8)]:
            done.result()


def test_sessions_that_trust_a_server_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    pem = certificate(tmp_path / "server", "xen-1.example", "127.0.0.1")
    server = {"address": "127.0.0.1", "subject": "xen-1.example", "cert": pem, "port": "10809", "exportname": "e"}

    def use(_thread: int, number: int) -> None:
        spec = exports._server(server, {}, tmp_path / f"{number}")
        assert (Path(spec.trusted) / "ca-cert.pem").read_text() == pem

    at_once(use)


def test_sessions_that_note_the_members_at_once_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first jobs of a wave do, and those after a host was added."""
    place = Place("https", None, "127.0.0.1", 443, "", "")
    session = XenSession(place, Login("root", "x"), SourceOptions(), tmp_path)
    asked: dict[str, int] = {}

    def call(_what: str, _method: str, *_: Any) -> dict[str, dict[str, str]]:
        asked["number"] = asked.get("number", 0) + 1
        return {"OpaqueRef:1": {"address": f"10.0.0.{asked['number'] % 250}"}}

    monkeypatch.setattr(session, "call", call)
    monkeypatch.setattr(session, "certificate_of", lambda _reference: "AA:BB")
    at_once(lambda *_: session._keep_members())
    assert list(session.members().values()) == ["AA:BB"]


def test_members_that_cannot_be_noted_keep_nobody_out(pool: XenServer, tmp_path: Path) -> None:
    """A full disk here is no trouble of the pool."""
    (tmp_path / "full").touch()
    access = replace(pool.access(), folder=tmp_path / "full/folder")
    assert in_session(lambda: XenApi(access), lambda adapter: adapter.list_vms()) == []


def test_a_fault_of_the_toolstack_passes_and_that_of_a_task_is_the_tasks(pool: XenServer) -> None:
    """xapi answers so while it restarts; a held job of weeks must not end by it."""
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())
    restarts = ("INTERNAL_ERROR", 'Unix.Unix_error(Unix.ECONNREFUSED, "connect", "")')
    pool.pool.fault("VM.get_by_uuid", *restarts)
    with pytest.raises(SourceUnreachable, match="ECONNREFUSED"):
        asked(pool, lambda adapter: adapter.inspect(vm_id))
    assert asked(pool, lambda adapter: adapter.inspect(vm_id)).name == "web"
    pool.pool.fault("VM.snapshot", *restarts)
    with pytest.raises(SnapshotFailed, match="ECONNREFUSED"):
        asked(pool, lambda adapter: adapter.snapshot(vm_id, "synvirt-a-1"))


# ── the end of a guest ──────────────────────────────────────────────────────────────────────────────────


def test_a_toolstack_that_restarts_powers_no_guest_off(pool: XenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """xapi answers with an error of its own; the guest could be asked a little later."""
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())
    asked_of, restarts = XenSession.asked, ["Async.VM.clean_shutdown"]

    def refused(self: XenSession, method: str, *parameters: Any) -> Any:
        if method in restarts:
            restarts.remove(method)
            raise XapiFailure("INTERNAL_ERROR", ['Unix.Unix_error(Unix.ECONNREFUSED, "connect", "")'])
        return asked_of(self, method, *parameters)

    monkeypatch.setattr(XenSession, "asked", refused)
    with pytest.raises(SourceUnreachable, match="ECONNREFUSED"):
        asked(pool, lambda adapter: adapter.shutdown(vm_id))
    assert pool.pool.calls["VM.hard_shutdown"] == 0
    asked(pool, lambda adapter: adapter.shutdown(vm_id))
    assert pool.pool.calls["VM.hard_shutdown"] == 0


@pytest.mark.parametrize("manner", ["hold", "polite"])
def test_a_guest_that_was_asked_before_is_waited_for(pool: XenServer, manner: Shutdown) -> None:
    """xapi itself waits up to 20 minutes for it, and asks it only once meanwhile."""
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())
    pool.pool.takes_its_time.add(vm_id)
    for _ in range(2):
        with pytest.raises(GuestStaysOn):
            asked(pool, lambda adapter: adapter.shutdown(vm_id, "hold", 0.2))
    if manner == "hold":
        pool.pool.takes_its_time.clear()
    asked(pool, lambda adapter: adapter.shutdown(vm_id, manner, 60 if manner == "hold" else 0.2))
    assert pool.pool.tables["VM"][pool.pool.vm(vm_id)]["power_state"] == "Halted"
    assert pool.pool.calls["VM.hard_shutdown"] == (manner == "polite")


def test_a_disk_that_was_taken_out_of_its_vm_is_not_tracked_any_more(pool: XenServer) -> None:
    """XenServer moves no disk to another storage while it is tracked."""
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)] * 2, pool.pool.add_store())
    disks = [pool.pool.tables["VDI"][vdi] for vdi in pool.pool.vdis(vm_id)]

    async def use(adapter: XenApi) -> None:
        await adapter.enable_cbt(vm_id, [vdi["uuid"] for vdi in disks])
        for number in (1, 2):
            await adapter.snapshot(vm_id, f"synvirt-a-{number}")
        for vbd in list(disks[1]["VBDs"]):
            pool.pool.vbd_destroy(vbd)
        await adapter.cleanup(vm_id, "synvirt-a-1")
        assert [vdi["cbt_enabled"] for vdi in disks] == [True, True]
        await adapter.cleanup(vm_id, "synvirt-a-2")

    asked(pool, use)
    assert [(vdi["cbt_enabled"], vdi["other_config"]) for vdi in disks] == [(False, {})] * 2
    assert pool.pool.snapshots() == []


@pytest.mark.parametrize("transport", ["nbd", "export"])
def test_a_vm_that_somebody_made_from_our_snapshot_keeps_its_disks(pool: XenServer, transport: str) -> None:
    """They have the snapshot's name: a pool gives a clone the name of what it is made from, and so its own snapshots."""
    store, name = pool.pool.add_store(), "synvirt-a-1"
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], store)
    theirs = pool.pool.vm(pool.pool.add_vm("made from a snapshot", [], store))

    async def use(adapter: XenApi) -> None:
        await adapter.snapshot(vm_id, name)
        clone = pool.pool.add_disk(theirs, bytes(1 << 20), store, 0)
        pool.pool.tables["VDI"][clone]["name_label"] = name
        pool.pool.vm_snapshot(theirs, "before the update")
        pool.pool.power(pool.pool.tables["VM"][theirs]["uuid"], "Halted")
        before = [ref for ref, one in pool.pool.tables["VDI"].items() if one["snapshot_of"] == clone]
        await adapter.release(vm_id, name)
        await adapter.cleanup(vm_id, name)
        left = {ref for ref, one in pool.pool.tables["VDI"].items() if one["name_label"] == name}
        assert left == {clone, *before}

    asked(pool, use, transport=transport)


@pytest.mark.parametrize("state", ["Suspended", "Paused"])
def test_a_guest_that_is_suspended_while_it_is_asked_loses_nothing(pool: XenServer, state: str) -> None:
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())
    pool.pool.power(vm_id, state)
    with pytest.raises(Conflict, match="is suspended"):
        asked(pool, lambda adapter: adapter.shutdown(vm_id, timeout_s=0.1))
    assert pool.pool.calls["VM.hard_shutdown"] == 0
    asked(pool, lambda adapter: adapter.power_on(vm_id))
    assert pool.pool.tables["VM"][pool.pool.vm(vm_id)]["power_state"] == "Running"
