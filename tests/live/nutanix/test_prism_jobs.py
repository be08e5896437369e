"""Whole jobs from a Prism to a volume: the warm engine, prism_api and a worker's code, bytes by real servers."""

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.live import LiveAdapter
from synvirt.live.nutanix import prism
from synvirt.live.nutanix.adapter import PrismApi
from synvirt.migrations import patience
from synvirt.migrations.memory import PassMemory
from synvirt.model.job import Migration
from synvirt.model.kinds import LiveKind, Mode, State
from tests.fakes.busy_guest import busy_guest
from tests.fakes.prism.server import Prisms
from tests.fakes.prism.state import VmState
from tests.fakes.workers import in_process
from tests.house import SOURCE_ID, Crash, House, crash_at, live_plan
from tests.patience import quick_tries

pytestmark = pytest.mark.timeout(600)

SIZE = 4 << 20


class PrismHouse(House):
    def __init__(self, folder: Path, prisms: Prisms, *which: str, **options: Any) -> None:
        super().__init__(folder, workers=in_process)
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


def busy(prisms: Prisms, vm: VmState, address: str = "scsi.0", size: int = SIZE) -> AbstractContextManager[list[int]]:
    return busy_guest(lambda offset, data: prisms.state.guest_writes(vm.id, address, offset, data), size)


def same(house: PrismHouse, job: Migration, vm: VmState) -> bool:
    paths = [house.prisms.state.path(disk) for disk in vm.disks]
    return [house.volume(job, disk.key).read_bytes() for disk in job.disks] == [path.read_bytes() for path in paths]


def moved_warm(house: PrismHouse, prisms: Prisms) -> Migration:
    vm = machine(prisms)
    with busy(prisms, vm) as written:
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
    assert ended.last_error is None, "the pass made it good while the guest ran"
    assert [one.whole for one in ended.passes].count(True) == 1
    assert same(here, ended, vm)
    assert by_nfs.names() == []


def test_a_cluster_that_fails_over_for_longer_than_a_request_waits_is_waited_for_and_reported(
    house: Made, by_nfs: Prisms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two passes its Prism answers 503, and its NFS server nothing: the job says so, and goes on."""
    quick_tries(monkeypatch)
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    monkeypatch.setattr(prism, "RETRY_PAUSES_S", (0.01, 0.01))
    here, vm = house(by_nfs, "element"), machine(by_nfs)
    job = here.intake.submit(plan(vm, warm={"delta_threshold_bytes": 64 << 20}))
    reported: list[tuple[str, bool, str]] = []
    away = False

    def committed() -> None:
        nonlocal away
        here.store.on_commit = lambda: None
        now = here.store.get(job.id)
        if not away and any(one.finished_at for one in now.passes):
            away = True
            # Some three times as many as one request asks again.
            by_nfs.fault("element (POST|GET) ", "503", 11)
            by_nfs.state.guest_writes(vm.id, "scsi.0", 999, b"during the fail-over")
        if now.last_error is not None:
            reported.append((now.last_error.code, now.last_error.fatal, now.last_error.message))
        here.store.on_commit = committed

    here.store.on_commit = committed
    ended = here.run(job.id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert reported
    assert {(code, fatal) for code, fatal, _ in reported} == {("E_MIG_SOURCE_UNREACHABLE", False)}
    assert "503" in reported[0][2]
    assert "It is tried again every" in reported[0][2]
    assert ended.last_error is None
    assert not any(one.whole for one in ended.passes[1:])  # it goes on with deltas
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
        if here.store.memory.get(job.id, PassMemory, 1).snapshot:
            here.store.on_commit = lambda: None
            here.intake.cancel(job.id)

    here.store.on_commit = committed
    ended = here.run(job.id)
    assert ended.state is State.CANCELLED, ended.last_error
    assert here.leftovers() == []
    assert by_nfs.names() == []
    assert vm.power == "ON"


# What looks, by the word its path ends with; anything else that is not a GET makes, changes or removes a thing.
LOOKING = re.compile(r"/(list|changed_regions|compute-changed-regions|discover-cluster|info)$")


def dies_after(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """The service, with the cluster's answer to its so manieth request that changes something there. What it asked for."""
    whole, calls = prism.Prism.ask, list[str]()

    def ask(self: prism.Prism, method: str, path: str, **more: Any) -> Any:
        answer = whole(self, method, path, **more)
        if method not in ("GET", "OPTIONS") and not LOOKING.search(path):
            calls.append(f"{method} {path}")
            if len(calls) == number:
                raise Crash
        return answer

    monkeypatch.setattr(prism.Prism, "ask", ask)
    return calls


@pytest.mark.parametrize("way", ["nfs", "iscsi", "image"])
def test_a_service_that_dies_with_any_answer_of_the_cluster_leaves_nothing_there(
    house: Made, way: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each thing made, changed or removed: snapshots, recovery points, volume groups, images, an allow-list, the power.
    Every second job is called off when the service is back, the others go on."""
    prisms: Prisms = request.getfixturevalue({"nfs": "by_nfs", "iscsi": "by_iscsi", "image": "cluster"}[way])
    options: dict[str, Any] = {"transport": way}
    if way == "nfs":
        prisms.state.cluster_list[:] = ["127.0.0.7/255.255.255.255"]
        prisms.state.on_list()
        options |= {"extend_allow_list": True, "client_address": "127.0.0.1"}
    containers = json.dumps(prisms.state.containers)
    content, crashes, changed = random.Random(5).randbytes(1 << 18), 0, set[str]()
    while True:
        vm = prisms.state.add_vm(f"web-{crashes}", {"scsi.0": content})
        with monkeypatch.context() as patched:
            calls = dies_after(patched, crashes + 1)
            first = house(prisms, **options)
            job = first.intake.submit(plan(vm, "Cold"))
            with suppress(Crash):
                first.run(job.id)
            first.close()
        died = len(calls) > crashes
        changed.update(re.sub(r"[0-9a-f-]{36}", "ID", one) for one in calls)
        again = house(prisms, **options)
        if died and crashes % 2:
            again.intake.cancel(job.id)
        ended = again.run(job.id)
        where = f"crash {crashes + 1}, after {calls[-1]}"
        assert ended.state in (State.COMPLETED, State.CANCELLED), (where, ended.last_error)
        assert prisms.names() == [], where
        assert [group.name for group in prisms.state.groups.values()] == [], where
        assert json.dumps(prisms.state.containers) == containers, where
        assert list(again.folder.glob("own/allow-list-*")) == [], where
        if ended.state is State.COMPLETED:
            assert same(again, ended, vm), where
        else:
            assert vm.power == "ON", where
        again.close()
        del prisms.state.vms[vm.id]
        if not died:
            break
        crashes += 1
    assert crashes >= {"nfs": 5, "iscsi": 8, "image": 4}[way], changed
