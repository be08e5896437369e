"""A guest that its source no longer has: the other sources of its kind are asked for it, and the job's error names that."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from synvirt.errors import SourceUnreachable, SynvirtError, VmNotFound
from synvirt.jobs.stop import Stop
from synvirt.live import GuestElsewhere
from synvirt.live.registry import BY_KIND
from synvirt.migrations.job import Job
from synvirt.migrations.source_vm import refuse_another
from synvirt.migrations.sources import elsewhere
from synvirt.migrations.sources.elsewhere import name_new_source
from synvirt.migrations.tidying import Tidier
from synvirt.model.job import Migration
from synvirt.model.kinds import LiveKind, State
from synvirt.model.machine import VmManifest
from synvirt.model.sources import Source, SourceTest
from synvirt.model.values import now
from synvirt.sizes import MIB
from tests.fakes.live import FakePlatform
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan
from tests.migrations.jobs.running import DISK, error_code, some_disk
from tests.migrations.warm.warm_house import in_state, once
from tests.patience import no_patience, quick_tries


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path, workers=in_process)
    yield made
    made.close()


def another(
    house: House, name: str, *, power: str | None = "on", kind: str = "libvirt_remote", ok: bool = True
) -> FakePlatform:
    """A source that is registered, too; `power`: of the VM there, None: it has none. `ok`: its last test."""
    source = Source(
        id=uuid4(),
        name=name,
        kind=LiveKind(kind),
        endpoint="qemu+ssh://kvm2/system",
        created_at=now(),
        last_test=SourceTest(ok=ok, at=now()),
    )
    house.store.sources.add(source, b"sealed", host="local")
    platform = house.other_platforms[source.id] = FakePlatform(house.folder / name)
    if power is not None:
        platform.add_vm(VM, {DISK: some_disk(MIB)})
        platform.power(VM, power)
    return platform


def named(house: House, job: Migration, error: SynvirtError, *, stop: Stop | None = None) -> str | None:
    """The hint of a job's error, once the others were asked."""
    asyncio.run(name_new_source(Job(job, house.rooms, stop or Stop()), error))
    return error.hint


def test_a_guest_that_was_migrated_to_the_host_of_another_source_is_found_there(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_tries(monkeypatch)
    house.platform.add_vm(VM, {DISK: some_disk(4 * MIB)})
    job = house.intake.submit(live_plan())

    another(house, "kvm2")

    def migrated() -> None:
        if house.store.get(job.id).state is State.DELTA_SYNCING and VM in house.platform.vm_ids():
            house.platform.lose_vm(VM)

    house.store.on_commit = migrated
    ended = house.run(job.id)
    assert (ended.state, error_code(ended)) == (State.FAILED, "E_MIG_VM_NOT_FOUND")
    assert ended.last_error is not None
    assert ended.last_error.hint == "it runs on source kvm2 now: submit it from there"


def test_it_is_named_only_where_it_runs_and_no_refused_login_is_tried_again(house: House) -> None:
    """A VM of the same id that is off may be a copy of it. A platform may lock an account that is refused again."""
    job = house.intake.submit(live_plan())
    platforms = [
        another(house, "off", power="off"),
        another(house, "none", power=None),
        another(house, "refused", ok=False),
        another(house, "other kind", kind="wmi_api"),
    ]
    before = VmNotFound("gone").hint
    assert named(house, job, VmNotFound("gone")) == before
    assert [platform.logins for platform in platforms] == [1, 1, 0, 0]
    another(house, "kvm3")
    another(house, "kvm2")
    assert named(house, job, GuestElsewhere("moved")) == "it runs on source kvm2 and on source kvm3 now: submit it from there"


def test_other_errors_ask_nobody(house: House) -> None:
    job, platform = house.intake.submit(live_plan()), another(house, "kvm2")
    assert named(house, job, SourceUnreachable("away", hint="as it was")) == "as it was"
    assert platform.logins == 0


def test_a_source_that_fails_or_hangs_and_a_cancel_leave_the_error_as_it_is(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = house.intake.submit(live_plan())
    another(house, "fails").fault("unreachable", 9)
    assert named(house, job, GuestElsewhere("moved", hint="as it was")) == "as it was"
    stop = Stop()
    stop.set()
    assert named(house, job, GuestElsewhere("moved", hint="as it was"), stop=stop) == "as it was"
    another(house, "kvm2")

    async def hangs(*_: object) -> bool:
        await asyncio.Event().wait()
        return True

    monkeypatch.setattr(elsewhere, "WITHIN_S", 0.01)
    monkeypatch.setattr(elsewhere, "_runs_there", hangs)
    assert named(house, job, GuestElsewhere("moved", hint="as it was")) == "as it was"


def test_no_source_is_asked_where_the_platform_gives_a_moved_vm_another_id(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = house.intake.submit(live_plan())
    another(house, "kvm2")
    lines = {kind: replace(platform, ids_stay=False) for kind, platform in BY_KIND.items()}
    monkeypatch.setattr(elsewhere, "BY_KIND", lines)
    gone = VmNotFound("gone")
    assert named(house, job, gone) == VmNotFound("gone").hint


# ── another machine has its id by now ────────────────────────────────────────────────────────────────────────────────


def replaced(house: House, power: str = "on") -> None:
    """The VM was removed, and a new one has its id, as happens with the numbers of Proxmox VE; its disks are as large."""
    house.platform.remove_vm(VM)
    house.platform.add_vm(VM, {DISK: some_disk(4 * MIB, 9)}, uuid=UUID(int=2))
    house.platform.power(VM, power)


def untouched(house: House, power: str = "on") -> bool:
    """Whether the other machine is as its owner left it."""
    vm = house.platform.vm(VM)
    switched = [state for state, _ in vm["powered"]]
    return (vm["power"], vm["marks"], vm["snapshots"], switched) == (power, [], {}, [] if power == "on" else ["off"])


@pytest.mark.parametrize("state", [State.COPYING_FULL, State.DELTA_SYNCING, State.CUTTING_OVER])
def test_another_machine_that_has_its_id_is_neither_copied_nor_shut_down(house: House, state: State) -> None:
    house.platform.add_vm(VM, {DISK: some_disk(4 * MIB)}, uuid=UUID(int=1))
    job = house.intake.submit(live_plan("Cold" if state is State.COPYING_FULL else "Warm"))
    once(house, job, in_state(state), lambda: replaced(house))
    ended = house.run(job.id)
    assert (ended.state, error_code(ended)) == (State.FAILED, "E_MIG_VM_NOT_FOUND")
    assert ended.last_error is not None
    assert f"is another machine now: {VM} of UUID {UUID(int=2)}, and not {VM} of UUID {UUID(int=1)}" in ended.last_error.message
    assert untouched(house)
    assert house.hypervisor.domains == {}


def test_a_failed_job_is_not_gone_on_with_from_another_machine(house: House) -> None:
    house.platform.add_vm(VM, {DISK: some_disk(4 * MIB)}, uuid=UUID(int=1))
    job = house.intake.submit(live_plan())
    once(house, job, in_state(State.STARTING), lambda: house.platform.power(VM, "on"))
    assert house.run(job.id).state is State.FAILED
    replaced(house)
    again = house.run(house.intake.retry(job.id, {}).id)
    assert (again.state, error_code(again)) == (State.FAILED, "E_MIG_VM_NOT_FOUND")
    assert untouched(house)


def test_a_job_that_owes_its_guest_powers_no_other_machine_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source was away when it failed, and its guest is off."""
    quick_tries(monkeypatch)
    no_patience(monkeypatch)
    house.platform.add_vm(VM, {DISK: some_disk(4 * MIB)}, uuid=UUID(int=1))
    job = house.intake.submit(live_plan("Cold"))
    once(house, job, lambda _: house.platform.vm(VM)["power"] == "off", lambda: house.platform.fault("unreachable", 9**9))
    assert house.run(job.id).state is State.FAILED
    assert "source_power" in {entry.kind for entry in house.store.ledger(job.id)}
    house.platform.fault("unreachable", 0)
    replaced(house, "off")
    Tidier(house.rooms, host="local").look()
    assert untouched(house, "off")
    assert house.store.ledger(job.id) == []


@pytest.mark.parametrize(
    ("vm_id", "before", "present"),
    [("105", None, "a"), ("105", "a", None), ("105", "a", "a"), ("9f1b1c1e-0000-4000-8000-000000000001", "a", "b")],
)
def test_it_is_the_same_machine_unless_its_uuid_says_otherwise(vm_id: str, before: str | None, present: str | None) -> None:
    """A platform that knows its VMs by UUIDs gives none of them to another one, whatever firmware its answer names."""
    refuse_another(VmManifest(vm_id=vm_id, name="web", uuid=before), VmManifest(vm_id=vm_id, name="db", uuid=present))
