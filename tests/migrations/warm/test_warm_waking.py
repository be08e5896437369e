"""The warm engine over a source that wakes: two copies of one guest never run."""

from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from synvirt.errors import CbtUnsupported, SourceUnreachable, SynvirtError
from synvirt.live import SnapshotRef
from synvirt.migrations.patience import Patience
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import Shutdown
from synvirt.sizes import KIB, MIB
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.live import FakeAdapter
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan
from tests.migrations.warm.warm_house import DISK, content, error, in_state, once, source_bytes
from tests.patience import no_patience, quick_tries


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, workers=in_process)
    yield house
    house.close()


@pytest.mark.parametrize("mode", ["Warm", "Cold"])
def test_two_of_one_guest_never_run(house: House, mode: str) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan(mode))
    once(house, job, in_state(State.STARTING), lambda: house.platform.power(VM, "on"))
    ended = house.run(job.id)
    assert (ended.state, error(ended)) == (State.FAILED, ("E_MIG_CONFLICT", True))
    assert house.hypervisor.domains == {}
    assert house.volume(ended).exists()
    assert house.platform.vm(VM)["power"] == "on"


def test_two_of_one_guest_never_run_while_it_climbs_from_bus_to_bus(tmp_path: Path) -> None:
    house = House(tmp_path, hypervisor=FakeHypervisor(boots_from=("sata",)))
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())
    once(house, job, lambda now: len(now.boot_attempts) == 2, lambda: house.platform.power(VM, "on"))
    ended = house.run(job.id)
    assert (ended.state, error(ended)) == (State.FAILED, ("E_MIG_CONFLICT", True))
    assert len(ended.boot_attempts) == 2
    assert house.hypervisor.domains == {}
    assert house.platform.vm(VM)["power"] == "on"
    house.close()


def test_a_domain_that_is_not_started_minds_no_living_source(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan("Cold", target={"start": False}))
    once(house, job, in_state(State.STARTING), lambda: house.platform.power(VM, "on"))
    assert house.run(job.id).state == State.COMPLETED


def test_a_guest_that_runs_here_is_not_undone_by_a_source_that_cannot_be_tidied(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_patience(monkeypatch)
    house.platform.add_vm(VM, {DISK: content()})
    house.platform.fault("cannot_mark", 99)
    ended = house.run(house.intake.submit(live_plan()).id)
    assert (ended.state, error(ended)) == (State.COMPLETED, ("E_MIG_SOURCE_UNREACHABLE", False))
    assert len(house.hypervisor.domains) == 1
    # What is owed stays in the ledger.
    assert ("mark", VM) in [(entry.kind, entry.name) for entry in house.store.ledger(ended.id)]
    assert house.platform.vm(VM)["marks"] == []


def test_a_source_that_is_away_for_a_moment_costs_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_tries(monkeypatch)
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())
    once(house, job, in_state(State.CUTTING_OVER), lambda: house.platform.fault("unreachable", 3))
    assert house.run(job.id).state == State.COMPLETED


def test_a_guest_that_is_given_back_runs_before_its_snapshots_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some platforms take hours for that."""
    house = House(tmp_path, hypervisor=FakeHypervisor(fail="boot"), workers=in_process)
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())
    power: list[str] = []
    cleanup = FakeAdapter.cleanup

    async def seen(adapter: FakeAdapter, vm_id: str, name: str) -> None:
        if house.store.get(job.id).state is State.STARTING:
            power.append(house.platform.vm(vm_id)["power"])
        await cleanup(adapter, vm_id, name)

    monkeypatch.setattr(FakeAdapter, "cleanup", seen)
    ended = house.run(job.id)
    assert ended.state is State.FAILED
    assert set(power) == {"on"}
    assert house.platform.vm(VM)["snapshots"] == {}
    assert house.platform.vm(VM)["power"] == "on"
    house.close()


def by_hand(house: House, seed: int) -> None:
    """Somebody powers the guest on; it writes, and goes off again."""
    house.platform.power(VM, "on")
    house.platform.guest_writes(VM, DISK, 0, content(64 * KIB, seed))
    house.platform.power(VM, "off")


def test_a_snapshot_whose_answer_was_lost_is_taken_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name it would be found, as the guest was then."""
    quick_tries(monkeypatch)
    house.platform.add_vm(VM, {DISK: content()})
    snapshot, wait = FakeAdapter.snapshot, Patience.wait
    lost: list[str] = []

    async def losing(adapter: FakeAdapter, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        made = await snapshot(adapter, vm_id, name, disks)
        if house.platform.vm(VM)["power"] == "off" and not lost:
            lost.append(name)
            raise SourceUnreachable("the answer is lost")
        return made

    async def meanwhile(self: Patience, trouble: SynvirtError) -> None:
        by_hand(house, 7)
        await wait(self, trouble)

    monkeypatch.setattr(FakeAdapter, "snapshot", losing)
    monkeypatch.setattr(Patience, "wait", meanwhile)
    ended = house.run(house.intake.submit(live_plan()).id)
    assert lost
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert house.volume(ended).read_bytes() == source_bytes(house)


@pytest.mark.parametrize("mode", ["Warm", "Cold"])
def test_no_last_snapshot_is_taken_of_a_guest_that_is_on(house: House, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody powered it on before; it is shut down once more."""
    house.platform.add_vm(VM, {DISK: content()})
    snapshot = FakeAdapter.snapshot
    woken: list[str] = []

    async def waking(adapter: FakeAdapter, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        off = house.platform.vm(VM)["power"] == "off"
        if off and not woken:
            woken.append(name)
            house.platform.power(VM, "on")
        made = await snapshot(adapter, vm_id, name, disks)
        house.platform.guest_writes(VM, DISK, 0, content(64 * KIB, len(woken)))
        return made

    monkeypatch.setattr(FakeAdapter, "snapshot", waking)
    ended = house.run(house.intake.submit(live_plan(mode)).id)
    assert woken
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert house.volume(ended).read_bytes() == source_bytes(house)


def test_a_guest_that_starts_again_and_again_is_given_back(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    shutdown = FakeAdapter.shutdown

    async def restarted(adapter: FakeAdapter, vm_id: str, manner: Shutdown, timeout_s: float | None) -> None:
        await shutdown(adapter, vm_id, manner, timeout_s)
        house.platform.power(vm_id, "on")

    monkeypatch.setattr(FakeAdapter, "shutdown", restarted)
    ended = house.run(house.intake.submit(live_plan()).id)
    assert (ended.state, error(ended)) == (State.FAILED, ("E_MIG_CONFLICT", True))
    assert house.platform.vm(VM)["power"] == "on"
    assert house.platform.vm(VM)["snapshots"] == {}


def test_a_guest_that_was_on_by_hand_is_copied_once_more(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())

    def last_begun(now: Migration) -> bool:
        return bool(now.passes) and now.passes[-1].kind == "final"

    once(house, job, last_begun, lambda: by_hand(house, 8))
    ended = house.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert [one.kind for one in ended.passes].count("final") == 2
    assert house.volume(ended).read_bytes() == source_bytes(house)


@pytest.mark.parametrize(("mode", "state"), [("Warm", State.STARTING), ("Cold", State.STARTING), ("Cold", State.COPYING_FULL)])
def test_a_copy_that_lacks_what_its_source_wrote_by_hand_is_not_started(house: House, mode: str, state: State) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan(mode))
    once(house, job, lambda now: now.state is state and bool(now.passes), lambda: by_hand(house, 9))
    ended = house.run(job.id)
    assert (ended.state, error(ended)) == (State.FAILED, ("E_MIG_CONFLICT", True))
    assert house.hypervisor.domains == {}
    assert house.platform.vm(VM)["power"] == "on"
    assert house.platform.vm(VM)["snapshots"] == {}


def test_a_suspended_guest_loses_nothing(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())
    once(house, job, in_state(State.CUTTING_OVER), lambda: house.platform.power(VM, "suspended"))
    ended = house.run(job.id)
    assert (ended.state, error(ended)) == (State.FAILED, ("E_MIG_CONFLICT", True))
    assert house.platform.vm(VM)["power"] == "suspended"
    assert house.platform.vm(VM)["snapshots"] == {}


@pytest.mark.parametrize("threshold_bytes", [0, 64 * MIB])
def test_a_guest_that_its_owner_has_shut_down_is_moved(
    house: House, monkeypatch: pytest.MonkeyPatch, threshold_bytes: int
) -> None:
    """On Proxmox VE its bitmaps end with it, and a guest that is off has none: each later pass finds that, the last one too."""
    snapshot, enable = FakeAdapter.snapshot, FakeAdapter.enable_cbt

    async def untracked_while_off(
        adapter: FakeAdapter, vm_id: str, name: str, disks: Collection[str] | None = None
    ) -> SnapshotRef:
        made = await snapshot(adapter, vm_id, name, disks)
        off = house.platform.vm(vm_id)["power"] == "off"
        return made.model_copy(update={"change_ids": {}}) if off else made

    async def only_while_on(adapter: FakeAdapter, vm_id: str, disks: Collection[str]) -> None:
        if house.platform.vm(vm_id)["power"] == "off":
            raise CbtUnsupported("it is off: QEMU tracks changes only while the guest runs")
        await enable(adapter, vm_id, disks)

    def shut_down() -> None:
        house.platform.guest_writes(VM, DISK, 0, b"its last words", tracked=False)
        house.platform.power(VM, "off")
        house.platform.lose_change_ids(VM)

    monkeypatch.setattr(FakeAdapter, "snapshot", untracked_while_off)
    monkeypatch.setattr(FakeAdapter, "enable_cbt", only_while_on)
    no_patience(monkeypatch)
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan(warm={"delta_threshold_bytes": threshold_bytes, "max_passes": 9}))
    once(house, job, in_state(State.DELTA_SYNCING), shut_down)
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert len(ended.passes) == 3, "there is nothing to converge"
    assert house.platform.vm(VM)["snapshots"] == {}
