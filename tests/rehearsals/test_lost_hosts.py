"""A rehearsal whose job another host takes over: it ends there, and what it left on its own host goes when that is back."""

from pathlib import Path

import pytest

from synvirt.model.rehearsal import REHEARSED, RehearsalRequest, RehearsalState
from tests.fakes.hypervisor import FakeHypervisor
from tests.house import give_to
from tests.rehearsals.stage import Stage


@pytest.mark.parametrize("state", [RehearsalState.PREPARING, RehearsalState.BOOTING, RehearsalState.CHECKING])
def test_a_host_that_was_lost_ends_it(tmp_path: Path, state: RehearsalState) -> None:
    """Its job is another host's by now: what the rehearsal made is swept there, as far as that host reaches it. Its guest may
    run on where it was, and write: no second one is started on its clones."""
    hypervisor = FakeHypervisor(fail="silent")
    stage = Stage(tmp_path / "house", hypervisor)
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    rehearsal = stage.asking.ask(job.id, RehearsalRequest())
    stage.until(lambda: stage.asking.get(job.id, rehearsal.id).state is RehearsalState.PREPARING)
    stage.house.store.rehearsals.change(
        rehearsal.id, RehearsalState.PREPARING, lambda found: found.model_copy(update={"state": state})
    )
    object.__setattr__(stage.house.rooms, "host", "another")
    stage.begin(rehearsal.id)
    stage.until(lambda: stage.asking.get(job.id, rehearsal.id).state in REHEARSED)
    found = stage.asking.get(job.id, rehearsal.id)
    assert found.state is RehearsalState.FAILED
    assert found.error is not None
    assert "is lost" in found.error.message
    assert hypervisor.domains == {}
    stage.cancel(job.id)
    stage.close()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_host_that_comes_back_ends_the_guest_that_it_left(tmp_path: Path, restarted: bool) -> None:
    """Only its network was cut, for example: the guest runs on, and the other host cannot end it."""
    hypervisor = FakeHypervisor(fail="silent")
    stage = Stage(tmp_path / "house", hypervisor)
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    rehearsal = stage.asking.ask(job.id, RehearsalRequest())
    stage.until(lambda: stage.asking.get(job.id, rehearsal.id).state is RehearsalState.PREPARING)
    if restarted:
        of_service = stage.begin(rehearsal.id)
        stage.until(lambda: rehearsal.id in hypervisor.domains)
        stage.let_go.set()
        of_service.join()
    else:
        stage.rehearsals.start()
        stage.until(lambda: rehearsal.id in hypervisor.domains)
        stage.rehearsals.pause()
    assert rehearsal.id in hypervisor.domains
    give_to(stage.house.store, job.id, "another")
    (stage.rehearsals.start if restarted else stage.rehearsals.resume)()
    stage.until(lambda: rehearsal.id not in hypervisor.domains)
    stage.rehearsals.close()
    assert stage.asking.get(job.id, rehearsal.id).state is RehearsalState.BOOTING, "its row is the other host's"
    stage.house.store.rehearsals.change(
        rehearsal.id, RehearsalState.BOOTING, lambda found: found.model_copy(update={"state": RehearsalState.FAILED})
    )
    stage.cancel(job.id)
    stage.close()
