"""Rehearsals in a folder whose file system shares no bytes between files: on overlays, while the passes write beside the
volumes."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.errors import DiskWriteFailed
from synvirt.main.destinations import _is_shut_out
from synvirt.migrations import cloning, passes
from synvirt.migrations.job import Job
from synvirt.migrations.warm import one_pass, syncing
from synvirt.model.job import Migration, Pass
from synvirt.model.kinds import State
from synvirt.model.rehearsal import REHEARSED, Rehearsal, RehearsalRequest, RehearsalState
from synvirt.sizes import KIB
from tests.fakes.clones import OverlayingDirectory
from tests.fakes.guests import MARK
from tests.house import VM
from tests.rehearsals.stage import CONTENT, DISK, WRITTEN, Stage, Writing, source_bytes


class Held(Writing):
    """A rehearsed guest shows no sign until `signs` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = threading.Event()
        self.signs.set()

    def wait_until_booted(self, uuid: UUID, timeout_s: float, stop: Any) -> str:
        while self._is_rehearsed(uuid) and not self.signs.wait(0.01) and not stop():
            pass
        return super().wait_until_booted(uuid, timeout_s, stop)

    def _is_rehearsed(self, uuid: UUID) -> bool:
        found = self.domains.get(uuid)
        return found is not None and "-rehearsal-" in found.domain.name


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "house", Held(), destination=OverlayingDirectory)
    yield stage
    stage.close()


def hypervisor(stage: Stage) -> Held:
    found = stage.house.hypervisor
    assert isinstance(found, Held)
    return found


def held(stage: Stage) -> Migration:
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    return stage.house.store.get(job.id)


def synced(stage: Stage, job: Migration, offset: int, data: bytes) -> None:
    """The source writes, and two passes later it is copied."""
    assert stage.house.platform.guest_writes(VM, DISK, offset, data)
    number = stage.house.store.get(job.id).passes[-1].number
    stage.until(lambda: stage.house.store.get(job.id).passes[-1].number > number + 2)


def begun(stage: Stage, job: Migration) -> Rehearsal:
    """A rehearsal whose guest runs, and shows no sign."""
    hypervisor(stage).signs.clear()
    rehearsal = stage.asking.ask(job.id, RehearsalRequest())
    stage.begin(rehearsal.id)
    stage.until(lambda: rehearsal.id in hypervisor(stage).seen)
    return rehearsal


def ended(stage: Stage, rehearsal: Rehearsal) -> Rehearsal:
    hypervisor(stage).signs.set()
    stage.until(lambda: stage.asking.get(rehearsal.migration_id, rehearsal.id).state in REHEARSED)
    return stage.asking.get(rehearsal.migration_id, rehearsal.id)


def beside(stage: Stage, job: Migration) -> list[str]:
    volume = stage.house.volume(job)
    return sorted(path.name.removeprefix(f".{volume.name}.") for path in volume.parent.iterdir() if path != volume)


def test_passes_go_on_beside_the_volume_and_are_folded_into_it(stage: Stage) -> None:
    job = held(stage)
    rehearsal = begun(stage, job)
    for turn in range(3):
        synced(stage, job, 300 * KIB + turn, b"while it is rehearsed")
    assert stage.house.volume(job).read_bytes() == CONTENT, "the volume stays"
    found = ended(stage, rehearsal)
    assert (found.state, found.error) == (RehearsalState.PASSED, None)
    assert hypervisor(stage).seen[found.id] == CONTENT
    assert hypervisor(stage).last[found.id] == WRITTEN + CONTENT[len(WRITTEN) :]
    synced(stage, job, 0, b"and after it")
    assert stage.house.volume(job).read_bytes() == source_bytes(stage)
    assert beside(stage, job) == []
    done = stage.cut_over(job.id)
    assert done.state is State.COMPLETED, done.last_error
    assert stage.house.volume(done).read_bytes()[len(WRITTEN) :] == source_bytes(stage)[len(WRITTEN) :]


def test_a_rehearsal_right_after_another_has_the_newest_moment(stage: Stage) -> None:
    """Nothing waits for the next pass: what lies aside is folded for the clone."""
    job = held(stage)
    first = begun(stage, job)
    synced(stage, job, 100 * KIB, b"in the first")
    expected = source_bytes(stage)
    ended(stage, first)
    second = ended(stage, begun(stage, job))
    assert hypervisor(stage).seen[second.id] == expected
    stage.cancel(job.id)


def test_a_cut_over_has_what_was_aside(stage: Stage) -> None:
    """And the guest that is rehearsed is gone before the volume is written."""
    job = held(stage)
    rehearsal = begun(stage, job)
    synced(stage, job, 600 * KIB, b"before the cut-over")
    assert stage.house.platform.guest_writes(VM, DISK, 7, b"and at its end")
    done = stage.cut_over(job.id)
    assert done.state is State.COMPLETED, done.last_error
    assert done.domain is not None
    assert hypervisor(stage).seen[UUID(done.domain.uuid)] == source_bytes(stage)
    assert stage.asking.get(job.id, rehearsal.id).state is RehearsalState.CANCELLED
    assert hypervisor(stage).last[rehearsal.id] == WRITTEN + CONTENT[len(WRITTEN) :]
    assert beside(stage, done) == []
    assert stage.leftovers(done) == []


def test_a_cut_over_does_not_wait_for_a_rehearsal_that_does_not_end(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloning, "ENDS_WITHIN", cloning.ENDS_WITHIN * 0)
    job = held(stage)
    rehearsal = begun(stage, job)
    monkeypatch.setattr(stage.rehearsals, "_move", lambda under_way: under_way.pause(0.01))
    synced(stage, job, 600 * KIB, b"before the cut-over")
    stage.house.intake.cutover(job.id)
    stage.until(lambda: stage.house.store.get(job.id).ended)
    done = stage.house.store.get(job.id)
    assert done.state is State.COMPLETED, done.last_error
    assert done.domain is not None
    assert hypervisor(stage).seen[UUID(done.domain.uuid)] == source_bytes(stage)
    assert beside(stage, done) == []
    assert rehearsal.id not in hypervisor(stage).domains, "else its lock would keep the job's guest from starting"
    monkeypatch.undo()
    assert ended(stage, rehearsal).state is RehearsalState.CANCELLED
    assert stage.leftovers(done) == []


def test_a_cancelled_job_leaves_nothing_of_it(stage: Stage) -> None:
    job = held(stage)
    begun(stage, job)
    synced(stage, job, 600 * KIB, b"aside")
    stage.cancel(job.id)
    assert stage.house.leftovers(VM) == []


def test_a_failed_cut_over_is_tried_again_with_what_is_aside(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The volume is kept, and so is what lies beside it."""

    async def refuse(job: object) -> None:
        raise DiskWriteFailed("the folder is gone for a moment", hint="wait")

    job = held(stage)
    begun(stage, job)
    synced(stage, job, 600 * KIB, b"aside")
    monkeypatch.setattr(syncing, "settle", refuse)
    failed = stage.cut_over(job.id)
    assert failed.state is State.FAILED
    assert sorted(beside(stage, failed)) == ["aside", "marks"]
    monkeypatch.undo()
    assert stage.house.platform.guest_writes(VM, DISK, 100 * KIB, b"and since")
    again = stage.house.intake.retry(job.id, {"warm": {"cutover": "auto"}})
    done = stage.house.run(again.id)
    assert done.state is State.COMPLETED, done.last_error
    assert done.domain is not None
    assert hypervisor(stage).seen[UUID(done.domain.uuid)] == source_bytes(stage)
    assert beside(stage, done) == []


def test_a_pass_without_room_ends_the_rehearsal_and_not_the_job(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rehearsed guest writes lies on the file system of the volumes."""
    copy = passes.run_opened_pass

    async def full(job: Job, *order: Any, **how: Any) -> Pass:
        if any(one.state is RehearsalState.BOOTING for one in stage.house.store.rehearsals.of(job.id)):
            raise DiskWriteFailed("disk.raw: 4096 bytes cannot be written: No space left on device")
        return await copy(job, *order, **how)

    job = held(stage)
    monkeypatch.setattr(one_pass, "run_opened_pass", full)
    rehearsal = begun(stage, job)
    stage.until(lambda: stage.asking.get(job.id, rehearsal.id).state in REHEARSED)
    assert stage.asking.get(job.id, rehearsal.id).state is RehearsalState.CANCELLED
    synced(stage, job, 600 * KIB, b"since then")
    done = stage.cut_over(job.id)
    assert done.state is State.COMPLETED, done.last_error
    assert stage.leftovers(done) == []


def test_a_fold_that_fails_is_the_rehearsals_trouble(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(job: object) -> None:
        raise DiskWriteFailed("no room in the volume", hint="make some")

    job = held(stage)
    monkeypatch.setattr(cloning, "_fold", refuse)
    found = stage.rehearse(job.id)
    assert found.state is RehearsalState.FAILED
    assert found.error is not None
    assert found.error.message == "no room in the volume"
    monkeypatch.undo()
    assert stage.rehearse(job.id).state is RehearsalState.PASSED
    assert stage.cut_over(job.id).state is State.COMPLETED


def test_a_guest_is_converted_on_its_overlay_alone(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "house", Writing(), conversion="always", destination=OverlayingDirectory)
    with contextlib.closing(stage):
        job = held(stage)
        found = stage.rehearse(job.id)
        assert found.state is RehearsalState.PASSED, found.error
        assert isinstance(stage.house.hypervisor, Writing)
        assert stage.house.hypervisor.seen[found.id] == MARK + CONTENT[len(MARK) :]
        assert stage.house.volume(job).read_bytes() == CONTENT
        stage.cancel(job.id)


def test_where_no_overlay_can_be_made_it_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.destinations.overlays.find", lambda program: None)
    reason = OverlayingDirectory(tmp_path).why_no_clones()
    assert reason is not None
    assert "qemu-img is not installed" in reason


def test_no_overlays_where_passes_could_not_read_the_volume_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libvirtd gives it to QEMU's user. A sync that fails is worse than a rehearsal that is refused."""
    destination = OverlayingDirectory(tmp_path, shut_out=True)
    name, to = (destination.volume_name(UUID(int=number), "disk") for number in (1, 2))
    destination.create(name, 4096)
    assert "may not open" in (destination.why_no_clones() or "")
    with pytest.raises(DiskWriteFailed, match="may not open") as caught:
        destination.clone(name, to)
    assert caught.value.hint
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["disk.raw"]
    system, session, embedded = "qemu:///system", "qemu:///session", f"qemu:///embed?root={tmp_path}"
    for may, euid, shut in ((True, 0, ()), (True, 1, ()), (False, 1, (system,)), (False, 0, (system, embedded))):
        monkeypatch.setattr("synvirt.cage.may_open_others_files", lambda may=may: may)
        monkeypatch.setattr("os.geteuid", lambda euid=euid: euid)
        assert tuple(uri for uri in (system, session, embedded) if _is_shut_out(uri)) == shut
