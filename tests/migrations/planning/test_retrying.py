"""A failed job taken up again: what its copy cost is not paid twice."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from types import NoneType
from typing import Any

import pytest

from synvirt.disks.raw.files import RawReader, RawWriter
from synvirt.errors import Conflict, DiskReadFailed, InvalidPlan
from synvirt.migrations.intake import Intake, check_free
from synvirt.migrations.planning.retrying import has_kept_copy
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.plan import MigrationPlan
from synvirt.model.values import now
from tests.fakes.guests import MARK, FakePreparer
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan, offline_plan, states
from tests.migrations.warm.warm_house import error, in_state, once

MIB = 1 << 20
DISK = "disk-0"


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path, family="windows", preparer=FakePreparer(fails=True), workers=in_process)


def jobs(house: House) -> list[Migration]:
    return [Migration.model_validate_json(document) for document in house.store.documents(limit=100)[0]]


def failed(house: House, **fields: Any) -> Migration:
    folder = house.imports / "appliance"
    folder.mkdir()
    (folder / f"{DISK}.raw").write_bytes(Random(3).randbytes(3 * MIB))
    job = house.run(house.intake.submit(offline_plan(folder, **fields)).id)
    assert job.state == State.FAILED
    return job


def mended(house: House) -> None:
    """And the source is gone meanwhile."""
    house.preparer.fails = False
    for path in house.imports.rglob("*.raw"):
        path.unlink()


def test_a_conversion_that_failed_is_tried_again_on_the_same_copy(house: House) -> None:
    before = failed(house)
    copy = house.volume(before).read_bytes()
    mended(house)
    again = house.run(house.intake.retry(before.id, {}).id)
    assert again.state == State.COMPLETED, again.last_error
    assert states(again) == [State.QUEUED, State.COPYING_FULL, State.V2V_PROCESSING, State.STARTING, State.COMPLETED]
    assert house.volume(again).read_bytes() == MARK + copy[len(MARK) :]
    assert (again.retry_of, house.store.get(before.id).retried_by) == (before.id, again.id)
    assert (before.attempt, again.attempt) == (1, 2)
    assert again.passes == ()


def test_a_retry_of_a_warm_plan_says_that_it_was_copied_cold(house: House) -> None:
    """As its first job does: specification part 1, 7."""
    before = failed(house, mode="Warm")
    mended(house)
    again = house.run(house.intake.retry(before.id, {}).id)
    assert (again.state, again.plan.mode, again.mode_effective) == (State.COMPLETED, Mode.WARM, Mode.COLD)
    assert error(again) == ("E_MIG_CBT_UNSUPPORTED", False)


def test_a_guest_that_was_converted_is_not_converted_twice(house: House) -> None:
    house.preparer.fails, house.hypervisor.fail = False, "boot"
    before = failed(house)
    assert states(before)[-2] == State.STARTING
    mended(house)
    house.hypervisor.fail = None
    again = house.run(house.intake.retry(before.id, {}).id)
    assert (again.state, len(house.preparer.prepared)) == (State.COMPLETED, 1), again.last_error
    assert house.volume(again).read_bytes().startswith(MARK)


@pytest.mark.parametrize("call", ["change", "add"])
def test_a_service_that_is_killed_while_it_takes_a_copy_up_leaves_it_to_one_job(
    house: House, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = failed(house)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(house.store, call, killed)
        with pytest.raises(KeyboardInterrupt):
            house.intake.retry(before.id, {})
    assert [job.id for job in jobs(house)] == [before.id]
    mended(house)
    assert house.run(house.intake.retry(before.id, {}).id).state == State.COMPLETED


def test_half_a_copy_and_half_a_conversion_are_taken_up_by_nobody(house: House) -> None:
    """A guest that was started at once may fail before its copy is whole; and what committed a conversion may have failed."""
    before = failed(house)
    assert before.conversion is not None
    half = tuple(disk.model_copy(update={"state": "copying"}) for disk in before.disks)
    written = before.conversion.model_copy(update={"finished_at": now()})
    taken_up = [has_kept_copy(before.model_copy(update=one)) for one in ({}, {"disks": half}, {"conversion": written})]
    assert taken_up == [True, False, False]


def test_it_may_change_what_went_wrong(house: House) -> None:
    before = failed(house)
    again = house.run(house.intake.retry(before.id, {"conversion": "never"}).id)
    assert again.state == State.COMPLETED
    assert State.V2V_PROCESSING not in states(again)


@pytest.mark.parametrize(
    ("patch", "name"),
    [
        ({}, "appliance"),
        ({"name": "second try"}, "second try"),
        ({"target": {"name": "web02"}}, "web02"),
        ({"name": "second try", "target": {"name": "web02"}}, "second try"),
    ],
)
def test_it_may_be_named_anew(house: House, patch: dict[str, Any], name: str) -> None:
    """By the same rule as a new plan's job."""
    again = house.intake.retry(failed(house).id, patch)
    assert (again.retry_of is not None, again.name) == (True, name)
    third = house.intake.retry(house.run(again.id).id, {"name": None, "target": {"name": None}})
    assert third.name == "appliance"


def test_a_retry_that_fails_too_can_be_taken_up_in_turn(house: House) -> None:
    before = failed(house)
    second = house.run(house.intake.retry(before.id, {}).id)
    assert second.state == State.FAILED
    mended(house)
    third = house.run(house.intake.retry(second.id, {}).id)
    assert (third.state, third.attempt) == (State.COMPLETED, 3), third.last_error
    with pytest.raises(Conflict, match=f"is continued by job {second.id}"):
        house.intake.retry(before.id, {})


def test_a_retry_that_cannot_even_begin_keeps_the_copy(house: House) -> None:
    before = failed(house)
    house.preparer.missing = True
    second = house.run(house.intake.retry(before.id, {}).id)
    assert states(second) == [State.QUEUED, State.FAILED]
    house.preparer.missing = False
    mended(house)
    third = house.run(house.intake.retry(second.id, {}).id)
    assert (third.state, third.attempt) == (State.COMPLETED, 3), third.last_error


def test_a_cancelled_retry_keeps_nothing(house: House) -> None:
    before = failed(house)
    again = house.intake.retry(before.id, {})
    house.intake.cancel(again.id)
    assert house.run(again.id).state == State.CANCELLED
    assert house.leftovers() == []


def test_without_a_whole_copy_it_starts_over(house: House) -> None:
    before = failed(house)
    mended(house)
    done = house.run(house.intake.retry(before.id, {}).id)
    with pytest.raises(Conflict, match="only a failed job"):
        house.intake.retry(done.id, {})
    gone = house.run(house.intake.submit(offline_plan(house.imports / "appliance")).id)
    assert gone.state == State.FAILED
    (house.imports / "appliance" / f"{DISK}.raw").write_bytes(Random(4).randbytes(3 * MIB))
    again = house.run(house.intake.retry(gone.id, {"target": {"name": "corrected"}}).id)
    assert (again.state, again.retry_of, again.plan.target.name) == (State.COMPLETED, None, "corrected")


def failed_live(house: House, mode: str, content: bytes) -> Migration:
    """In its conversion, when all was copied."""
    house.platform.add_vm(VM, {DISK: content}, family="windows")
    before = house.run(house.intake.submit(live_plan(mode)).id)
    assert (before.state, house.platform.vm(VM)["power"]) == (State.FAILED, "on")
    return before


def written_to(house: House, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that are written to the volumes from here on, by a copy."""
    found: list[int] = []
    writing = RawWriter.write

    def counted(self: RawWriter, offset: int, buffer: memoryview) -> None:
        found.append(len(buffer))
        writing(self, offset, buffer)

    monkeypatch.setattr(RawWriter, "write", counted)
    return found


@pytest.mark.parametrize("mode", ["Warm", "Cold"])
def test_a_live_job_goes_on_with_its_volumes(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source was switched on again when it failed, and has written since; its guest may have run on the volumes."""
    house = House(tmp_path, family="windows", preparer=FakePreparer(fails=True), workers=in_process)
    content = Random(5).randbytes(9 * MIB)
    before = failed_live(house, mode, content)
    volume = house.volume(before)
    with volume.open("r+b") as file:
        file.seek(5 * MIB)
        file.write(b"by a guest that was started here")
    house.platform.guest_writes(VM, DISK, 6 * MIB, b"since then")
    house.preparer.fails = False
    written = written_to(house, monkeypatch)
    submitted = house.intake.retry(before.id, {})
    assert [(disk.state, disk.bytes_done) for disk in submitted.disks] == [("waiting", 0)], "it is copied again"
    again = house.run(submitted.id)
    assert again.state == State.COMPLETED, again.last_error
    assert (again.retry_of, house.volume(again)) == (before.id, volume)
    expected = house.platform.disk_path(VM, DISK).read_bytes()
    assert expected == content[: 6 * MIB] + b"since then" + content[6 * MIB + len(b"since then") :]
    assert volume.read_bytes() == MARK + expected[len(MARK) :]
    assert sum(written) == 4 * MIB, "the one piece that differs"
    assert again.passes[0].bytes == len(content), "and all of it was looked at"


def test_what_a_conversion_wrote_is_gone_when_a_live_job_is_taken_up(house: House) -> None:
    before = failed_live(house, "Warm", Random(5).randbytes(2 * MIB))
    house.preparer.fails, house.hypervisor.fail = False, "boot"
    second = house.run(house.intake.retry(before.id, {}).id)
    assert (second.state, states(second)[-2]) == (State.FAILED, State.STARTING)
    assert house.volume(second).read_bytes().startswith(MARK)
    third = house.run(house.intake.retry(second.id, {}).id)  # so it is converted again
    assert (len(house.preparer.prepared), house.volume(third).read_bytes()[: len(MARK)]) == (2, MARK)
    house.hypervisor.fail = None
    fourth = house.run(house.intake.retry(third.id, {"conversion": "never"}).id)
    assert (fourth.state, fourth.attempt) == (State.COMPLETED, 4), fourth.last_error
    assert house.volume(fourth).read_bytes() == house.platform.disk_path(VM, DISK).read_bytes()
    house.prove(fourth)


def test_what_was_wrong_with_a_live_job_is_corrected(house: House) -> None:
    before = failed_live(house, "Warm", Random(5).randbytes(MIB))
    patch = {"conversion": "never", "mode": "Cold", "target": {"start": False}, "warm": {"max_passes": 3}}
    again = house.run(house.intake.retry(before.id, patch).id)
    assert (again.state, again.retry_of) == (State.COMPLETED, before.id), again.last_error
    assert (again.mode_effective, again.plan.target.start, again.plan.warm.max_passes) == (Mode.COLD, False, 3)
    assert house.volume(again).read_bytes() == house.platform.disk_path(VM, DISK).read_bytes()


def test_a_live_job_that_has_lost_a_disk_keeps_what_it_had(house: House) -> None:
    before = failed_live(house, "Warm", Random(5).randbytes(MIB))
    house.preparer.fails = False
    copied = house.volume(before).read_bytes()
    house.platform.add_vm(VM, {"another": bytes(2 * MIB)}, family="windows")
    again = house.run(house.intake.retry(before.id, {}).id)
    assert (states(again), again.last_error and again.last_error.code) == ([State.QUEUED, State.FAILED], "E_MIG_CONFLICT")
    assert house.volume(again).read_bytes() == copied


def test_a_job_that_failed_while_it_synced_goes_on_with_its_disks_and_copies_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk was resized in the weeks that the job was held, and another one added."""
    house = House(tmp_path, workers=in_process)
    same, grown, left_out = (Random(seed).randbytes(3 * MIB) for seed in (5, 6, 7))
    house.platform.add_vm(VM, {"same": same, "grown": grown, "left-out": left_out})
    job = house.intake.submit(live_plan())

    def changed() -> None:
        house.platform.resize(VM, "grown", grown + grown)
        house.platform.resize(VM, "added", grown[:MIB])

    once(house, job, in_state(State.DELTA_SYNCING), changed)
    before = house.run(job.id)
    assert (states(before)[-2:], error(before)) == ([State.DELTA_SYNCING, State.FAILED], ("E_MIG_CONFLICT", True))
    volumes = {key: house.volume(before, key) for key in ("same", "grown", "left-out")}
    written = written_to(house, monkeypatch)
    again = house.run(house.intake.retry(before.id, {"skip_disks": ["left-out"]}).id)
    assert (again.state, again.retry_of) == (State.COMPLETED, before.id), again.last_error
    assert house.volume(again, "same") == volumes["same"]
    for key in ("same", "grown", "added"):
        assert house.volume(again, key).read_bytes() == house.platform.disk_path(VM, key).read_bytes()
    assert not volumes["grown"].exists()
    assert not volumes["left-out"].exists()
    assert sum(written) == 7 * MIB, "nothing of the disk that is as it was"
    house.prove(again)


def test_a_live_job_that_left_no_copy_starts_over(house: House) -> None:
    house.platform.add_vm(VM, {DISK: Random(5).randbytes(MIB)}, family="windows")
    house.preparer.missing = True
    before = house.run(house.intake.submit(live_plan()).id)
    assert states(before) == [State.QUEUED, State.FAILED]
    house.preparer.missing = house.preparer.fails = False
    again = house.run(house.intake.retry(before.id, {}).id)
    assert (again.state, again.retry_of, again.attempt) == (State.COMPLETED, None, 2), again.last_error


def test_a_live_job_is_not_taken_up_while_another_is_at_work_on_its_machine(house: House) -> None:
    before = failed_live(house, "Warm", Random(5).randbytes(MIB))
    house.intake.submit(live_plan())
    with pytest.raises(Conflict, match="is at work on"):
        house.intake.retry(before.id, {})
    assert house.store.get(before.id).retried_by is None


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"source_ref": {"path": "/imports/other"}}, "plan.source_ref: cannot be changed any more: its copy was made so"),
        ({"skip_disks": [DISK]}, "plan.skip_disks: cannot"),
        ({"target": {"destination": "elsewhere"}}, "plan.target.destination: cannot"),
        ({"target": {"cpu_count": 0}}, "plan.target.cpu_count: must be greater than or equal to 1"),
        ({"nosuch": 1}, "plan.nosuch: is not a known field"),
        ({"mode": None}, "plan.mode: is required"),
    ],
)
def test_what_took_effect_or_is_wrong_is_not_changed(house: House, patch: dict[str, Any], message: str) -> None:
    before = failed(house)
    with pytest.raises(InvalidPlan, match=re.escape(message)):
        house.intake.retry(before.id, patch)
    assert house.store.get(before.id).retried_by is None


def test_a_correction_is_checked_though_the_source_is_gone(house: House) -> None:
    before = failed(house)
    house.platform.add_vm(VM, {DISK: bytes(MIB)})
    holder = live_plan(mode="Cold", conversion="never", target={"name": "holder", "start": False, "identity": "new"})
    assert house.run(house.intake.submit(holder).id).state == State.COMPLETED
    mended(house)
    with pytest.raises(Conflict, match="holder"):
        house.intake.retry(before.id, {"target": {"name": "holder"}})
    again = house.run(house.intake.retry(before.id, {"target": {"name": "free", "cpu_count": 3}}).id)
    assert (again.state, again.plan.target.cpu_count) == (State.COMPLETED, 3), again.last_error


def test_two_plans_for_one_vm_that_are_checked_at_once_are_not_both_taken(house: House) -> None:
    """Both have been checked before either is kept."""
    both = threading.Barrier(2)

    def check(plan: MigrationPlan) -> None:
        both.wait(60)

    intake = Intake(
        house.store,
        house.board,
        host="local",
        check=check,
        begin=lambda job_id: None,
        wake=house.wake,
        claim=partial(check_free, house.rooms),
    )

    with ThreadPoolExecutor(2) as pool:
        submitted = [pool.submit(intake.submit, live_plan()) for _ in range(2)]
        errors = [one.exception(60) for one in submitted]
    assert sorted(map(type, errors), key=str) == [NoneType, Conflict]
    assert "is at work on" in str(errors)
    assert len(house.store.unended()) == 1


def test_a_volume_that_was_removed_meanwhile_is_missed_and_not_made_again(house: House) -> None:
    before = failed(house)
    house.volume(before).unlink()
    again = house.run(house.intake.retry(before.id, {}).id)
    assert (again.state, again.last_error.code if again.last_error else None) == (State.FAILED, "E_MIG_DISK_READ_FAILED")
    assert not house.volume(before).exists()


def test_a_volume_that_cannot_be_read_is_missed_before_it_is_converted(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    before = failed(house)
    house.preparer.fails = False

    def refuse(*_: object) -> None:
        raise DiskReadFailed("input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(RawReader, "read_into", refuse)
        again = house.run(house.intake.retry(before.id, {}).id)
    assert (states(again), again.last_error and again.last_error.code) == (
        [State.QUEUED, State.FAILED],
        "E_MIG_DISK_READ_FAILED",
    )
    assert house.volume(before).exists()
