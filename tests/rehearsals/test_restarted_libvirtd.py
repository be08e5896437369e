"""A rehearsal goes on while this host's libvirtd is restarted, whichever of its calls meets that."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.errors import HypervisorAway
from synvirt.model.rehearsal import REHEARSED, CommandCheck, Rehearsal, RehearsalRequest, RehearsalState
from synvirt.rehearsals import engine, steps, under_way
from tests.rehearsals.stage import Stage, Writing

DISKS = {"host name": "web01", "system": "Debian GNU/Linux 12"}
CHECK = CommandCheck(kind="command", argv=("true",), within_s=0.1)


class Restarted(Writing):
    """Its libvirtd does not answer the calls with the numbers `gone`."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = range(0)
        self.calls = 0

    def _check_answers(self) -> None:
        self.calls += 1
        if self.calls - 1 in self.gone:
            raise HypervisorAway("client socket is closed")


@pytest.fixture
def restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stage, Restarted]]:
    monkeypatch.setattr(under_way, "AWAY_PAUSE_S", 0.01)
    monkeypatch.setattr(steps, "SWEEP_PAUSES_S", (0.01,))
    monkeypatch.setattr(steps, "CHECK_PAUSE_S", 0.01)
    monkeypatch.setattr(engine, "WAIT_POLL_S", 0.01)
    hypervisor = Restarted()
    stage = Stage(tmp_path / "house", hypervisor)
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    # The step of the job itself asks the hypervisor once, as it begins; its first pass comes after that.
    stage.until(lambda: len(stage.house.store.get(job.id).passes) > 1)
    yield stage, hypervisor
    stage.cancel(job.id)
    stage.close()


def rehearsed(stage: Stage, hypervisor: Restarted, gone: range) -> Rehearsal:
    hypervisor.gone, hypervisor.calls = gone, 0
    (job,) = stage.house.store.unended()
    return stage.rehearse(job.id, CHECK)


def result(found: Rehearsal) -> object:
    return [(one.name, one.ok) for one in found.checks], [(one.item, one.grade) for one in found.sameness]


@pytest.mark.parametrize("has_agent", [True, False])
def test_a_restart_at_any_call_changes_no_result(restarted: tuple[Stage, Restarted], *, has_agent: bool) -> None:
    """A guest without an agent is removed before its disks are read: after that it is started once more."""
    stage, hypervisor = restarted
    hypervisor.facts = {"host name": "web01"} if has_agent else {}
    stage.disks_say = [DISKS] * 1000
    as_it_is = rehearsed(stage, hypervisor, range(0))
    assert as_it_is.state is RehearsalState.PASSED
    (job,) = stage.house.store.unended()
    at = 0
    while at <= hypervisor.calls:
        found = rehearsed(stage, hypervisor, range(at, at + 2))
        assert (found.state, found.error) == (RehearsalState.PASSED, None), f"call {at}"
        assert result(found) == result(as_it_is), f"call {at}"
        assert stage.leftovers(job) == [], f"call {at}"
        at += 1
    assert at > 8


def test_one_that_waits_says_what_for_and_is_cancelled_at_once(restarted: tuple[Stage, Restarted]) -> None:
    stage, hypervisor = restarted
    (job,) = stage.house.store.unended()
    hypervisor.gone = range(10_000)
    asked = stage.asking.ask(job.id, RehearsalRequest())
    stage.begin(asked.id)

    def shown() -> Rehearsal:
        return stage.asking.get(job.id, asked.id)

    stage.until(lambda: shown().error is not None or shown().state in REHEARSED)
    error = shown().error
    assert error is not None
    assert (shown().state, error.fatal) == (RehearsalState.BOOTING, False)
    assert error.message == "client socket is closed. It is tried again"
    stage.asking.cancel(job.id, asked.id)
    stage.until(lambda: shown().state is RehearsalState.SWEEPING)
    hypervisor.gone = range(0)
    stage.until(lambda: shown().state is RehearsalState.CANCELLED)
    assert shown().error is None


def test_one_that_waits_for_too_long_fails(restarted: tuple[Stage, Restarted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "AWAY_S", 0.05)
    stage, hypervisor = restarted
    found = rehearsed(stage, hypervisor, range(200))
    assert found.state is RehearsalState.FAILED
    assert found.error is not None
    assert (found.error.fatal, found.error.message) == (True, "client socket is closed")
