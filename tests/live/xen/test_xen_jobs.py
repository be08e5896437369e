"""Whole jobs from a pool to a volume: the warm engine, xen_api and a worker's code; disks come over real TLS."""

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.disks.nbd import reader as nbd
from synvirt.errors import SourceUnreachable
from synvirt.live import LiveAdapter
from synvirt.live.xen.adapter import XenApi
from synvirt.migrations import patience
from synvirt.model.job import Migration
from synvirt.model.kinds import LiveKind, Mode, State
from tests.fakes.busy_guest import busy_guest
from tests.fakes.workers import in_process
from tests.fakes.xenserver import ADDRESSES, XenServer, xenserver
from tests.house import SOURCE_ID, Crash, House, crash_at, live_plan

DISK_BYTES = (9 << 20) + (12 << 10)


class XenHouse(House):
    def __init__(self, folder: Path, server: XenServer, transport: str, vm_id: str | None = None) -> None:
        super().__init__(folder, workers=in_process)
        self.server, self.transport = server, transport
        if vm_id is not None:
            self.vm_id = vm_id
            return
        # A disk that grows here, one that stays.
        store = server.pool.add_store()
        generator = random.Random(3)
        parts = (bytes(1 << 20) if number % 3 == 2 else generator.randbytes(1 << 20) for number in range(9))
        self.vm_id = server.pool.add_vm("web", [b"".join(parts) + bytes(12 << 10), generator.randbytes(1 << 20)], store)

    def again(self) -> "XenHouse":
        """After a crash: a service that is started again."""
        return XenHouse(self.folder, self.server, self.transport, self.vm_id)

    async def connect(self, kind: LiveKind, source_id: UUID) -> LiveAdapter:
        return XenApi(self.server.access(transport=self.transport))

    def plan(self, mode: str = "Warm", **fields: Any) -> Any:
        reference = {"kind": "live_vm", "source_id": str(SOURCE_ID), "vm_id": self.vm_id}
        return live_plan(mode, source={"Live": "xen_api"}, source_ref=reference, **fields)

    def moved(self, mode: str = "Warm", **fields: Any) -> Migration:
        return self.run(self.intake.submit(self.plan(mode, **fields)).id)

    def same(self, job: Migration) -> bool:
        found = [self.volume(job, disk.key).read_bytes() for disk in job.disks]
        return found == [self.server.pool.disk(self.vm_id, number).read_bytes() for number in range(2)]

    def left(self) -> list[str]:
        """What a job may not leave at its source."""
        pool = self.server.pool
        tracked = [vdi["uuid"] for vdi in pool.tables["VDI"].values() if vdi["cbt_enabled"] or vdi["other_config"]]
        return [*pool.snapshots(), *tracked, *pool.sessions]

    def busy_guest(self) -> AbstractContextManager[list[int]]:
        """On its first disk."""
        return busy_guest(lambda offset, data: self.server.pool.guest_writes(self.vm_id, offset, data), DISK_BYTES, seed=5)


@pytest.fixture(params=["nbd", "export"])
def house(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[XenHouse]:
    """By both ways of deltas: tracking with NBD, differencing VHDs by exports."""
    (tmp_path / "house").mkdir()
    with xenserver(tmp_path / "pool") as server:
        made = XenHouse(tmp_path / "house", server, request.param)
        yield made
        made.close()


def test_a_guest_that_keeps_writing_is_moved_warm_and_loses_nothing(house: XenHouse) -> None:
    with house.busy_guest() as written:
        job = house.moved(warm={"delta_threshold_bytes": 64 << 20})
    assert job.state is State.COMPLETED, job.last_error
    assert (job.mode_effective, job.last_error) == (Mode.WARM, None)
    assert written[0] > 0
    assert house.same(job)
    assert (job.passes[0].kind, job.passes[-1].kind) == ("full", "final")
    assert house.left() == []
    # It was shut down for the cut-over, and says where it went.
    vm = house.server.pool.tables["VM"][house.server.pool.vm(house.vm_id)]
    assert (vm["power_state"], str(job.id) in vm["other_config"]["synvirt"]) == ("Halted", True)


def test_a_cold_move(house: XenHouse) -> None:
    job = house.moved("Cold")
    assert job.state is State.COMPLETED, job.last_error
    assert house.same(job)
    assert house.left() == []


def test_a_move_that_fails_leaves_its_source_as_it_was(house: XenHouse) -> None:
    house.server.pool.fault("VM.snapshot", "SR_FULL", "1", "0", times=100)
    job = house.moved()
    assert job.state is State.FAILED
    assert job.last_error is not None
    assert "SR_FULL" in job.last_error.message
    assert house.left() == []
    assert house.leftovers() == []
    assert house.server.pool.tables["VM"][house.server.pool.vm(house.vm_id)]["power_state"] == "Running"


def test_tracking_that_is_lost_between_two_passes_costs_one_whole_pass(
    house: XenHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody switched it off and on, or removed the older snapshot: the whole disk is compared, and the move goes on."""
    pool = house.server.pool
    answered, done = pool.vm_snapshot, list[int]()

    def snapshot(*given: Any) -> str:
        # Before the second one is taken.
        if len(done) == 1:
            pool.lose_tracking(house.vm_id)
            for vdi in [one for one, vdi in pool.tables["VDI"].items() if vdi["is_a_snapshot"] and not vdi["VBDs"]]:
                pool.vdi_destroy(vdi)
        done.append(1)
        return answered(*given)

    monkeypatch.setattr(pool, "vm_snapshot", snapshot)
    with house.busy_guest():
        job = house.moved(warm={"delta_threshold_bytes": 64 << 20})
    assert job.state is State.COMPLETED, job.last_error
    assert job.last_error is None, "the pass made it good while the guest ran"
    assert any(one.whole for one in job.passes)
    assert house.same(job)
    assert house.left() == []


@pytest.mark.parametrize("house", ["export"], indirect=True)
def test_disks_without_deltas_move_cold_and_say_why(house: XenHouse) -> None:
    for vdi in house.server.pool.vdis(house.vm_id):
        house.server.pool.tables["VDI"][vdi]["sm_config"]["image-format"] = "qcow2"
    job = house.moved()
    assert job.state is State.COMPLETED, job.last_error
    assert job.mode_effective is Mode.COLD
    assert job.last_error is not None
    assert job.last_error.code == "E_MIG_CBT_UNSUPPORTED"
    assert "kept as qcow2" in job.last_error.message
    assert house.same(job)
    assert house.left() == []


@pytest.mark.parametrize("house", ["export"], indirect=True)
def test_an_export_that_breaks_off_goes_on_from_its_watermark(house: XenHouse) -> None:
    house.server.pool.export_faults = ["cut", "body500"]
    job = house.moved("Cold")
    assert job.state is State.COMPLETED, job.last_error
    assert house.same(job)
    assert house.left() == []


# ── trouble in the middle ────────────────────────────────────────────────────────────────────────────────────────────


def _coordinator_changes(house: XenHouse) -> None:
    house.server.pool.master = ADDRESSES[1]


def _sessions_end(house: XenHouse) -> None:
    for session in list(house.server.pool.sessions):
        house.server.pool.end_session(session)


def _disk_is_in_use(house: XenHouse) -> None:
    """By the storage's garbage collector, for a moment."""
    for method in ("VDI.list_changed_blocks", "VDI.data_destroy", "VDI.destroy"):
        house.server.pool.fault(method, "VDI_IN_USE", "OpaqueRef:it", "its operation")


def _exports_fail(house: XenHouse) -> None:
    house.server.pool.export_faults = ["body500", "cut"]


@pytest.mark.parametrize(
    ("house", "trouble"),
    [
        ("nbd", _coordinator_changes),
        ("nbd", _sessions_end),
        ("nbd", _disk_is_in_use),
        ("export", _coordinator_changes),
        ("export", _sessions_end),
        ("export", _disk_is_in_use),
        ("export", _exports_fail),
    ],
    indirect=["house"],
)
def test_trouble_before_a_delta_is_got_over(
    house: XenHouse, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[XenHouse], None]
) -> None:
    """Between the first pass and the second, once the second's snapshot is asked for; the move goes on and loses nothing."""
    house.rooms = dataclasses.replace(house.rooms, workers=in_process)
    pool = house.server.pool
    dispatch, methods = pool.dispatch, list[str]()

    def troubled(address: str, method: str, given: list[Any]) -> Any:
        if method == "Async.VM.snapshot":
            methods.append(method)
            if len(methods) == 2:
                pool.guest_writes(house.vm_id, 5 << 20, b"before the delta")
                trouble(house)
        return dispatch(address, method, given)

    monkeypatch.setattr(pool, "dispatch", troubled)
    job = house.moved(warm={"delta_threshold_bytes": 64 << 20})
    assert job.state is State.COMPLETED, job.last_error
    assert job.mode_effective is Mode.WARM
    assert len(methods) >= 3
    assert house.same(job)
    assert house.left() == []


# ── the host of the NBD is down ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("when", ["full", "delta"])
def test_the_host_of_the_nbd_goes_down_in_the_middle_of_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The first pass goes on by an export; a delta by tracking has no other way, says so, and waits for the host."""
    monkeypatch.setattr(nbd, "RECONNECT_DELAYS_S", (0.01,))
    monkeypatch.setattr(patience, "PAUSES_S", {SourceUnreachable: (0.1,)})
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    with xenserver(tmp_path / "pool") as server:
        house = XenHouse(tmp_path / "house", server, "auto")
        job_id = house.intake.submit(house.plan(warm={"delta_threshold_bytes": 64 << 20})).id
        read_into, fell, came, reported = nbd.NbdReader.read_into, threading.Event(), threading.Event(), list[str]()

        def read(self: nbd.NbdReader, offset: int, buffer: memoryview) -> None:
            if not fell.is_set() and house.store.get(job_id).passes[-1].kind == when:
                fell.set()
                server.nbd.stop()
            read_into(self, offset, buffer)

        def committed() -> None:
            if not fell.is_set() or came.is_set():
                return
            job = house.store.get(job_id)
            reported.extend([job.last_error.code] if job.last_error else [])
            if reported if when == "delta" else job.passes[-1].kind != "full":
                came.set()
                server.nbd.start()

        monkeypatch.setattr(nbd.NbdReader, "read_into", read)
        house.store.on_commit = committed
        with house.busy_guest():
            job = house.run(job_id)
        house.store.on_commit = lambda: None
        assert job.state is State.COMPLETED, job.last_error
        assert (job.mode_effective, job.last_error, came.is_set()) == (Mode.WARM, None, True)
        assert not any(one.whole for one in job.passes)
        assert set(reported) <= {"E_MIG_SOURCE_UNREACHABLE"}
        assert house.same(job)
        assert house.left() == []
        house.close()


# ── the service dies ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("transport", ["nbd", "export"])
def test_a_service_that_dies_after_commits_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """One job, whose service dies after its second commit, and after the fourth of the next one, and so on until one of them
    comes to the end: places all over the job. The guest writes on."""
    (tmp_path / "house").mkdir()
    with xenserver(tmp_path / "pool") as server:
        house = XenHouse(tmp_path / "house", server, transport)
        job = house.intake.submit(house.plan(warm={"delta_threshold_bytes": 64 << 20}))
        ended, deaths = None, 0
        while ended is None:
            house.store.on_commit = crash_at(2 + 2 * deaths)
            try:
                ended = house.run(job.id)
            except Crash:
                deaths += 1
                server.pool.guest_writes(house.vm_id, deaths * 70_000 % DISK_BYTES, b"after a crash")
                house.close()
                house = house.again()
        house.store.on_commit = lambda: None
        assert ended.state is State.COMPLETED, ended.last_error
        assert deaths > 8
        assert house.same(ended)
        # A session of a service that was killed stays, until the pool ends it.
        server.pool.sessions.clear()
        assert house.left() == []
        house.close()
