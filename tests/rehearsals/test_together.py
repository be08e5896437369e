"""Guests that are rehearsed together: one network, started in their order, and nobody goes before all have been checked."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pytest
from pydantic import ValidationError

from synvirt.errors import Conflict, NotFound
from synvirt.fleet.changing import change_members
from synvirt.fleet.model import Group, MemberState, WaveRequest
from synvirt.fleet.waves import Waves
from synvirt.jobs import runner
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.machine import Nic
from synvirt.model.rehearsal import REHEARSED, CommandCheck, Rehearsal, RehearsalState, RehearsedJob, TogetherRequest
from synvirt.rehearsals import engine, under_way
from tests.fleet.made import member, wave
from tests.house import Crash, live_plan
from tests.rehearsals.stage import CONTENT, DISK, HELD, FakeNetwork, Stage, Writing

VMS = ("vm-db", "vm-shop", "vm-mail")
COMMITS_MAX = 150


class Network(FakeNetwork):
    """`made`: with how many cards each."""

    made: ClassVar[list[int]] = []

    def __init__(self, cards: Sequence[Nic]) -> None:
        super().__init__(cards)
        self.made.append(len(cards))

    def addresses(self, cards: Any = None) -> list[str]:
        return []

    def connect(self, port: int, timeout_s: float, cards: Any = None) -> Any:
        return super().connect(port, timeout_s)


class Watched(Writing):
    """`started`: the guests of rehearsals in their order; `together`: how many ran at most; `fails`: it never boots."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[UUID] = []
        self.together = 0
        self.fails: UUID | None = None
        self._counting = threading.Lock()

    def start(self, uuid: UUID) -> None:
        super().start(uuid)
        with self._counting:
            self.started.append(uuid)
            self.together = max(self.together, sum(one.running for one in self.domains.values()))
            if uuid == self.fails:
                self.power_off(uuid)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    Network.open, Network.made = [], []
    made = Stage(tmp_path / "house", Watched(), begin_network=Network)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for the others: a crash at every commit would take minutes of waiting."""
    monkeypatch.setattr(engine, "WAIT_POLL_S", 0.05)


def jobs_of(stage: Stage, count: int = 3) -> list[Migration]:
    jobs = []
    for vm in VMS[:count]:
        stage.house.platform.add_vm(vm, {DISK: CONTENT})
        plan = live_plan(warm=HELD)
        ref = plan.source_ref.model_copy(update={"vm_id": vm})
        jobs.append(stage.house.intake.submit(plan.model_copy(update={"source_ref": ref, "name": vm})))
    for job in jobs:
        stage.begin_job(job.id)
    for job in jobs:
        stage.holds(job.id)
    return jobs


def together(stage: Stage, jobs: Sequence[Migration], *checks: str) -> list[Rehearsal]:
    """To the end of all."""
    members = [
        RehearsedJob(migration_id=job.id, checks=tuple(CommandCheck(kind="command", argv=(one,), within_s=1) for one in checks))
        for job in jobs
    ]
    return ended(stage, stage.asking.ask_together(TogetherRequest(members=tuple(members))))


def ended(stage: Stage, found: Sequence[Rehearsal]) -> list[Rehearsal]:
    for one in found:
        stage.begin(one.id)
    stage.until(lambda: all(stage.asking.get(one.migration_id, one.id).state in REHEARSED for one in found))
    return [stage.asking.get(one.migration_id, one.id) for one in found]


def watched(stage: Stage) -> Watched:
    assert isinstance(stage.house.hypervisor, Watched)
    return stage.house.hypervisor


def test_they_are_there_for_each_other_in_one_network(stage: Stage) -> None:
    jobs = jobs_of(stage)
    found = together(stage, jobs, "true")
    assert [(one.state, one.error) for one in found] == [(RehearsalState.PASSED, None)] * 3
    assert watched(stage).started == [one.id for one in found], "in their order"
    assert watched(stage).together == 3, "all of them at one time"
    cards = sum(len(job.manifest.nics) for one in jobs if (job := stage.house.store.get(one.id)).manifest is not None)
    assert Network.made == [cards], "one network, with the cards of all"
    assert Network.open == [], "it went with the last of them"
    assert [one.checks[1].detail for one in found] == ["that of 3 guests, which is isolated"] * 3
    left = "".join(one for job in jobs for one in stage.leftovers(stage.house.store.get(job.id)))
    assert not any(str(one.id) in left for one in found)
    assert watched(stage).domains == {}


def test_their_network_goes_before_the_last_of_them_has_ended(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[RehearsalState] = []

    def closed(network: Network) -> None:
        states.extend(one.state for job in jobs for one in stage.asking.of(job.id))
        FakeNetwork.close(network)

    monkeypatch.setattr(Network, "close", closed)
    jobs = jobs_of(stage, 2)
    found = together(stage, jobs)
    assert [one.state for one in found] == [RehearsalState.PASSED] * 2
    assert RehearsalState.SWEEPING in states


def test_one_that_does_not_boot_holds_up_nobody(stage: Stage) -> None:
    jobs = jobs_of(stage)
    begun = stage.asking.ask_together(TogetherRequest(members=tuple(RehearsedJob(migration_id=job.id) for job in jobs)))
    watched(stage).fails = begun[0].id
    found = ended(stage, begun)
    assert [one.state for one in found] == [RehearsalState.FAILED, RehearsalState.PASSED, RehearsalState.PASSED]
    assert Network.open == []


def test_one_that_is_cancelled_holds_up_nobody(stage: Stage) -> None:
    jobs = jobs_of(stage, 2)
    begun = stage.asking.ask_together(TogetherRequest(members=tuple(RehearsedJob(migration_id=job.id) for job in jobs)))
    stage.asking.cancel(jobs[0].id, begun[0].id)
    found = ended(stage, begun)
    assert [one.state for one in found] == [RehearsalState.CANCELLED, RehearsalState.PASSED]
    assert Network.open == []


def test_those_that_wait_take_no_thread_from_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for its job, for those before it, and for the checks of all."""
    monkeypatch.setattr(runner, "THREADS", 1)
    jobs = jobs_of(stage)
    stage.rehearsals.start()
    found = stage.asking.ask_together(TogetherRequest(members=tuple(RehearsedJob(migration_id=job.id) for job in jobs)))
    stage.until(lambda: all(stage.asking.get(one.migration_id, one.id).state in REHEARSED for one in found))
    assert [stage.asking.get(one.migration_id, one.id).state for one in found] == [RehearsalState.PASSED] * 3
    assert watched(stage).started == [one.id for one in found]
    stage.until(lambda: Network.open == [])


def test_one_that_never_comes_is_not_waited_for_without_end(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "OTHERS_WITHIN_S", 0.1)
    jobs = jobs_of(stage, 2)
    members = tuple(RehearsedJob(migration_id=job.id) for job in jobs)
    first, second = stage.asking.ask_together(TogetherRequest(members=members))
    (done,) = ended(stage, [second])
    assert (done.state, watched(stage).started) == (RehearsalState.PASSED, [second.id])
    (late,) = ended(stage, [first])
    assert late.state is RehearsalState.PASSED
    assert Network.open == []


def test_what_cannot_be_rehearsed_together_is_said_and_begins_nothing(stage: Stage) -> None:
    first, second = jobs_of(stage, 2)
    with pytest.raises(ValidationError):
        TogetherRequest(members=(RehearsedJob(migration_id=first.id),))
    twice = (RehearsedJob(migration_id=first.id), RehearsedJob(migration_id=first.id))
    for request in (TogetherRequest(), TogetherRequest(members=twice)):
        with pytest.raises(Conflict, match="to be rehearsed together"):
            stage.asking.ask_together(request)
    with pytest.raises(NotFound):
        stage.asking.ask_together(TogetherRequest(wave_id=UUID(int=9)))
    third = stage.house.intake.submit(live_plan(warm=HELD))
    stage.house.intake.cancel(third.id)
    with pytest.raises(Conflict):
        stage.asking.ask_together(
            TogetherRequest(members=(RehearsedJob(migration_id=first.id), RehearsedJob(migration_id=third.id)))
        )
    # One of them is being rehearsed already: none of the others begins.
    alone = stage.asking.ask_together(
        TogetherRequest(members=(RehearsedJob(migration_id=first.id), RehearsedJob(migration_id=second.id)))
    )
    with pytest.raises(Conflict):
        stage.asking.ask_together(
            TogetherRequest(members=(RehearsedJob(migration_id=first.id), RehearsedJob(migration_id=second.id)))
        )
    assert [len(stage.asking.of(job.id)) for job in (first, second)] == [1, 1]
    ended(stage, alone)


def wave_of(stage: Stage, *members: Any, jobs: Sequence[Migration], groups: Sequence[Group] = ()) -> UUID:
    """A wave whose members have these jobs."""
    request: WaveRequest = wave(*members, groups=groups)
    waves = Waves(stage.house.store.waves)
    made = waves.create(request)
    for one, job in zip(waves.whole(made.id).members, jobs, strict=False):
        fields = {"state": MemberState.SYNCING, "job_id": job.id}
        assert change_members(stage.house.store.waves, made.id, [one], {one.state}, fields) == [one.id]
    return made.id


def test_a_waves_guests_are_rehearsed_in_its_order_with_its_checks(stage: Stage) -> None:
    """The shop waits for the group of the database, and is named before it; mail has no job yet."""
    shop, database = jobs_of(stage, 2)
    members = (
        member("shop", "data", checks=({"kind": "command", "argv": ("true",), "within_s": 1},)),
        member("db", group="data", checks=({"kind": "port", "port": 5432, "within_s": 1},)),
        member("mail"),
    )
    wave_id = wave_of(stage, *members, jobs=(shop, database), groups=(Group(name="data"),))
    found = ended(stage, stage.asking.ask_together(TogetherRequest(wave_id=wave_id)))
    assert [one.migration_id for one in found] == [database.id, shop.id]
    assert watched(stage).started == [one.id for one in found]
    assert [[check.name for check in one.checks[2:]] for one in found] == [["port 5432"], ["true"]]
    # Nobody takes a connection in a house of fakes: the check was made, and failed.
    assert [one.state for one in found] == [RehearsalState.FAILED, RehearsalState.PASSED]
    assert stage.asking.states_of([shop.id, database.id, UUID(int=4)]) == {
        database.id: RehearsalState.FAILED,
        shop.id: RehearsalState.PASSED,
    }


def test_a_wave_of_which_too_few_copy_warm_is_refused(stage: Stage) -> None:
    first, second = jobs_of(stage, 2)
    stage.house.intake.cancel(second.id)
    stage.until(lambda: stage.house.store.get(second.id).ended)
    wave_id = wave_of(stage, member("a"), member("b"), jobs=(first, second))
    with pytest.raises(Conflict, match="1 jobs are to be rehearsed together"):
        stage.asking.ask_together(TogetherRequest(wave_id=wave_id))
    assert stage.asking.of(first.id) == []


# ── at every commit ──────────────────────────────────────────────────────────────────────────────────────────────────


def counted(stage: Stage, at: int, then: Callable[[], None]) -> None:
    """`then` after the commit of that number, and after each one that follows."""
    made: list[int] = []

    def committed() -> None:
        made.append(1)
        if len(made) >= at:
            then()

    stage.house.store.on_commit = committed


def nothing_is_left(stage: Stage, jobs: Sequence[Migration]) -> None:
    """Of the rehearsals; the jobs go on, and hold what is theirs."""
    own = {str(stage.house.volume(stage.house.store.get(job.id))) for job in jobs}
    left = [one for one in stage.leftovers(stage.house.store.get(jobs[0].id)) if one not in own]
    assert left == []
    assert watched(stage).domains == {}
    assert Network.open == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(3))
def test_a_crash_of_a_group_after_every_third_commit_is_survived(part: int, tmp_path: Path) -> None:
    """From the question on: the jobs' threads and the rehearsals' die, as in a service that is killed."""
    Network.open, Network.made = [], []
    for commit in range(1 + part, COMMITS_MAX, 3):
        folder, hypervisor = tmp_path / f"crash-{commit}", Watched()
        stage = Stage(folder, hypervisor, begin_network=Network)
        jobs = jobs_of(stage, 2)
        request = TogetherRequest(members=tuple(RehearsedJob(migration_id=job.id) for job in jobs))

        def crash() -> None:
            stage.let_go.set()  # noqa: B023 - those that wait for the others write nothing, and die all the same
            raise Crash

        counted(stage, commit, crash)
        with contextlib.suppress(Crash):
            for one in stage.asking.ask_together(request):
                stage.begin(one.id)
        stage.die()
        assert Network.open == []
        again = Stage(folder, hypervisor, begin_network=Network)
        known = [one for job in jobs for one in again.asking.of(job.id)]
        before = len(known) == 2 and all(one.state in REHEARSED for one in known)
        for job in jobs:
            again.begin_job(job.id)
        for one in known:
            again.begin(one.id)
        again.until(lambda: all(one.state in REHEARSED for job in jobs for one in again.asking.of(job.id)))  # noqa: B023
        states = [one.state for job in jobs for one in again.asking.of(job.id)]
        assert len(known) in (0, 2), "all of them are begun, or none"
        assert states == [RehearsalState.PASSED] * len(known)
        nothing_is_left(again, jobs)
        for job in jobs:
            again.house.intake.cutover(job.id)
        again.join()
        assert [again.house.store.get(job.id).state for job in jobs] == [State.COMPLETED] * 2
        again.close()
        if before:
            return
    raise AssertionError(f"after {COMMITS_MAX} commits the rehearsals have not ended")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cancel_of_one_at_every_fourth_commit_leaves_nothing_and_holds_up_nobody(tmp_path: Path) -> None:
    Network.open, Network.made = [], []
    for commit in range(1, COMMITS_MAX, 4):
        stage = Stage(tmp_path / f"cancel-{commit}", Watched(), begin_network=Network)
        jobs = jobs_of(stage, 2)
        request = TogetherRequest(members=tuple(RehearsedJob(migration_id=job.id) for job in jobs))
        found = stage.asking.ask_together(request)

        def cancel() -> None:
            stage.house.store.on_commit = lambda: None  # noqa: B023
            with contextlib.suppress(Conflict):
                stage.asking.cancel(jobs[0].id, found[0].id)  # noqa: B023

        counted(stage, commit, cancel)
        first, second = ended(stage, found)
        assert (first.error, second.state) == (None, RehearsalState.PASSED)
        nothing_is_left(stage, jobs)
        stage.close()
        if first.state is RehearsalState.PASSED:
            return
        assert first.state is RehearsalState.CANCELLED
    raise AssertionError(f"after {COMMITS_MAX} commits the rehearsals have not passed")
