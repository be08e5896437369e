"""Whole jobs from a Hyper-V host of our own to a volume: the warm engine, wmi_api and the copy worker as they are; real VHDX
and AVHDX chains on a real Samba."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.live import LiveAdapter
from synvirt.live.hyperv.adapter import WmiApi
from synvirt.model import LiveKind, Migration, Mode, State
from tests.fakes.hyperv.host import FakeHost
from tests.fakes.hyperv.model import OFF, RUNNING, FakeVm
from tests.house import SOURCE_ID, Crash, House, crash_at, live_plan

pytestmark = pytest.mark.timeout(600)
DISK_BYTES = 3 << 20


class WmiHouse(House):
    def __init__(self, folder: Path, host: FakeHost) -> None:
        super().__init__(folder)
        self.host = host

    async def connect(self, kind: LiveKind, source_id: UUID) -> LiveAdapter:
        return WmiApi(self.host.access())


@pytest.fixture
def vm(hyperv: FakeHost) -> FakeVm:
    generator = random.Random(7)
    parts = (bytes(1 << 20) if number % 3 == 2 else generator.randbytes(1 << 20) for number in range(DISK_BYTES >> 20))
    return hyperv.hyperv.add_vm(f"job-{uuid4().hex[:8]}", b"".join(parts))


@pytest.fixture
def house(tmp_path: Path, hyperv: FakeHost) -> Iterator[WmiHouse]:
    folder = tmp_path / "house"
    folder.mkdir()
    made = WmiHouse(folder, hyperv)
    yield made
    made.close()


def plan(vm: FakeVm, mode: str = "Warm", **fields: Any) -> Any:
    source_ref = {"kind": "live_vm", "source_id": str(SOURCE_ID), "vm_id": vm.id}
    return live_plan(mode, source={"Live": "wmi_api"}, source_ref=source_ref, **fields)


def moved(house: WmiHouse, vm: FakeVm, job: Migration) -> None:
    """Whole, and nothing of ours is left at the source."""
    assert job.state is State.COMPLETED, job.last_error
    for number, disk in enumerate(job.disks):
        assert house.volume(job, disk.key).read_bytes() == house.host.hyperv.content(vm, number)
    assert house.host.snapshots(vm) == []
    assert house.host.wsman.shells == {}
    assert vm.state == OFF


def writing_at_commits(house: WmiHouse, vm: FakeVm, *, disks: int = 1) -> list[int]:
    """The guest writes small pieces all over its disks, at each thing that the job writes down; how often, in the end."""
    written, generator = [0], random.Random(3)

    def committed() -> None:
        offset = generator.randrange(DISK_BYTES - 4096)
        content = generator.randbytes(generator.randrange(1, 4096))
        written[0] += house.host.hyperv.guest_writes(vm, offset, content, disk=written[0] % disks)

    house.store.on_commit = committed
    return written


def test_a_guest_that_keeps_writing_is_moved_warm_and_loses_nothing(house: WmiHouse, vm: FakeVm) -> None:
    """Over a checkpoint: its disk is a chain of an AVHDX over a VHDX, and the AVHDX changes between passes."""
    for disk in vm.disks:
        disk.files.checkpoint()
    written = writing_at_commits(house, vm)
    job = house.run(house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 1 << 20})).id)
    moved(house, vm, job)
    assert job.mode_effective is Mode.WARM
    assert written[0] > 0
    assert (job.passes[0].kind, job.passes[-1].kind) == ("full", "final")
    assert not any(one.whole for one in job.passes)
    # A delta reads what changed alone.
    assert all(one.bytes < 1 << 20 for one in job.passes[1:])
    assert str(job.id) in vm.notes


def test_a_cold_job_shuts_the_guest_down_first_and_takes_no_snapshot(house: WmiHouse, vm: FakeVm) -> None:
    vm.hears = False
    taken = house.host.called("take")
    writing_at_commits(house, vm)
    job = house.run(house.intake.submit(plan(vm, "Cold")).id)
    moved(house, vm, job)
    assert job.mode_effective is Mode.COLD
    assert house.host.called("take") == taken


def test_two_disks_are_told_apart_by_their_identifiers(house: WmiHouse, hyperv: FakeHost) -> None:
    content = random.Random(9).randbytes(DISK_BYTES)
    vm = hyperv.hyperv.add_vm(f"two-{uuid4().hex[:8]}", content, content[::-1])
    vm.disks.reverse()
    written = writing_at_commits(house, vm, disks=2)
    job = house.run(house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 1 << 20})).id)
    moved(house, vm, job)
    assert written[0] > 1
    assert not any(one.whole for one in job.passes)


@pytest.mark.parametrize("how", ["tracking", "notes"])
def test_a_reset_costs_one_pass_over_the_whole_disk(house: WmiHouse, vm: FakeVm, how: str) -> None:
    """Hyper-V forgets its RCT ids; or somebody removes the reference point, and our line in the notes."""
    job = house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 0, "max_passes": 20}))
    hyperv = house.host.hyperv

    def committed() -> None:
        if house.store.noted(job.id, "released:1") is None:
            return
        house.store.on_commit = lambda: None
        # An edit that nobody tracked.
        hyperv.guest_writes(vm, 777, b"not tracked", tracked=False)
        if how == "tracking":
            hyperv.lose_tracking(vm)
        else:
            vm.points.clear()
            vm.notes = ""

    house.store.on_commit = committed
    ended = house.run(job.id)
    moved(house, vm, ended)
    assert ended.last_error is not None
    assert (ended.last_error.code, ended.last_error.fatal) == ("E_MIG_CBT_RESET", False)
    assert [one.whole for one in ended.passes].count(True) == 1


def test_a_service_that_dies_anywhere_goes_on_and_leaves_nothing(tmp_path: Path, hyperv: FakeHost, vm: FakeVm) -> None:
    folder = tmp_path / "house"
    folder.mkdir()
    house = WmiHouse(folder, hyperv)
    job = house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 1 << 20}))
    died = 0
    # Every few commits, further on each time: in the middle of a snapshot, a release, the cut-over.
    for commit in (3, 5, 6, 7, 8, 9, 11, 13):
        house.store.on_commit = crash_at(commit)
        try:
            house.run(job.id)
        except Crash:
            died += 1
            hyperv.hyperv.guest_writes(vm, died * 70_000, b"after a crash")
        house.close()
        house = WmiHouse(folder, hyperv)
    ended = house.run(job.id)
    moved(house, vm, ended)
    assert died >= 5
    house.close()


def test_a_vm_that_cannot_be_tracked_moves_cold_and_the_plan_says_why(house: WmiHouse, vm: FakeVm) -> None:
    vm.checkpoint_type = 2
    job = house.run(house.intake.submit(plan(vm)).id)
    moved(house, vm, job)
    assert job.mode_effective is Mode.COLD
    assert job.last_error is not None
    assert job.last_error.code == "E_MIG_CBT_UNSUPPORTED"
    assert "CheckpointType" in job.last_error.message


def test_a_cancelled_job_leaves_the_source_as_it_was(house: WmiHouse, vm: FakeVm) -> None:
    vm.notes = "owner: web team\r\nticket 7"
    job = house.intake.submit(plan(vm, warm={"cutover": "manual", "interval_s": 3600}))

    def committed() -> None:
        if house.store.noted(job.id, "released:1") is not None:
            house.store.on_commit = lambda: None
            house.intake.cancel(job.id)

    house.store.on_commit = committed
    ended = house.run(job.id)
    assert ended.state is State.CANCELLED
    assert house.host.snapshots(vm) == []
    assert (vm.notes, vm.state) == ("owner: web team\r\nticket 7", RUNNING)
