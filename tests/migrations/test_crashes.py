"""The service dies after every commit of the store, in turn, and is started again; the operator cancels at every commit.

Whatever the moment: a job that was to succeed ends Completed with the right bytes, and one that was to end badly leaves
nothing behind and its source as it was found.
"""

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from synvirt.errors import Conflict
from synvirt.jobs.process import started
from synvirt.migrations import source_vm
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.sizes import KIB, MIB
from tests.fakes.guests import MARK, FakePreparer
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.workers import in_process
from tests.house import VM, Crash, House, crash_at, live_plan, offline_plan

DISK = "disk-0"
CONTENT = random.Random(11).randbytes(700 * KIB) + bytes(400 * KIB) + random.Random(12).randbytes(500)
# More commits than any job here makes: a job that never stops committing is a failure, not a long test.
COMMITS_MAX = 120
# A loop is several tests, so that several workers of pytest have a part in it: each takes every third commit.
PARTS = range(3)


@dataclass
class Scenario:
    """A job and the house it runs in. `hypervisor` outlives a crash, as libvirt does. `processes`: its disks are copied by
    worker processes; those of the others by the same code in this process. `parts`: a scenario that has the commits of
    another one, and other trouble, takes a third of them; together those of one course take them all."""

    plan: Callable[[House], MigrationPlan]
    family: str = "linux"
    fail: str | None = None
    ends: State = State.COMPLETED
    live: bool = False
    lies: bool = False
    forgets: bool = False
    processes: bool = False
    parts: Sequence[int] = PARTS

    def house(self, folder: Path, hypervisor: FakeHypervisor) -> House:
        folder.mkdir(exist_ok=True)
        workers = started if self.processes else in_process
        return House(folder, hypervisor=hypervisor, preparer=FakePreparer(), family=self.family, workers=workers)


def _offline(house: House) -> MigrationPlan:
    folder = house.imports / "appliance"
    folder.mkdir()
    for key in (DISK, "disk-1"):
        (folder / f"{key}.raw").write_bytes(CONTENT)
    return offline_plan(folder)


def _live(mode: str) -> Callable[[House], MigrationPlan]:
    def plan(house: House) -> MigrationPlan:
        house.platform.add_vm(VM, {DISK: CONTENT})
        # The limit spreads the copy over several watermarks.
        return live_plan(mode, warm={"delta_threshold_bytes": MIB}, limits={"bandwidth_bps": 8 * MIB})

    return plan


SCENARIOS = {
    "offline": Scenario(_offline, processes=True),
    "offline windows": Scenario(_offline, family="windows", parts=(0,)),
    "warm": Scenario(_live("Warm"), live=True),
    "cold": Scenario(_live("Cold"), live=True),
    "warm, lying": Scenario(_live("Warm"), live=True, lies=True, parts=(0,)),
    "warm, forgetful": Scenario(_live("Warm"), live=True, forgets=True, parts=(1,)),
    "warm, no boot": Scenario(_live("Warm"), fail="boot", ends=State.FAILED, live=True, parts=(2,)),
    "offline, no boot": Scenario(_offline, fail="boot", ends=State.FAILED, parts=(1, 2)),
}


def _commits(scenario: Scenario, folder: Path) -> int:
    """How many commits the job makes when nothing happens to it."""
    house = scenario.house(folder, FakeHypervisor(fail=scenario.fail))
    job = house.intake.submit(scenario.plan(house))
    made: list[int] = []
    house.store.on_commit = lambda: made.append(1)
    assert house.run(job.id).state == scenario.ends
    house.close()
    assert 4 < len(made) < COMMITS_MAX
    return len(made)


def _guest_lives_on(scenario: Scenario, house: House, commit: int) -> None:
    """What a guest does meanwhile: it writes, while it is on. What a lying source hides is much: a sample finds much."""
    if scenario.lies:
        house.platform.guest_writes(VM, DISK, 0, random.Random(commit).randbytes(700 * KIB), tracked=False)
    else:
        house.platform.guest_writes(VM, DISK, commit * 8 * KIB % len(CONTENT), b"written at commit %d" % commit)
    if scenario.forgets:
        house.platform.lose_snapshots(VM)


def _check_end(scenario: Scenario, house: House, job: Migration) -> None:
    assert job.state == scenario.ends, job.last_error
    assert not house.store.slots.has_any(job.id)
    domains = [] if scenario.fail else [str(uuid) for uuid in house.hypervisor.domains]
    assert domains == ([job.domain.uuid] if job.domain and not scenario.fail else [])
    if scenario.fail:
        assert house.hypervisor.domains == {}
        assert house.store.ledger(job.id) == []
    if scenario.live:
        vm = house.platform.vm(VM)
        assert vm["snapshots"] == {}
        assert not vm["cbt_enabled"]  # as it was found
        assert vm["power"] == ("on" if scenario.fail else "off")
    source = house.platform.disk_path(VM, DISK).read_bytes() if scenario.live else CONTENT
    for disk in job.disks:
        found = house.volume(job, disk.key).read_bytes()
        if scenario.family == "windows" and disk.key == DISK:
            assert found.startswith(MARK)
            found = CONTENT[: len(MARK)] + found[len(MARK) :]
        assert found == source


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "part"), [(name, part) for name, scenario in SCENARIOS.items() for part in scenario.parts])
def test_a_crash_after_every_commit_is_survived(name: str, part: int, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    for commit in range(1 + part, _commits(scenario, tmp_path / "first") + 1, len(PARTS)):
        folder, hypervisor = tmp_path / f"crash-{commit}", FakeHypervisor(fail=scenario.fail)
        house = scenario.house(folder, hypervisor)
        job = house.intake.submit(scenario.plan(house))
        house.store.on_commit = crash_at(commit)
        with contextlib.suppress(Crash):
            house.run(job.id)
        house.close()
        if scenario.live and not scenario.fail:
            _guest_lives_on(scenario, house, commit)
        started_again = scenario.house(folder, hypervisor)
        _check_end(scenario, started_again, started_again.run(job.id))
        started_again.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for name, scenario in SCENARIOS.items() if not scenario.fail for part in scenario.parts]
)
def test_a_cancel_at_every_commit_leaves_nothing(name: str, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A guest that was asked to shut down is looked at for a while (test_tidying.py); this one goes off at once or never.
    monkeypatch.setattr(source_vm, "SHUTTING_DOWN_S", 0.0)
    scenario = SCENARIOS[name]
    commits = _commits(scenario, tmp_path / "first")
    for commit in range(1 + part, commits + 1, len(PARTS)):
        house = scenario.house(tmp_path / f"cancel-{commit}", FakeHypervisor())
        job = house.intake.submit(scenario.plan(house))
        # How many there are hangs on how long the copy takes: each run counts its own.
        after: list[int] = []
        house.store.on_commit = _cancel_at(commit, house, job, then=lambda: after.append(1))  # noqa: B023
        ended = house.run(job.id)
        if ended.state == State.CANCELLED:
            assert ended.last_error is not None
            assert ended.last_error.code == "E_MIG_CANCELLED"
            assert house.leftovers(VM if scenario.live else None) == []
            assert house.store.ledger(job.id) == []
            assert [disk.volume for disk in ended.disks if disk.volume] == [], "it names no volume that is gone"
            assert not house.store.slots.has_any(job.id)
            assert not scenario.live or house.platform.vm(VM)["power"] == "on"
        else:
            # The wish came after the last moment at which a step looks for it.
            assert len(after) <= 4
            _check_end(scenario, house, ended)
        house.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_crash_after_every_commit_of_a_cancel_is_survived(tmp_path: Path) -> None:
    scenario = SCENARIOS["warm"]
    for commit in range(1, COMMITS_MAX):
        folder, hypervisor = tmp_path / f"crash-{commit}", FakeHypervisor()
        house = scenario.house(folder, hypervisor)
        job = house.intake.submit(scenario.plan(house))
        house.store.on_commit = _cancel_at(12, house, job, then=crash_at(commit))
        try:
            ended = house.run(job.id)
        except Crash:
            house.close()
            house = scenario.house(folder, hypervisor)
            ended = house.run(job.id)
        else:
            commit = COMMITS_MAX  # noqa: PLW2901 - no commit was left to crash at
        assert ended.state == State.CANCELLED
        assert house.leftovers(VM) == []
        assert house.platform.vm(VM)["power"] == "on"
        house.close()
        if commit == COMMITS_MAX:
            return
    pytest.fail("a cancelled job never stops committing")


def _cancel_at(commit: int, house: House, job: Migration, then: Callable[[], None] = lambda: None) -> Callable[[], None]:
    seen = 0

    def committed() -> None:
        nonlocal seen
        seen += 1
        if seen == commit:
            house.store.on_commit = lambda: None
            with contextlib.suppress(Conflict):  # the commit was the job's last: it has ended
                house.intake.cancel(job.id)
            house.store.on_commit = then

    return committed
