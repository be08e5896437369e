"""What a job that has ended could not tidy up: tried again, seldom and not forever, until it is gone."""

import asyncio
import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest

from synvirt import repeating
from synvirt.errors import Internal, NotFound
from synvirt.live.sessions import Sessions
from synvirt.migrations import source_vm, tidying
from synvirt.migrations.planning import left_off
from synvirt.migrations.tidying import Tidier, tidied
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.machine import VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.model.values import now
from synvirt.proof import keeping
from synvirt.sizes import KIB
from synvirt.store.tables import OWED_KINDS
from tests.fakes.live import FakeAdapter
from tests.fakes.workers import in_process
from tests.house import VM, Crash, House, crash_at, give_to, live_plan
from tests.patience import no_patience
from tests.running.processes import until

DISK = "disk-0"
AWAY = 1_000_000


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    no_patience(monkeypatch)
    house = House(tmp_path, workers=in_process)
    house.platform.add_vm(VM, {DISK: random.Random(1).randbytes(256 * KIB)})
    yield house
    house.close()


class Clock(SimpleNamespace):
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(repeating, "time", clock)
    return clock


def guest_runs_here(_house: House, job: Migration) -> bool:
    """From now on nobody needs the source."""
    return job.boot_sign is not None


def guest_is_off(house: House, job: Migration) -> bool:
    return job.state is State.CUTTING_OVER and house.platform.vm(VM)["power"] == "off"


def ended(house: House, *, when: Callable[[House, Migration], bool] = guest_runs_here) -> Migration:
    """A job whose source is away from then on."""
    job = house.intake.submit(live_plan())

    def committed() -> None:
        house.store.on_commit = lambda: None
        if when(house, house.store.get(job.id)):
            house.platform.fault("unreachable", AWAY)
            house.platform.fault("cannot_mark", AWAY)
        else:
            house.store.on_commit = committed

    house.store.on_commit = committed
    return house.run(job.id)


def back(house: House) -> None:
    house.platform.fault("unreachable", 0)
    house.platform.fault("cannot_mark", 0)


def owed(house: House, job: Migration) -> list[str]:
    return [entry.kind for entry in house.store.ledger(job.id) if entry.kind in OWED_KINDS]


def kept(house: House, job: Migration) -> list[str]:
    return [entry.kind for entry in house.store.ledger(job.id) if entry.kind not in OWED_KINDS]


def tries_left(house: House) -> int:
    with house.platform._state() as state:
        return int(state["faults"]["unreachable"])


def test_a_source_that_is_away_for_a_while_is_tidied_up_when_it_is_back(house: House, clock: Clock) -> None:
    job = ended(house)
    assert job.state is State.COMPLETED
    assert job.last_error is not None
    assert (job.last_error.code, job.last_error.fatal) == ("E_MIG_SOURCE_UNREACHABLE", False)
    assert "snapshot" in owed(house, job)
    assert "mark" in owed(house, job)
    assert house.platform.vm(VM)["snapshots"]
    stays = kept(house, job)
    tidier = Tidier(house.rooms, host="local")
    # Away still: tried at once, then after a minute, two, four … an hour at most.
    before = tries_left(house)
    tidier.look()
    assert tries_left(house) < before
    for pause_s in (60, 120, 240, 480, 960, 1920, 3600, 3600):
        before = tries_left(house)
        clock.now += pause_s - 1
        tidier.look()
        assert tries_left(house) == before
        clock.now += 1
        tidier.look()
        assert tries_left(house) < before
    assert house.store.get(job.id).last_error == job.last_error
    back(house)
    clock.now += tidying.LONGEST_PAUSE_S
    tidier.look()
    assert owed(house, job) == []
    assert house.platform.vm(VM)["snapshots"] == {}
    assert len(house.platform.vm(VM)["marks"]) == 1
    assert house.store.get(job.id).last_error is None
    # What the guest lives on here is nobody's to tidy up, and its source stays off.
    assert kept(house, job) == stays
    assert len(house.hypervisor.domains) == 1
    assert house.volume(job).exists()
    assert house.platform.vm(VM)["power"] == "off"
    assert house.store.untidied(host="local") == []


def test_what_was_reported_before_is_reported_again(house: House) -> None:
    house.platform.fault("cannot_track", 1)
    job = ended(house)
    assert job.last_error is not None
    assert job.last_error.code == "E_MIG_SOURCE_UNREACHABLE"
    back(house)
    Tidier(house.rooms, host="local").look()
    found = house.store.get(job.id).last_error
    assert found is not None
    assert (found.code, found.fatal) == ("E_MIG_CBT_UNSUPPORTED", False)


def test_a_source_that_was_removed_is_owed_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ended(house)

    async def gone(*_: object) -> None:
        raise NotFound("no such source")

    monkeypatch.setattr(House, "connect", gone)
    object.__setattr__(house.rooms, "sessions", Sessions(house.connect))
    Tidier(house.rooms, host="local").look()
    assert owed(house, job) == []


def test_a_job_without_a_receipt_says_so_once_its_source_is_tidied_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it shows what it owes its source."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(keeping, "write_bag", full)
    job = ended(house)
    assert job.receipt is None
    assert job.last_error is not None
    assert job.last_error.code == "E_MIG_SOURCE_UNREACHABLE"
    back(house)
    Tidier(house.rooms, host="local").look()
    found = house.store.get(job.id).last_error
    assert found is not None
    assert (found.code, found.fatal) == ("E_MIG_PERSIST_FAILED", False)
    assert "its receipt could not be made" in found.message


@pytest.mark.parametrize("host", ["local", "another"])
def test_a_vm_that_another_job_reads_is_left_alone(house: House, host: str) -> None:
    """On whichever host: it may count on the tracking that this one switched on."""
    job = ended(house)
    back(house)
    other = house.intake.submit(live_plan())
    give_to(house.store, other.id, host)
    tidier = Tidier(house.rooms, host="local")
    tidier.look()
    assert owed(house, job)
    house.intake.cancel(other.id)
    house.run(other.id)
    tidier.look()
    assert owed(house, job) == []


def test_a_job_that_begins_during_the_look_is_seen(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left of jobs before may have taken an hour to tidy up."""
    job, others = ended(house), list[Migration]()
    back(house)
    is_over = repeating.Pauses.is_over

    def begins(pauses: repeating.Pauses[object], key: object) -> bool:
        others.append(house.intake.submit(live_plan()))
        return is_over(pauses, key)

    monkeypatch.setattr(repeating.Pauses, "is_over", begins)
    Tidier(house.rooms, host="local").look()
    assert len(others) == 1
    assert owed(house, job)


def test_jobs_of_another_host_are_left_to_it(house: House) -> None:
    job = ended(house)
    back(house)
    Tidier(house.rooms, host="another").look()
    assert owed(house, job)


@pytest.mark.parametrize("moved_since", [False, True])
def test_a_failed_job_gives_the_guest_back_once_its_source_answers(house: House, moved_since: bool) -> None:
    """And not beside the one that has come here meanwhile."""
    job = ended(house, when=guest_is_off)
    assert job.state is State.FAILED
    assert house.store.ledger(job.id)
    back(house)
    if moved_since:
        assert house.run(house.intake.submit(live_plan("Cold")).id).state is State.COMPLETED
    Tidier(house.rooms, host="local").look()
    assert house.store.ledger(job.id) == []
    assert house.platform.vm(VM)["snapshots"] == {}
    assert house.platform.vm(VM)["power"] == ("off" if moved_since else "on")


@pytest.mark.parametrize("ahead", ["at the start", "at its first try", "for good"])
def test_a_clock_that_is_ahead_for_a_while_leaves_no_source_off(
    house: House, clock: Clock, monkeypatch: pytest.MonkeyPatch, ahead: str
) -> None:
    """As that of a machine that boots, until a time server sets it. A source that was off for a day stays off for good."""
    monkeypatch.setattr(tidying, "time", clock)
    job = ended(house, when=guest_is_off)
    if ahead != "at the start":
        back(house)
    tidier = Tidier(house.rooms, host="local")
    with monkeypatch.context() as wrong:
        wrong.setattr(left_off, "now", lambda: now() + timedelta(days=400))
        tidier.look()
        clock.now += tidying.LATE_FOR_S / 2
        tidier.look()
        assert house.platform.vm(VM)["power"] == "off"
        assert "source_power" in kept(house, job)
        if ahead == "for good":
            clock.now += tidying.LATE_FOR_S
            tidier.look()
    back(house)
    clock.now += tidying.LONGEST_PAUSE_S
    tidier.look()
    assert house.store.ledger(job.id) == []
    assert house.platform.vm(VM)["power"] == ("off" if ahead == "for good" else "on")


def other_source(house: House, monkeypatch: pytest.MonkeyPatch) -> MigrationPlan:
    """A plan of the same VM by another source, as of an ESXi host beside its vCenter. From now on the VM has a UUID."""
    inspect = FakeAdapter.inspect

    async def with_uuid(adapter: FakeAdapter, vm_id: str) -> VmManifest:
        return (await inspect(adapter, vm_id)).model_copy(update={"uuid": "564d1b0e-0000-4000-8000-000000000001"})

    monkeypatch.setattr(FakeAdapter, "inspect", with_uuid)
    other = UUID(int=8)
    house.other_platforms[other] = house.platform
    return live_plan("Cold", source_ref={"kind": "live_vm", "source_id": str(other), "vm_id": VM})


def test_a_guest_that_has_come_here_by_another_source_stays_off(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies of one guest must never run at once."""
    elsewhere = other_source(house, monkeypatch)
    job = ended(house, when=guest_is_off)
    assert job.state is State.FAILED
    back(house)
    assert house.run(house.intake.submit(elsewhere).id).state is State.COMPLETED
    Tidier(house.rooms, host="local").look()
    assert house.store.ledger(job.id) == []
    assert house.platform.vm(VM)["power"] == "off"


def test_a_vm_that_another_job_reads_by_another_source_is_left_alone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = other_source(house, monkeypatch)
    job = ended(house)
    back(house)
    other = house.intake.submit(elsewhere)
    manifest = house.store.get(job.id).manifest
    house.store.change(other.id, State.QUEUED, lambda found: found.model_copy(update={"manifest": manifest}))
    Tidier(house.rooms, host="local").look()
    assert owed(house, job)


def test_a_comparison_of_an_older_copy_does_not_keep_the_guest_off(house: House) -> None:
    """A repair is a job of the same VM, and moves nothing."""
    plan = live_plan("Cold", target={"start": False, "name": "older", "identity": "new"})
    older = house.run(house.intake.submit(plan).id)
    assert older.state is State.COMPLETED
    house.platform.power(VM, "on")
    job = ended(house, when=guest_is_off)
    assert "source_power" in kept(house, job)
    back(house)
    assert house.run(house.intake.repair(older.id, check_only=True).id).state is State.COMPLETED
    Tidier(house.rooms, host="local").look()
    assert house.store.ledger(job.id) == []
    assert house.platform.vm(VM)["power"] == "on"


def test_a_source_is_not_powered_on_beside_a_domain_that_may_live(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: object) -> None:
        raise Internal("the hypervisor does not answer")

    house.hypervisor.fail = "boot"
    undefine = house.hypervisor.undefine
    monkeypatch.setattr(house.hypervisor, "undefine", hangs)
    job = house.run(house.intake.submit(live_plan()).id)
    assert job.state is State.FAILED
    tidier = Tidier(house.rooms, host="local")
    for _ in range(2):
        assert {"domain", "source_power"} <= {entry.kind for entry in house.store.ledger(job.id)}
        assert house.platform.vm(VM)["power"] == "off"
        tidier.look()
    monkeypatch.setattr(house.hypervisor, "undefine", undefine)
    Tidier(house.rooms, host="local").look()
    assert house.store.ledger(job.id) == []
    assert house.platform.vm(VM)["power"] == "on"


def test_a_domain_that_may_live_goes_also_where_another_host_moves_its_machine(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a host that was lost comes back, and its job was begun again on another."""

    def hangs(*_: object) -> None:
        raise Internal("the hypervisor does not answer")

    house.hypervisor.fail = "boot"
    with monkeypatch.context() as hanging:
        hanging.setattr(house.hypervisor, "undefine", hangs)
        job = house.run(house.intake.submit(live_plan()).id)
    other = house.intake.submit(live_plan())
    give_to(house.store, other.id, "another")
    tidier = Tidier(house.rooms, host="local")
    tidier.look()
    assert [entry.kind for entry in house.store.ledger(job.id)] == ["source_power"]
    assert house.platform.vm(VM)["power"] == "off"
    house.store.request_cancel(other.id)
    give_to(house.store, other.id, "local")
    assert house.run(other.id).state is State.CANCELLED
    tidier.look()
    assert house.store.ledger(job.id) == []
    assert house.platform.vm(VM)["power"] == "on"


def test_a_guest_that_goes_off_after_the_job_was_cancelled_is_powered_on_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked politely, and takes its time; the job that asked is no more."""
    asked = threading.Event()

    async def takes_its_time(_adapter: FakeAdapter, _vm_id: str, _manner: str, _timeout_s: float | None) -> None:
        asked.set()
        await asyncio.sleep(3600)

    monkeypatch.setattr(FakeAdapter, "shutdown", takes_its_time)
    job = house.intake.submit(live_plan())
    operator = threading.Thread(target=lambda: (asked.wait(60), house.intake.cancel(job.id)))
    operator.start()
    assert house.run(job.id).state is State.CANCELLED
    operator.join()
    assert house.platform.vm(VM)["power"] == "on"
    house.platform.power(VM, "off")
    Tidier(house.rooms, host="local").look()
    assert house.platform.vm(VM)["power"] == "on"
    assert [entry.kind for entry in house.store.ledger(job.id)] == ["source_power"]  # it is looked at until it cannot any more
    monkeypatch.setattr(source_vm, "SHUTTING_DOWN_S", 0.0)
    Tidier(house.rooms, host="local").look()
    assert house.store.ledger(job.id) == []


def test_a_crash_at_any_commit_of_it_costs_nothing(house: House) -> None:
    job = ended(house)
    back(house)
    for _ in range(20):
        house.store.on_commit = crash_at(1)
        try:
            Tidier(house.rooms, host="local").look()
        except Crash:
            continue
        break
    house.store.on_commit = lambda: None
    Tidier(house.rooms, host="local").look()
    assert owed(house, job) == []
    assert house.platform.vm(VM)["snapshots"] == {}
    assert len(house.platform.vm(VM)["marks"]) == 1
    assert house.store.get(job.id).last_error is None


def test_a_service_begins_with_it_and_goes_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidying, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(tidying, "FIRST_PAUSE_S", 0.05)
    job = ended(house)
    before = tries_left(house)
    with tidied(house.rooms, host="local"):
        until(lambda: tries_left(house) < before)
        back(house)
        until(lambda: not owed(house, job))
    assert house.platform.vm(VM)["snapshots"] == {}


def test_with_nothing_left_no_job_is_read(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each minute all unended jobs of a fleet were parsed, to look for VMs that nothing was owed to."""
    monkeypatch.setattr(house.store, "unended", lambda **_: pytest.fail("nothing is left to tidy up"))
    Tidier(house.rooms, host="local").look()
