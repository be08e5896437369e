"""The laws of rehearsals, in a house of fakes: nothing of one stays, and neither the source nor the copy is touched by it."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.errors import Cancelled, Conflict, DiskWriteFailed, HostLacks, NotFound
from synvirt.migrations import source_vm
from synvirt.migrations.removing import Removal
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.machine import Nic
from synvirt.model.rehearsal import (
    REHEARSED,
    CommandCheck,
    PageCheck,
    PortCheck,
    Rehearsal,
    RehearsalRequest,
    RehearsalState,
    RoleCheck,
)
from synvirt.proof.sameness import kind_of
from synvirt.rehearsals.steps import SWEEP_PAUSES_S
from synvirt.rehearsals.under_way import UnderWay
from synvirt.sizes import MIB
from synvirt.store.rehearsals import KEPT
from tests.fakes.clones import CopyingDirectory
from tests.fakes.guests import MARK, FakePreparer
from tests.fakes.hypervisor import PICTURE, FakeHypervisor
from tests.fakes.live import FakeAdapter
from tests.house import VM, live_plan
from tests.rehearsals.stage import CONTENT, DISK, HELD, Stage, Writing, source_bytes


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "house", Writing())
    yield stage
    stage.close()


def test_a_job_that_syncs_on_is_rehearsed(stage: Stage) -> None:
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    passes = len(stage.house.store.get(job.id).passes)
    found = stage.rehearse(job.id)
    assert (found.state, found.error) == (RehearsalState.PASSED, None)
    assert [(one.name, one.ok) for one in found.checks] == [("boot", True), ("network", True)]
    assert found.boot_sign == "agent"
    assert found.boot_s is not None
    assert found.moment is not None
    assert found.outage_s is not None
    assert found.outage_s >= found.boot_s
    assert stage.rehearsals.screenshot(found.id) == PICTURE
    hypervisor = stage.house.hypervisor
    assert isinstance(hypervisor, Writing)
    assert hypervisor.seen[found.id] == CONTENT
    assert stage.leftovers(stage.house.store.get(job.id)) == []
    stage.until(lambda: stage.house.store.get(job.id).passes[-1].number > passes)
    vm = stage.house.platform.vm(VM)
    assert vm["power"] == "on", "the source is not touched"
    ended = stage.cut_over(job.id)
    assert ended.state == State.COMPLETED, ended.last_error
    assert hypervisor.seen[UUID(ended.domain.uuid if ended.domain else "")] == source_bytes(stage)
    assert ended.outage is not None
    assert [part.measured for part in ended.outage.parts if part.name == "boot"] == [1]
    receipts = stage.house.rooms.receipts
    assert receipts is not None
    reported = receipts.content(ended.id)
    assert reported is not None
    assert [one["state"] for one in reported.statement["rehearsals"]] == ["Passed"]


def test_each_rehearsal_has_the_newest_moment(stage: Stage) -> None:
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    first = stage.rehearse(job.id)
    stage.house.platform.guest_writes(VM, DISK, 4096, b"written between two rehearsals")
    passes = stage.house.store.get(job.id).passes[-1].number
    stage.until(lambda: stage.house.store.get(job.id).passes[-1].number > passes + 1)
    second = stage.rehearse(job.id)
    hypervisor = stage.house.hypervisor
    assert isinstance(hypervisor, Writing)
    assert hypervisor.seen[first.id] == CONTENT
    assert hypervisor.seen[second.id] == source_bytes(stage)
    assert [one.id for one in stage.asking.of(job.id)] == [second.id, first.id]
    assert first.moment is not None
    assert second.moment is not None
    assert first.moment < second.moment
    stage.cancel(job.id)


def test_a_guest_is_converted_on_the_clone_alone(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "house", Writing(), conversion="always")
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    found = stage.rehearse(job.id)
    assert found.state is RehearsalState.PASSED
    assert found.conversion_s is not None
    hypervisor = stage.house.hypervisor
    assert isinstance(hypervisor, Writing)
    assert hypervisor.seen[found.id].startswith(MARK)
    held = stage.house.store.get(job.id)
    assert stage.house.volume(held).read_bytes() == CONTENT
    assert stage.leftovers(held) == []
    stage.cancel(job.id)
    stage.close()


@pytest.mark.parametrize(
    ("conversion", "drivers", "bus"),
    [("never", "virtio_blk, virtio_pci", "scsi"), ("always", "virtio_blk, virtio_pci", "virtio"), ("auto", "none", "virtio")],
)
def test_a_linux_is_rehearsed_on_the_bus_that_it_will_get(tmp_path: Path, conversion: str, drivers: str, bus: str) -> None:
    """A conversion writes the names that the disks have here into its fstab, and the drivers for them into its initramfs."""
    stage = Stage(tmp_path / "house", FakeHypervisor(), conversion=conversion)
    stage.disks_say = [{"mount /data": "/dev/sdb1 ext4", "drivers in /boot/initramfs-5.14.img": drivers}]
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    found = stage.rehearse(job.id)
    assert found.state is RehearsalState.PASSED
    assert f"disks on {bus}" in found.checks[0].detail
    assert (found.conversion_s is None) == (conversion == "never")
    stage.cancel(job.id)
    stage.close()


def test_checks_are_a_row_each(stage: Stage) -> None:
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    good, bad = (CommandCheck(kind="command", argv=(name,), within_s=0.1) for name in ("true", "false"))
    found = stage.rehearse(job.id, good, bad)
    assert found.state is RehearsalState.FAILED
    assert [(one.name, one.ok) for one in found.checks] == [("boot", True), ("network", True), ("true", True), ("false", False)]
    assert "false ended with 1" in found.checks[-1].detail
    assert found.screenshot_url == f"/migrations/{job.id}/rehearsals/{found.id}/screenshot"
    stage.cancel(job.id)


def test_a_guest_whose_network_this_host_cannot_make_is_rehearsed_without(tmp_path: Path) -> None:
    """And no check of a port or a page goes to the guest that runs."""

    def refuse(cards: Sequence[Nic]) -> Any:
        raise HostLacks("no tap device")

    stage = Stage(tmp_path / "house", Writing(), begin_network=refuse)
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        page = PageCheck(kind="http", url=url, within_s=0.1)
        role = RoleCheck(kind="role", role="sql-server", within_s=0.1)
        found = stage.rehearse(job.id, page, PortCheck(kind="port", port=22, within_s=0.1), role)
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()
    assert [(one.name, one.ok) for one in found.checks] == [
        ("boot", True),
        ("network", True),
        (url, False),
        ("port 22", False),
        ("sql-server: port 1433", False),
    ]
    assert found.checks[1].detail == "none: no tap device"
    stage.cancel(job.id)
    stage.close()


@pytest.mark.parametrize(("fail", "code"), [("boot", "E_MIG_GUEST_BOOT_FAILED"), ("define", "E_MIG_DOMAIN_DEFINE_FAILED")])
def test_a_guest_that_does_not_start_fails_the_rehearsal_and_not_the_job(tmp_path: Path, fail: str, code: str) -> None:
    hypervisor = FakeHypervisor(fail=fail)
    stage = Stage(tmp_path / "house", hypervisor)
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    found = stage.rehearse(job.id)
    assert found.state is RehearsalState.FAILED
    assert found.error is not None
    assert found.error.code == code
    assert stage.leftovers(stage.house.store.get(job.id)) == []
    hypervisor.fail = None
    assert stage.rehearse(job.id).state is RehearsalState.PASSED
    assert stage.cut_over(job.id).state == State.COMPLETED
    stage.close()


def test_the_guest_is_held_against_its_source(stage: Stage) -> None:
    job = stage.submit()
    with stage.house.platform.change(VM) as vm:
        vm["facts"] = {"host name": "web01", "kernel": "6.1"}
    stage.house.hypervisor.facts = {"host name": "web01", "kernel": "5.10"}
    stage.begin_job(job.id)
    stage.holds(job.id)
    found = stage.rehearse(job.id)
    reported = {one.item: one.grade for one in found.sameness if one.grade != "expected"}
    machine = {name: grade for name, grade in reported.items() if name not in ("host name", "kernel")}
    assert {reported["host name"], *machine.values()} == {"same"}
    assert {"firmware", "boot order", "memory", "processors"} <= machine.keys()
    assert reported["kernel"] == "look"
    assert found.sameness[0].item == "kernel"
    stage.cancel(job.id)


def test_a_source_that_misses_one_question_is_asked_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    job = stage.submit()
    answers = [{"host name": "web01"}, {}]

    async def guest_facts(self: FakeAdapter, vm_id: str) -> dict[str, str]:
        return answers.pop()

    stage.house.hypervisor.facts = {"host name": "web01"}
    stage.begin_job(job.id)
    stage.holds(job.id)
    monkeypatch.setattr(FakeAdapter, "guest_facts", guest_facts)
    reported = {one.item: one.grade for one in stage.rehearse(job.id).sameness}
    assert (reported["host name"], answers) == ("same", [])
    stage.cancel(job.id)


def test_a_guest_without_an_agent_is_held_against_its_source_by_what_its_disks_say(stage: Stage) -> None:
    """Before its first boot they are the source's; after it, and with the guest off, they are what became of them."""
    job = stage.submit()
    with stage.house.platform.change(VM) as vm:
        vm["facts"] = {"system": "Debian GNU/Linux 12", "addresses of 52:54:00:00:00:01": "10.0.0.5"}
    before = {"host name": "web01", "system": "Debian GNU/Linux 12 (bookworm)", "enabled nginx.service": "by multi-user.target"}
    stage.disks_say = [before, {**before, "host name": "localhost"}]
    stage.begin_job(job.id)
    stage.holds(job.id)
    found = stage.rehearse(job.id)
    assert (found.state, found.error) == (RehearsalState.PASSED, None)
    reported = {
        one.item: (one.grade, one.source) for one in found.sameness if kind_of(one.item) in ("host name", "system", "enabled")
    }
    assert reported == {
        "host name": ("wrong", "web01"),
        "system": ("expected", "Debian GNU/Linux 12"),
        "enabled nginx.service": ("same", "by multi-user.target"),
    }
    assert [one for one in found.sameness if one.item.startswith("addresses")] == []
    assert found.read == {}
    assert found.screenshot_url is not None
    stage.cancel(job.id)


def test_where_the_source_says_nothing_its_disks_speak_for_it(stage: Stage) -> None:
    job = stage.submit()
    stage.disks_say = [{"host name": "web01", "user web": "number 1000, shell /bin/sh", "mount /": "UUID=1 ext4"}]
    stage.house.hypervisor.facts = {"host name": "web01", "user root": "number 0, shell /bin/sh", "kernel": "6.1"}
    stage.begin_job(job.id)
    stage.holds(job.id)
    reported = {
        one.item: one.grade for one in stage.rehearse(job.id).sameness if kind_of(one.item) in ("host name", "user", "mount")
    }
    assert reported == {"host name": "same", "user web": "wrong", "user root": "look"}
    stage.cancel(job.id)


def test_the_ladder_is_climbed(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "house", FakeHypervisor(boots_from=("sata",)))
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    found = stage.rehearse(job.id)
    assert found.state is RehearsalState.PASSED
    assert "disks on sata" in found.checks[0].detail
    assert [one.clone for one in found.sameness if one.item == f"bus of disk {DISK}"] == ["sata"]
    stage.cancel(job.id)
    stage.close()


def test_a_clone_that_fails_is_the_rehearsals_trouble(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: CopyingDirectory, name: str, to: str) -> None:
        raise DiskWriteFailed("no room for another clone", hint="free some")

    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    monkeypatch.setattr(CopyingDirectory, "clone", refuse)
    found = stage.rehearse(job.id)
    assert found.state is RehearsalState.FAILED
    assert found.error is not None
    assert found.error.message == "no room for another clone"
    assert stage.cut_over(job.id).state == State.COMPLETED


def test_what_cannot_be_rehearsed_is_said_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.house.platform.add_vm(VM, {DISK: CONTENT})
    cold = stage.house.intake.submit(live_plan("Cold"))
    with pytest.raises(Conflict, match="it copies cold"):
        stage.asking.ask(cold.id, RehearsalRequest())
    assert stage.house.run(cold.id).state == State.COMPLETED
    with pytest.raises(Conflict, match="it has ended"):
        stage.asking.ask(cold.id, RehearsalRequest())
    with pytest.raises(NotFound):
        stage.asking.ask(UUID(int=9), RehearsalRequest())
    stage.house.platform.vm(VM)
    warm = stage.house.intake.submit(live_plan(warm=HELD, target={"identity": "new", "name": "other"}))
    first = stage.asking.ask(warm.id, RehearsalRequest())
    with pytest.raises(Conflict, match=f"rehearsal {first.id} of job {warm.id} has not ended"):
        stage.asking.ask(warm.id, RehearsalRequest())
    monkeypatch.setattr(CopyingDirectory, "why_no_clones", lambda self: "it shares nothing")
    with pytest.raises(HostLacks, match="it shares nothing"):
        stage.asking.ask(warm.id, RehearsalRequest())
    with pytest.raises(NotFound):
        stage.asking.get(cold.id, first.id)
    stage.asking.cancel(warm.id, first.id)
    stage.begin(first.id)
    stage.until(lambda: stage.asking.get(warm.id, first.id).state is RehearsalState.CANCELLED)
    with pytest.raises(Conflict, match="has ended"):
        stage.asking.cancel(warm.id, first.id)


def test_one_that_is_asked_for_early_waits_for_the_first_pass(stage: Stage) -> None:
    job = stage.submit()
    rehearsal = stage.asking.ask(job.id, RehearsalRequest())
    stage.begin(rehearsal.id)
    stage.begin_job(job.id)
    stage.until(lambda: stage.asking.get(job.id, rehearsal.id).state is RehearsalState.PASSED)
    stage.cancel(job.id)


def waiting_for_a_silent_guest(tmp_path: Path) -> tuple[Stage, FakeHypervisor, Migration, Rehearsal]:
    """A guest that never shows a sign: its rehearsal would wait for it for seconds."""
    hypervisor = FakeHypervisor(fail="silent")
    stage = Stage(tmp_path / "house", hypervisor)
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    rehearsal = stage.asking.ask(job.id, RehearsalRequest())
    stage.begin(rehearsal.id)
    stage.until(lambda: rehearsal.id in hypervisor.domains)
    return stage, hypervisor, job, rehearsal


def test_the_cut_over_calls_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, hypervisor, job, rehearsal = waiting_for_a_silent_guest(tmp_path)
    rows, cancel_of = stage.house.store.rehearsals, stage.house.store.rehearsals.cancel_of

    def called_off(job_id: UUID) -> None:
        cancel_of(job_id)
        hypervisor.fail = None  # the job's own guest is not silent

    monkeypatch.setattr(rows, "cancel_of", called_off)
    ended = stage.cut_over(job.id)
    assert ended.state == State.COMPLETED
    assert stage.asking.get(job.id, rehearsal.id).state is RehearsalState.CANCELLED
    assert stage.leftovers(ended) == []
    stage.close()


def test_a_cancelled_job_takes_its_rehearsal_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_vm, "SHUTTING_DOWN_S", 0.0)
    stage, _, job, rehearsal = waiting_for_a_silent_guest(tmp_path)
    stage.house.intake.cancel(job.id)
    stage.until(lambda: stage.house.store.get(job.id).ended)
    assert stage.asking.get(job.id, rehearsal.id).state is RehearsalState.CANCELLED
    assert stage.house.leftovers(VM) == []
    stage.join()
    stage.close()


def test_a_job_is_not_removed_while_its_rehearsal_is_swept(stage: Stage) -> None:
    job = stage.submit()
    rehearsal = stage.asking.ask(job.id, RehearsalRequest())
    removal = Removal(stage.house.store, here=stage.house.rooms.host, destroy=lambda job: None, forget=lambda job: None)
    with pytest.raises(Conflict, match="has not ended"):
        removal.remove(job.id, None)
    stage.asking.cancel(job.id, rehearsal.id)
    stage.begin(rehearsal.id)
    stage.join()
    stage.begin_job(job.id)
    stage.cancel(job.id)
    removal.remove(job.id, None)
    with pytest.raises(NotFound):
        stage.house.store.rehearsals.get(rehearsal.id)


@pytest.mark.parametrize("error", [OSError("a disk gives no answer"), DiskWriteFailed("the pool is away")])
@pytest.mark.parametrize("where", ["unclone", "volume_name"])
def test_what_cannot_be_removed_now_changes_no_result_and_is_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    """Whatever the error is, and with a pause, as it may last for days."""
    pauses: list[float] = []
    threads: list[threading.Thread] = []
    real, failures = getattr(CopyingDirectory, where), iter((error, error))

    def failing(self: CopyingDirectory, *names: Any) -> Any:
        if threading.current_thread() in threads and _state(stage, asked) is RehearsalState.SWEEPING:
            for failure in failures:
                raise failure
        return real(self, *names)

    def paused(_: UnderWay, seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(0.01)

    monkeypatch.setattr(CopyingDirectory, where, failing)
    monkeypatch.setattr(UnderWay, "pause", paused)
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    asked = stage.asking.ask(job.id, RehearsalRequest())
    threads.append(stage.begin(asked.id))
    stage.until(lambda: _state(stage, asked) in REHEARSED)
    assert _state(stage, asked) is RehearsalState.PASSED
    assert stage.asking.get(job.id, asked.id).error is None
    assert pauses[-2:] == list(SWEEP_PAUSES_S[:2])


def _state(stage: Stage, rehearsal: Rehearsal) -> RehearsalState:
    return stage.asking.get(rehearsal.migration_id, rehearsal.id).state


def test_the_oldest_go(stage: Stage) -> None:
    job = stage.submit()
    made = []
    for _ in range(KEPT + 3):
        rehearsal = stage.asking.ask(job.id, RehearsalRequest())
        stage.asking.cancel(job.id, rehearsal.id)
        stage.rehearsals.run(rehearsal.id, threading.Event())
        made.append(rehearsal.id)
    assert [one.id for one in stage.asking.of(job.id)] == made[:2:-1]


class Slow(FakePreparer):
    """Converts until it is told to stop, as a program does."""

    def __init__(self) -> None:
        super().__init__()
        self.running, self.ended = threading.Event(), threading.Event()

    def convert(
        self, name: str, manifest: Any, devices: list[str], on_message: Any, stop: Callable[[], bool], **beneath: object
    ) -> None:
        self.running.set()
        while not stop():
            time.sleep(0.01)
        self.ended.set()
        raise Cancelled


def test_a_service_that_loses_its_lease_stops_what_runs_and_goes_on_later(tmp_path: Path) -> None:
    """The program is ended, the rehearsal is not: its next run converts again."""
    stage = Stage(tmp_path / "house", Writing(), conversion="always")
    slow = Slow()
    slow.folder = stage.house.preparer.folder
    object.__setattr__(stage.house.rooms, "preparer", slow)
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    rehearsal = stage.asking.ask(job.id, RehearsalRequest())
    stage.until(lambda: stage.asking.get(job.id, rehearsal.id).state is RehearsalState.PREPARING)
    stage.rehearsals.start()
    assert slow.running.wait(60)
    stage.rehearsals.pause()
    assert slow.ended.is_set(), "nothing of it runs when the pause returns"
    assert stage.asking.get(job.id, rehearsal.id).state is RehearsalState.PREPARING
    object.__setattr__(stage.house.rooms, "preparer", stage.house.preparer)
    stage.rehearsals.resume()
    stage.until(lambda: stage.asking.get(job.id, rehearsal.id).state in REHEARSED)
    assert stage.asking.get(job.id, rehearsal.id).state is RehearsalState.PASSED
    stage.cancel(job.id)
    stage.close()


def test_a_picture_goes_with_its_rehearsal(stage: Stage) -> None:
    screens = stage.rehearsals.screens
    screens.mkdir()
    (screens / f"{UUID(int=3)}.png").write_bytes(PICTURE)
    (screens / f"{UUID(int=3)}.partial").write_bytes(PICTURE)
    stage.rehearsals.start()
    stage.rehearsals.close()
    assert list(screens.iterdir()) == []


def test_a_delta_threshold_is_no_matter(stage: Stage) -> None:
    """A job that cuts over by itself may be rehearsed as long as it has not begun to."""
    stage.house.platform.add_vm(VM, {DISK: CONTENT})
    job = stage.house.intake.submit(live_plan(warm={"delta_threshold_bytes": 8 * MIB}))
    rehearsal = stage.asking.ask(job.id, RehearsalRequest())
    stage.begin(rehearsal.id)
    stage.begin_job(job.id)
    stage.join()
    assert stage.house.store.get(job.id).state == State.COMPLETED
    assert stage.asking.get(job.id, rehearsal.id).state in (RehearsalState.PASSED, RehearsalState.CANCELLED)
