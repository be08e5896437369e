"""A rehearsed guest that does not go on once it has booted: its writes have no room, or it stops."""

from collections.abc import Callable
from pathlib import Path
from uuid import UUID

from synvirt.errors import DiskWriteFailed, GuestBootFailed
from synvirt.model.rehearsal import CommandCheck, RehearsalState
from tests.rehearsals.stage import Stage, Writing


class Full(Writing):
    """Its guests boot, and are paused then: the file system of their clones is full."""

    def start(self, uuid: UUID) -> None:
        super().start(uuid)
        self.is_full = self.domains[uuid].held_up = True


def test_a_guest_that_has_no_room_is_not_one_that_fails_its_checks(tmp_path: Path) -> None:
    """It ends at once: its checks would only run out of time, and the copy of its job may need the room."""
    for checks in ((), (CommandCheck(kind="command", argv=("false",), within_s=60),)):
        stage = Stage(tmp_path / f"house-{len(checks)}", Full())
        job = stage.submit()
        stage.begin_job(job.id)
        stage.holds(job.id)
        found = stage.rehearse(job.id, *checks)
        assert found.state is RehearsalState.FAILED
        assert found.error is not None
        assert found.error.code == DiskWriteFailed.code
        assert "has no room in the file system at /small" in found.error.message
        assert [(one.name, one.ok) for one in found.checks] == [("boot", True), ("network", True)]
        assert stage.leftovers(stage.house.store.get(job.id)) == []
        stage.cancel(job.id)
        stage.close()


class Stopping(Writing):
    """Its guests boot, and stop then."""

    def wait_until_booted(self, uuid: UUID, timeout_s: float, stop: Callable[[], bool]) -> str:
        sign = super().wait_until_booted(uuid, timeout_s, stop)
        self.power_off(uuid)
        return sign

    def run_in_guest(self, uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int:
        raise GuestBootFailed("the agent does not answer")


def test_a_guest_that_stops_once_it_has_booted_does_not_pass_and_is_said_to(tmp_path: Path) -> None:
    """Before, it passed where it had no checks; else a check said that its agent is silent, at the end of its time."""
    for checks in ((), (CommandCheck(kind="command", argv=("true",), within_s=60),)):
        stage = Stage(tmp_path / f"house-{len(checks)}", Stopping())
        job = stage.submit()
        stage.begin_job(job.id)
        stage.holds(job.id)
        found = stage.rehearse(job.id, *checks)
        assert found.state is RehearsalState.FAILED, found
        assert found.error is not None
        assert found.error.code == GuestBootFailed.code
        assert "has stopped before its checks were done" in found.error.message
        assert [(one.name, one.ok) for one in found.checks] == [("boot", False)]
        assert stage.leftovers(stage.house.store.get(job.id)) == []
        stage.cancel(job.id)
        stage.close()
