"""Whole jobs from a Prism to a volume: the warm engine, prism_api and the copy worker as they are, bytes by real servers."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.live import LiveAdapter
from synvirt.live.nutanix.adapter import PrismApi
from synvirt.model import LiveKind, Migration, Mode, State
from tests.fakes.prism.server import Prisms
from tests.fakes.prism.state import VmState
from tests.house import SOURCE_ID, Crash, House, crash_at, live_plan

pytestmark = pytest.mark.timeout(600)

SIZE = 4 << 20


class PrismHouse(House):
    def __init__(self, folder: Path, prisms: Prisms, *which: str, **options: Any) -> None:
        super().__init__(folder)
        self.prisms, self.which, self.options_ = prisms, which, options

    async def connect(self, kind: LiveKind, source_id: UUID) -> LiveAdapter:
        return PrismApi(self.prisms.access(*self.which, folder=self.folder / "own", **self.options_))


Made = Callable[..., PrismHouse]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Made]:
    made: list[PrismHouse] = []

    def make(prisms: Prisms, *which: str, **options: Any) -> PrismHouse:
        folder = tmp_path / "house"
        folder.mkdir(exist_ok=True)
        made.append(PrismHouse(folder, prisms, *which, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def machine(prisms: Prisms) -> VmState:
    generator = random.Random(7)
    parts = (bytes(1 << 20) if number % 3 == 2 else generator.randbytes(1 << 20) for number in range(SIZE >> 20))
    return prisms.state.add_vm("web", {"scsi.0": b"".join(parts), "scsi.1": generator.randbytes(1 << 20)})


def plan(vm: VmState, mode: str = "Warm", **fields: Any) -> Any:
    ref = {"kind": "live_vm", "source_id": str(SOURCE_ID), "vm_id": vm.id}
    return live_plan(mode, source={"Live": "prism_api"}, source_ref=ref, **fields)


@contextmanager
def busy_guest(prisms: Prisms, vm: VmState) -> Iterator[list[int]]:
    """Writes small pieces all over its disk for as long as it runs; how often, in the end."""
    written, over = [0], threading.Event()

    def write() -> None:
        generator = random.Random(3)
        while not over.is_set():
            data = generator.randbytes(generator.randrange(1, 4096))
            written[0] += prisms.state.guest_writes(vm.id, "scsi.0", generator.randrange(SIZE - 4096), data)
            over.wait(0.01)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield written
    finally:
        over.set()
        thread.join()


def same(house: PrismHouse, job: Migration, vm: VmState) -> bool:
    paths = [house.prisms.state.path(disk) for disk in vm.disks]
    return [house.volume(job, disk.key).read_bytes() for disk in job.disks] == [path.read_bytes() for path in paths]


def moved_warm(house: PrismHouse, prisms: Prisms) -> Migration:
    vm = machine(prisms)
    with busy_guest(prisms, vm) as written:
        job = house.run(house.intake.submit(plan(vm, warm={"delta_threshold_bytes": 64 << 20})).id)
    assert job.state is State.COMPLETED, job.last_error
    assert (job.mode_effective, job.last_error) == (Mode.WARM, None)
    assert written[0] > 0
    assert same(house, job, vm)
    assert [one.kind for one in job.passes][:: len(job.passes) - 1] == ["full", "final"]
    assert job.passes[0].bytes < 5 << 20  # what was never written is not read
    assert prisms.names() == []
    assert (vm.power, "moved" in vm.description or "migrated" in vm.description) == ("OFF", True)
    return job


def test_a_guest_that_keeps_writing_is_moved_by_nfs(house: Made, by_nfs: Prisms) -> None:
    """Prism Central shows and switches it, Prism Element has its snapshots."""
    moved_warm(house(by_nfs), by_nfs)


def test_a_guest_that_keeps_writing_is_moved_by_iscsi(house: Made, by_iscsi: Prisms) -> None:
    moved_warm(house(by_iscsi, transport="iscsi"), by_iscsi)


def test_a_warm_plan_runs_cold_where_images_alone_are_left(house: Made, cluster: Prisms) -> None:
    """With the reason, and the guest is shut down first."""
    here, vm = house(cluster, "central"), machine(cluster)
    job = here.run(here.intake.submit(plan(vm)).id)
    assert job.state is State.COMPLETED, job.last_error
    assert job.mode_effective is Mode.COLD
    assert job.last_error is not None
    assert (job.last_error.code, job.last_error.fatal) == ("E_MIG_CBT_UNSUPPORTED", False)
    assert "image download" in job.last_error.message
    assert same(here, job, vm)
    assert cluster.names() == []


def test_a_snapshot_that_others_removed_costs_one_comparison(house: Made, by_nfs: Prisms) -> None:
    """Its schedule let it expire between two passes."""
    here, vm = house(by_nfs, "element"), machine(by_nfs)
    job = here.intake.submit(plan(vm, warm={"delta_threshold_bytes": 0, "max_passes": 20}))

    def committed() -> None:
        here.store.on_commit = lambda: None
        if any(one.finished_at for one in here.store.get(job.id).passes):
            with by_nfs.state.lock:
                for kept in list(by_nfs.state.kept.values()):
                    by_nfs.state.forget(kept)
            by_nfs.state.guest_writes(vm.id, "scsi.0", 777, b"after the reset")
        else:
            here.store.on_commit = committed

    here.store.on_commit = committed
    ended = here.run(job.id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert ended.last_error is not None
    assert (ended.last_error.code, ended.last_error.fatal) == ("E_MIG_CBT_RESET", False)
    assert [one.whole for one in ended.passes].count(True) == 1
    assert same(here, ended, vm)
    assert by_nfs.names() == []


@pytest.mark.parametrize("commit", [8, 16, 24])
def test_a_service_that_is_killed_goes_on_and_leaves_nothing(house: Made, by_nfs: Prisms, commit: int) -> None:
    first, vm = house(by_nfs, "element"), machine(by_nfs)
    job = first.intake.submit(plan(vm))
    first.store.on_commit = crash_at(commit)
    try:
        first.run(job.id)
    except Crash:
        by_nfs.state.guest_writes(vm.id, "scsi.0", 4096 * commit, b"while the service was away")
    first.close()
    again = house(by_nfs, "element")
    ended = again.run(job.id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert same(again, ended, vm)
    assert by_nfs.names() == []


def test_a_job_that_fails_leaves_the_source_as_it_was(house: Made, by_nfs: Prisms) -> None:
    here, vm = house(by_nfs, "element"), machine(by_nfs)
    by_nfs.fault("changed_regions", "403", 10_000)
    job = here.intake.submit(plan(vm))

    def committed() -> None:
        if here.store.noted(job.id, "snapshot:1"):
            here.store.on_commit = lambda: None
            here.intake.cancel(job.id)

    here.store.on_commit = committed
    ended = here.run(job.id)
    assert ended.state is State.CANCELLED, ended.last_error
    assert here.leftovers() == []
    assert by_nfs.names() == []
    assert vm.power == "ON"
