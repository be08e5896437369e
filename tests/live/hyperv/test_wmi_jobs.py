"""Whole jobs from a Hyper-V host of our own to a volume: the warm engine, wmi_api and a worker's code; real VHDX
and AVHDX chains on a real Samba."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.live import LiveAdapter
from synvirt.live.hyperv import exporting, power
from synvirt.live.hyperv.adapter import WmiApi
from synvirt.live.hyperv.session import Session
from synvirt.migrations.memory import PassMemory
from synvirt.model.job import Migration
from synvirt.model.kinds import LiveKind, Mode, State
from synvirt.remote import retrying
from tests.fakes.hyperv.host import EXPORTING, FakeHost
from tests.fakes.hyperv.model import OFF, RUNNING, FakeVm
from tests.fakes.hyperv.wsman import Refusal, Wsman, served
from tests.fakes.workers import in_process
from tests.house import SOURCE_ID, Crash, House, crash_at, live_plan
from tests.patience import quick_tries
from tests.servers.remote_servers import wire

pytestmark = pytest.mark.timeout(600)
DISK_BYTES = 3 << 20


class WmiHouse(House):
    """`options`: of its source."""

    def __init__(self, folder: Path, host: FakeHost, **options: str | int) -> None:
        super().__init__(folder, workers=in_process)
        self.host = host
        self.options: Mapping[str, Any] = options

    async def connect(self, kind: LiveKind, source_id: UUID) -> LiveAdapter:
        return WmiApi(self.host.access(**self.options))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "POLL_S", 0.01)
    monkeypatch.setattr(power, "POLL_S", 0.01)
    monkeypatch.setattr(retrying, "PAUSES_S", (0.05,) * 7)
    quick_tries(monkeypatch)


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


def test_two_disks_are_distinguished_by_their_identifiers(house: WmiHouse, hyperv: FakeHost) -> None:
    content = random.Random(9).randbytes(DISK_BYTES)
    vm = hyperv.hyperv.add_vm(f"two-{uuid4().hex[:8]}", content, content[::-1])
    vm.disks.reverse()
    written = writing_at_commits(house, vm, disks=2)
    job = house.run(house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 1 << 20})).id)
    vm.disks.reverse()  # as the job has them: in the order of their places
    moved(house, vm, job)
    assert written[0] > 1
    assert not any(one.whole for one in job.passes)


@pytest.mark.parametrize("how", ["tracking", "notes"])
def test_a_reset_costs_one_pass_over_the_whole_disk(house: WmiHouse, vm: FakeVm, how: str) -> None:
    """Hyper-V forgets its RCT ids; or somebody removes the reference point, and our line in the notes."""
    job = house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 0, "max_passes": 20}))
    hyperv = house.host.hyperv

    def committed() -> None:
        if house.store.memory.get(job.id, PassMemory, 1).released_at is None:
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
    assert ended.last_error is None, "the pass made it good while the guest ran"
    assert [one.whole for one in ended.passes].count(True) == 1


@pytest.mark.parametrize("options", [{}, EXPORTING], ids=["in_place", "exported"])
def test_disks_that_change_places_between_two_passes_are_no_trap(
    house: WmiHouse, hyperv: FakeHost, options: Mapping[str, Any]
) -> None:
    """Hyper-V knows what changed on each, and the copy has the other one's bytes: few enough that no sample finds them."""
    house.options = options
    one = random.Random(11).randbytes(16 << 20)
    vm = hyperv.hyperv.add_vm(f"two-{uuid4().hex[:8]}", one, one[: 9 << 20] + bytes(4096) + one[(9 << 20) + 4096 :])
    job = house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 0, "max_passes": 20}))

    def committed() -> None:
        if house.store.memory.get(job.id, PassMemory, 1).released_at is None:
            return
        house.store.on_commit = lambda: None
        vm.disks[0].location, vm.disks[1].location = 1, 0
        vm.disks.reverse()

    house.store.on_commit = committed
    ended = house.run(job.id)
    moved(house, vm, ended)
    assert [one.whole for one in ended.passes].count(True) == 1


@pytest.mark.parametrize("starts_again", [False, True])
def test_a_guest_that_its_owner_shuts_down_between_two_passes_is_moved_warm(
    house: WmiHouse, vm: FakeVm, *, starts_again: bool
) -> None:
    """There is no snapshot of a guest that is off, and so no change id: the pass after it compares whole disks."""
    job = house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 0, "max_passes": 20}))
    hyperv, states = house.host.hyperv, [OFF, *([RUNNING] if starts_again else [])]

    def committed() -> None:
        number = 3 - len(states) if starts_again else 1
        if states and house.store.memory.get(job.id, PassMemory, number).released_at is not None:
            hyperv.guest_writes(vm, 777, b"its last words")
            hyperv.power(vm, states.pop(0))
            hyperv.guest_writes(vm, 5000, b"its first words")

    house.store.on_commit = committed
    ended = house.run(job.id)
    moved(house, vm, ended)
    assert states == []
    assert ended.mode_effective is Mode.WARM


def test_a_guest_whose_disks_are_exported_is_moved_warm_too(house: WmiHouse, vm: FakeVm) -> None:
    """Over a checkpoint: whole once, then what changed, the last time of a guest that is off."""
    house.options = EXPORTING
    house.host.hyperv.exported.clear()
    for disk in vm.disks:
        disk.files.checkpoint()
    written = writing_at_commits(house, vm)
    before = house.host.called("changes")
    job = house.run(house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 1 << 20})).id)
    moved(house, vm, job)
    assert (job.mode_effective, written[0] > 0) == (Mode.WARM, True)
    assert not any(one.whole for one in job.passes)
    assert all(one.bytes < 1 << 20 for one in job.passes[1:])
    assert [by_changes for _, by_changes in house.host.hyperv.exported] == [False, *[True] * (len(job.passes) - 1)]
    assert house.host.called("changes") == before


def test_a_guest_whose_disks_are_exported_is_moved_cold(house: WmiHouse, vm: FakeVm) -> None:
    house.options = EXPORTING
    house.host.hyperv.exported.clear()
    job = house.run(house.intake.submit(plan(vm, "Cold")).id)
    moved(house, vm, job)
    assert job.mode_effective is Mode.COLD
    assert [by_changes for _, by_changes in house.host.hyperv.exported] == [False]


def test_a_reset_costs_one_whole_export(house: WmiHouse, vm: FakeVm) -> None:
    house.options = EXPORTING
    hyperv = house.host.hyperv
    hyperv.exported.clear()
    job = house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 0, "max_passes": 20}))

    def committed() -> None:
        if house.store.memory.get(job.id, PassMemory, 1).released_at is not None:
            house.store.on_commit = lambda: None
            hyperv.guest_writes(vm, 777, b"not tracked", tracked=False)
            hyperv.lose_tracking(vm)

    house.store.on_commit = committed
    ended = house.run(job.id)
    moved(house, vm, ended)
    assert [one.whole for one in ended.passes].count(True) == 1
    assert ended.last_error is None, "the pass made it good while the guest ran"
    # The one that was refused is not there; the one that took its place is whole.
    assert [by_changes for _, by_changes in hyperv.exported][:1] == [False]


@pytest.mark.parametrize("way", ["in place", "exported"])
@pytest.mark.parametrize("answered", [False, True])
def test_a_service_that_dies_at_any_call_of_its_source_leaves_nothing(
    tmp_path: Path, hyperv: FakeHost, vm: FakeVm, monkeypatch: pytest.MonkeyPatch, way: str, *, answered: bool
) -> None:
    """At each kind of call that does something, before the host hears of it or before we hear its answer; at those that write
    the journal again and again."""
    folder = tmp_path / "house"
    folder.mkdir()
    options: dict[str, str | int] = dict(EXPORTING) if way == "exported" else {}
    house = WmiHouse(folder, hyperv, **options)
    job = house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 1 << 20}))
    calls, run, died = Counter[str](), Session.run, list[str]()

    def mortal(self: Session, name: str, **parameters: object) -> Any:
        calls[name] += 1
        at = (1, 3, 6, 10) if name == "notes" else (1,) if name not in ("about", "list", "inspect", "state") else ()
        dies = calls[name] in at
        if dies and not answered:
            died.append(name)
            raise Crash
        found = run(self, name, **parameters)
        if dies:
            died.append(name)
            raise Crash
        return found

    monkeypatch.setattr(Session, "run", mortal)
    ended: Migration | None = None
    while ended is None:
        try:
            ended = house.run(job.id)
        except Crash:
            hyperv.hyperv.guest_writes(vm, len(died) * 70_000, b"after a crash")
            house.close()
            house = WmiHouse(folder, hyperv, **options)
    moved(house, vm, ended)
    assert {"take", "convert", "destroy", "power", "notes"} | ({"export", "job"} if way == "exported" else set()) <= set(died)
    house.close()


def test_a_quota_a_cut_share_and_a_busy_vm_in_the_middle_cost_nothing_but_time(
    tmp_path: Path, hyperv: FakeHost, vm: FakeVm
) -> None:
    folder = tmp_path / "house"
    folder.mkdir()
    with wire(hyperv.files.port) as between:
        house = WmiHouse(folder, hyperv, smb_port=between.port)
        job = house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 1 << 20}))
        struck = set[str]()

        def committed() -> None:
            if house.store.memory.get(job.id, PassMemory, 1).snapshot and "share" not in struck:
                struck.add("share")
                between.cuts = {between.connections + one: 200_000 * one for one in range(1, 5)}
            if house.store.memory.get(job.id, PassMemory, 1).released_at and "quota" not in struck:
                struck.add("quota")
                hyperv.wsman.faults["quota"] = 1
                busy = Refusal("CreateSnapshot", 32774)
                for level in (1, 2):
                    hyperv.hyperv.refuse("take", busy, VmId=vm.id, Level=level)

        house.store.on_commit = committed
        moved(house, vm, house.run(job.id))
        house.close()
    assert struck == {"share", "quota"}
    assert hyperv.wsman.faults["quota"] == 0
    assert not hyperv.hyperv.refusals


def test_a_host_whose_disk_is_full_fails_the_job_and_nothing_is_left(house: WmiHouse, vm: FakeVm) -> None:
    """By both ways: Hyper-V has no room for the files that a snapshot needs, or for what it exports."""
    hyperv = house.host.hyperv
    full = "There is not enough space on the disk. (0x80070070)"
    for level in (1, 2):
        for _ in range(10):
            hyperv.refuse("take", Refusal("CreateSnapshot", 32768, full), VmId=vm.id, Level=level)
    ways: tuple[Mapping[str, str], ...] = ({}, EXPORTING)
    for options in ways:
        house.options = options
        ended = house.run(house.intake.submit(plan(vm)).id)
        assert ended.state is State.FAILED
        assert ended.last_error is not None
        assert ended.last_error.code == "E_MIG_SNAPSHOT_FAILED"
        assert "space" in ended.last_error.message
        assert (house.host.snapshots(vm), vm.notes, vm.state) == ([], "", RUNNING)
        hyperv.refusals.clear()
        hyperv.job_fails = (-2147024784, full)
    hyperv.job_fails = None


def test_a_vm_that_fails_over_between_two_passes_is_moved_from_its_new_node(
    tmp_path: Path, hyperv: FakeHost, vm: FakeVm
) -> None:
    model, certificate = hyperv.hyperv, (str(hyperv.certificate.certificate), str(hyperv.certificate.key))
    one, two = (Wsman(model.answers(node), hyperv.wsman.user, hyperv.wsman.password) for node in ("NODE1", "NODE2"))
    model.nodes, vm.node = {"NODE1": True, "NODE2": True}, "NODE1"
    folder = tmp_path / "house"
    folder.mkdir()
    try:
        with served(one, certificate) as first, served(two, certificate) as second:
            house = WmiHouse(folder, hyperv, nodes=f"NODE1=127.0.0.1:{first};NODE2=127.0.0.1:{second}")
            job = house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 1 << 20}))

            def committed() -> None:
                if house.store.memory.get(job.id, PassMemory, 1).released_at is not None:
                    house.store.on_commit = lambda: None
                    model.guest_writes(vm, 123_456, b"on the first node")
                    vm.node, model.nodes["NODE1"] = "NODE2", False

            house.store.on_commit = committed
            ended = house.run(job.id)
            moved(house, vm, ended)
            assert "power" in [name for name, _ in two.calls]
            assert not any(done.whole for done in ended.passes)
            house.close()
    finally:
        model.nodes, vm.node = {}, ""


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
        if house.store.memory.get(job.id, PassMemory, 1).released_at is not None:
            house.store.on_commit = lambda: None
            house.intake.cancel(job.id)

    house.store.on_commit = committed
    ended = house.run(job.id)
    assert ended.state is State.CANCELLED
    assert house.host.snapshots(vm) == []
    assert (vm.notes, vm.state) == ("owner: web team\r\nticket 7", RUNNING)
