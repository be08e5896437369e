"""Guests that are rehearsed together: one network, started in their order, and nobody goes before all have been checked."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pytest

from synvirt.errors import BadRequest, Conflict
from synvirt.model.job import Migration
from synvirt.model.machine import Nic
from synvirt.model.rehearsal import REHEARSED, CommandCheck, Member, Rehearsal, RehearsalState, TogetherRequest
from tests.house import live_plan
from tests.rehearsals.test_rehearsals import CONTENT, DISK, HELD, FakeNetwork, Stage, Writing

VMS = ("vm-db", "vm-shop", "vm-mail")


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
    asked = [
        Member(migration_id=job.id, checks=tuple(CommandCheck(kind="command", argv=(one,), within_s=1) for one in checks))
        for job in jobs
    ]
    return ended(stage, stage.asking.ask_together(TogetherRequest(members=tuple(asked))))


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
    assert [one.checks[1].detail for one in found] == ["that of 3 guests, which leads nowhere"] * 3
    left = "".join(one for job in jobs for one in stage.leftovers(stage.house.store.get(job.id)))
    assert not any(str(one.id) in left for one in found)
    assert watched(stage).domains == {}


def test_one_that_does_not_boot_holds_up_nobody(stage: Stage) -> None:
    jobs = jobs_of(stage)
    asked = stage.asking.ask_together(TogetherRequest(members=tuple(Member(migration_id=job.id) for job in jobs)))
    watched(stage).fails = asked[0].id
    found = ended(stage, asked)
    assert [one.state for one in found] == [RehearsalState.FAILED, RehearsalState.PASSED, RehearsalState.PASSED]
    assert Network.open == []


def test_one_that_is_cancelled_holds_up_nobody(stage: Stage) -> None:
    jobs = jobs_of(stage, 2)
    asked = stage.asking.ask_together(TogetherRequest(members=tuple(Member(migration_id=job.id) for job in jobs)))
    stage.asking.cancel(jobs[0].id, asked[0].id)
    found = ended(stage, asked)
    assert [one.state for one in found] == [RehearsalState.CANCELLED, RehearsalState.PASSED]
    assert Network.open == []


def test_what_cannot_be_rehearsed_together_is_said_and_begins_nothing(stage: Stage) -> None:
    first, second = jobs_of(stage, 2)
    for members in ((), (first.id,), (first.id, first.id)):
        with pytest.raises(BadRequest):
            stage.asking.ask_together(TogetherRequest(members=tuple(Member(migration_id=one) for one in members)))
    third = stage.house.intake.submit(live_plan(warm=HELD))
    stage.house.intake.cancel(third.id)
    with pytest.raises(Conflict):
        stage.asking.ask_together(TogetherRequest(members=(Member(migration_id=first.id), Member(migration_id=third.id))))
    # One of them is being rehearsed already: none of the others begins.
    alone = stage.asking.ask_together(TogetherRequest(members=(Member(migration_id=first.id), Member(migration_id=second.id))))
    with pytest.raises(Conflict):
        stage.asking.ask_together(TogetherRequest(members=(Member(migration_id=first.id), Member(migration_id=second.id))))
    assert [len(stage.asking.of(job.id)) for job in (first, second)] == [1, 1]
    ended(stage, alone)
