"""A rehearsed guest whose writes have no room."""

from pathlib import Path
from uuid import UUID

from synvirt.errors import DiskWriteFailed
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
