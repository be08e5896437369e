"""A rehearsed guest whose network ends under it, as its process was killed or broke: that says nothing of the guest."""

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pytest

from synvirt.errors import HostLacks
from synvirt.jobs.shortage import HINT
from synvirt.model.machine import Nic
from synvirt.model.rehearsal import PortCheck, RehearsalState, RehearsedJob, TogetherRequest
from synvirt.rehearsals import engine
from tests.rehearsals.stage import FakeNetwork, Stage, Writing
from tests.rehearsals.test_together import ended, jobs_of

PORT = PortCheck(kind="port", port=80, within_s=5)


class Mortal(FakeNetwork):
    """The first `mortal` networks end as soon as a port of their guest is asked for."""

    made: ClassVar[list["Mortal"]] = []
    mortal = 1

    def __init__(self, cards: Sequence[Nic]) -> None:
        super().__init__(cards)
        self.made.append(self)

    def addresses(self, cards: Any = None) -> list[str]:
        return ["10.77.0.5"]

    def connect(self, port: int, timeout_s: float, cards: Any = None) -> Any:
        if len(self.made) <= self.mortal:
            self.ended = True
            return super().connect(port, timeout_s)
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours


class Counted(Writing):
    """`starts`: of its guests."""

    starts = 0

    def start(self, uuid: UUID) -> None:
        self.starts += 1
        super().start(uuid)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    Mortal.made.clear()
    made = Stage(tmp_path / "house", Counted(), begin_network=Mortal)
    yield made
    made.close()


def test_it_is_started_again_in_a_new_one(stage: Stage) -> None:
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    found = stage.rehearse(job.id, PORT)
    assert (found.state, found.error) == (RehearsalState.PASSED, None), found.checks
    assert isinstance(stage.house.hypervisor, Counted)
    assert (stage.house.hypervisor.starts, len(Mortal.made), Mortal.open) == (2, 2, [])
    assert stage.leftovers(stage.house.store.get(job.id)) == []
    stage.cancel(job.id)


def test_all_of_a_group_come_into_the_new_one(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "WAIT_POLL_S", 0.05)
    jobs = jobs_of(stage, 2)
    members = tuple(RehearsedJob(migration_id=job.id, checks=(PORT,)) for job in jobs)
    found = ended(stage, stage.asking.ask_together(TogetherRequest(members=members)))
    assert [(one.state, one.error) for one in found] == [(RehearsalState.PASSED, None)] * 2, found
    assert isinstance(stage.house.hypervisor, Counted)
    assert 3 <= stage.house.hypervisor.starts <= 4
    assert (len(Mortal.made), Mortal.open) == (2, [])
    assert stage.house.hypervisor.domains == {}


def test_those_that_end_again_and_again_are_said_to(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mortal, "mortal", 99)
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    found = stage.rehearse(job.id, PORT)
    assert found.state is RehearsalState.FAILED
    assert found.error is not None
    assert found.error.code == HostLacks.code
    assert "network has ended 3 times" in found.error.message
    assert [(one.name, one.ok) for one in found.checks] == [("boot", True), ("network", True)]
    assert stage.leftovers(stage.house.store.get(job.id)) == []
    stage.cancel(job.id)


def test_what_the_host_has_no_more_of_is_said(tmp_path: Path) -> None:
    """Before, it was «OSError in Booting», and nobody knew of what."""

    def refused(cards: Sequence[Nic]) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    stage = Stage(tmp_path / "house", Writing(), begin_network=refused)
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    found = stage.rehearse(job.id)
    assert found.error is not None
    assert found.error.message == "Too many open files in Booting"
    assert found.error.hint == HINT
    stage.cancel(job.id)
    stage.close()
