"""The moved guest is held against the one that was shut down, and what came of it is kept with the job and in its receipt."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from synvirt.errors import Internal, SourceUnreachable
from synvirt.migrations.proof import moved
from synvirt.migrations.proof.receipts import facts_of
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.proof import keeping
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.live import FakeAdapter
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan

TOLD = {"host name": "web01", "service nginx.service": "runs", "service vmtoolsd.service": "runs", "user web": "number 1000"}


@pytest.fixture
def house(tmp_path: Path) -> House:
    found = House(tmp_path, hypervisor=FakeHypervisor(), workers=in_process)
    found.platform.add_vm(VM, {"disk-0": bytes(1 << 20)})
    with found.platform.change(VM) as vm:
        vm["facts"] = TOLD
    return found


def moved_job(house: House, mode: str = "Warm", **fields: Any) -> Migration:
    ended = house.run(house.intake.submit(live_plan(mode, **fields)).id)
    assert ended.state == State.COMPLETED, ended.last_error
    return ended


@pytest.mark.parametrize("mode", ["Warm", "Cold"])
def test_it_is_compared_with_what_ran_before_the_shutdown(house: House, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "SETTLED_WITHIN_S", 0.0)
    house.hypervisor.facts = {"host name": "localhost", "service cron.service": "runs", "user web": "number 1000"}
    job = moved_job(house, mode)
    assert job.moved is not None
    graded = {one.item: one.grade for one in job.moved.differ if one.grade != "expected"}
    assert graded == {"host name": "wrong", "service nginx.service": "wrong", "service cron.service": "look"}
    tools = [one for one in job.moved.differ if "vmtoolsd" in one.item]
    assert [(one.grade, one.reason) for one in tools] == [
        ("expected", "it belongs to the platform that the guest came from, or came to")
    ]
    assert job.moved.differ[0].grade == "wrong"
    assert job.moved.same >= 5  # the user, and what the machine is made of
    assert facts_of(job)["sameness"] == json.loads(job.moved.model_dump_json())


def test_services_that_start_late_are_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "LOOK_AGAIN_S", 0.0)
    late = [{name: value for name, value in TOLD.items() if "nginx" not in name}] * 2
    monkeypatch.setattr(house.hypervisor, "guest_facts", lambda _: late.pop() if late else dict(TOLD))
    job = moved_job(house)
    assert job.moved is not None
    assert [one for one in job.moved.differ if one.grade in ("wrong", "look")] == []
    assert late == []


def test_a_platform_that_says_nothing_is_a_row_to_look_at(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> dict[str, str]:
        raise SourceUnreachable("the tools are away")

    monkeypatch.setattr(FakeAdapter, "guest_facts", away)
    job = moved_job(house)
    assert job.moved is not None
    (row,) = [one for one in job.moved.differ if one.grade != "expected"]
    assert (row.item, row.source, row.clone, row.grade) == ("what runs in it", None, None, "look")
    assert "no agent and no tools report the guest at its source" in row.reason


def test_a_guest_that_is_not_started_is_compared_as_a_machine(house: House) -> None:
    job = moved_job(house, target={"start": False})
    assert job.moved is not None
    assert job.moved.same >= 4
    assert not any(one.item.startswith(("host", "service")) for one in job.moved.differ)


def test_a_guest_that_cannot_be_asked_for_a_while_is_asked_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "LOOK_AGAIN_S", 0.0)
    answers: list[dict[str, str] | Internal] = [TOLD, Internal("the hypervisor is busy"), Internal("the hypervisor is busy")]

    def asked(_: object) -> dict[str, str]:
        answer = answers.pop()
        if isinstance(answer, Internal):
            raise answer
        return answer

    monkeypatch.setattr(house.hypervisor, "guest_facts", asked)
    job = moved_job(house)
    assert job.moved is not None
    assert answers == []


def test_a_guest_that_can_never_be_asked_fails_no_job(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(_: object) -> dict[str, str]:
        raise Internal("the hypervisor is busy")

    monkeypatch.setattr(moved, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(moved, "SETTLED_WITHIN_S", 0.05)
    monkeypatch.setattr(house.hypervisor, "guest_facts", asked)
    assert moved_job(house).moved is None


def test_a_full_disk_costs_the_job_its_receipt_and_is_not_called_a_mistake_of_ours(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert house.rooms.receipts is not None
    with monkeypatch.context() as patched:
        patched.setattr(keeping, "write_bag", full)
        ended = moved_job(house, "Cold")
    assert ended.receipt is None
    assert ended.last_error is not None
    assert (ended.last_error.code, ended.last_error.fatal) == ("E_MIG_PERSIST_FAILED", False)
    assert "No space left on device" in ended.last_error.message
    assert "the service's folder" in (ended.last_error.hint or "")
    folder = house.folder / "receipts"
    assert [path for path in folder.rglob("*") if path.is_file()] == [], "nothing half-made is left"
