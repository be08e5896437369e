"""The guest of an instant start: when it counts as started, how it is kept, and how it gets onto its volumes. Nothing may lose
what it wrote."""

import asyncio
import contextlib
import dataclasses
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from synvirt.errors import Cancelled, DiskReadFailed, DomainDefineFailed, GuestBootFailed, Internal, SynvirtError
from synvirt.guests.inside.opening import by_socket
from synvirt.hypervisor import Lived, Paused
from synvirt.jobs.stop import Stop
from synvirt.migrations import instant
from synvirt.migrations.instant import until_it_goes_well
from synvirt.model.job import Instant, InstantState
from synvirt.model.kinds import State
from synvirt.model.values import now
from synvirt.sizes import MIB
from tests.drawn import drawn
from tests.fakes.workers import in_process
from tests.house import House, offline_plan
from tests.running.processes import until

RUNS, RAN, NEVER = Lived(runs=True, trace="it runs"), Lived(runs=False, trace="it wrote to its disk"), Lived(False, None)


class Job:
    """`lived`: what its hypervisor tells of its domain; None: there is none. It keeps each `instant` that it had."""

    def __init__(self, lived: Lived | None, *, has_domain: bool = True) -> None:
        domain = SimpleNamespace(uuid=str(UUID(int=1))) if has_domain else None
        self.id = UUID(int=2)
        self.migration: Any = SimpleNamespace(
            boot_sign=None, instant=Instant(state="preparing"), domain=domain, state="CopyingFull", last_error=None
        )
        self.rooms = SimpleNamespace(hypervisor=SimpleNamespace(lived=lambda _: lived))
        self.had: list[Instant] = []
        self.shown: list[SynvirtError] = []
        self.stop: Any = SimpleNamespace(sleep=self.slept)

    async def slept(self, _seconds: float) -> None:
        pass

    async def in_thread(self, call: Callable[..., Any], *arguments: object) -> Any:
        return call(*arguments)

    async def change(self, **named: Any) -> None:
        vars(self.migration).update(named)
        self.had.append(self.migration.instant)

    async def show(self, error: SynvirtError) -> None:
        self.shown.append(error)

    async def show_no_more(self) -> None:
        self.shown.clear()


Starts = Callable[[Any], Awaitable[None]]


def landed(job: Any, patched: pytest.MonkeyPatch, land: Callable[[Any, Any, Starts], Awaitable[None]]) -> None:
    async def nothing_noted(*_: object) -> None:
        """Its disks say nothing."""

    patched.setattr(instant, "note_content", nothing_noted)
    patched.setattr(instant, "land", land)
    asyncio.run(instant._landed(job, []))


def test_it_is_noted_before_its_first_start_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each rung of the ladder it is started anew."""
    job = Job(RUNS)

    async def land(job: Any, _volumes: object, starts: Starts) -> None:
        for state in ("preparing", "waiting", "running"):
            job.migration.instant = job.migration.instant.model_copy(update={"state": state})
            before = job.migration.instant
            await starts(job)
            found = job.migration.instant
            assert found.started_at is not None
            assert found == (found.model_copy(update={"state": "running"}) if before.started_at is None else before)

    landed(job, monkeypatch, land)
    assert len(job.had) == 1


@pytest.mark.parametrize(
    ("lived", "has_domain", "is_kept"),
    [(RUNS, True, True), (RAN, True, True), (NEVER, True, False), (None, True, False), (None, False, False)],
)
def test_one_that_could_not_be_started_has_nothing_to_lose_unless_it_ran(
    monkeypatch: pytest.MonkeyPatch, lived: Lived | None, has_domain: bool, is_kept: bool
) -> None:
    job = Job(lived, has_domain=has_domain)

    async def land(job: Any, _volumes: object, starts: Starts) -> None:
        await starts(job)
        raise DomainDefineFailed("it cannot be started")

    with pytest.raises(DomainDefineFailed):
        landed(job, monkeypatch, land)
    found = job.migration.instant
    assert ((found.started_at is not None), found.state) == ((True, "running") if is_kept else (False, "preparing"))


def test_one_that_does_not_boot_is_copied_and_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(NEVER)

    async def land(job: Any, _volumes: object, starts: Starts) -> None:
        await starts(job)
        raise GuestBootFailed("no sign")

    landed(job, monkeypatch, land)
    assert job.migration.instant.started_at is not None


def test_one_that_was_seen_to_boot_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(RUNS)
    job.migration.boot_sign = "agent"

    async def land(*_: object) -> None:
        pytest.fail("it runs, or its user has shut it down")

    landed(job, monkeypatch, land)
    assert job.had == []


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("state", ["preparing", "running", "waiting", "moving", "done", None])
def test_a_failure_is_tried_again_exactly_while_something_would_be_lost(is_started: bool, state: InstantState | None) -> None:
    """None: there is no overlay yet."""
    job: Any = Job(RUNS)
    job.migration.instant = None if state is None else Instant(state=state, started_at=now() if is_started else None)
    tries: list[int] = []

    async def attempt() -> str:
        tries.append(len(job.shown))
        if len(tries) < 3:
            raise ValueError("of any kind")
        return "done"

    if is_started and state not in ("done", None):
        assert asyncio.run(until_it_goes_well(job, attempt)) == "done"
        assert (tries, job.shown) == ([0, 1, 2], [])
    else:
        with pytest.raises(ValueError, match="of any kind"):
            asyncio.run(until_it_goes_well(job, attempt))
        assert (tries, job.shown) == ([0], [])


def test_work_that_fails_stops_the_other_and_is_told_when_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a guest is defined and started in a thread after its job was swept."""
    job, calls = Job(RUNS), list[str]()
    job.stop = stop = Stop()

    async def kept(*_: object) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            calls.append("kept no more")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise DiskReadFailed("the source broke")

    async def works() -> None:
        def until_stopped() -> None:
            until(stop.is_set)
            calls.append("ended")

        await asyncio.to_thread(until_stopped)

    monkeypatch.setattr(instant, "_keep", kept)
    of: Any = job
    with pytest.raises(DiskReadFailed):
        asyncio.run(instant._while_guest_is_kept(of, [], [works(), fails()]))
    assert calls == ["ended", "kept no more"]
    assert not stop.is_set(), "nobody has cancelled the job"


@pytest.mark.parametrize("paused", [Paused(), None])
@pytest.mark.parametrize("state", ["preparing", "running", "waiting", "moving", "done"])
def test_each_look_tells_whether_the_guest_waits_while_it_runs_over_its_source(
    monkeypatch: pytest.MonkeyPatch, state: InstantState, paused: Paused | None
) -> None:
    job: Any = Job(RUNS)
    job.migration.instant = Instant(state=state, started_at=now())
    job.rooms.exports = object()
    looks = iter([None])

    async def slept(_seconds: float) -> None:
        if next(looks, "over") == "over":
            raise Cancelled

    job.stop.sleep = slept
    monkeypatch.setattr(instant, "keep_going", lambda *_: paused)
    with pytest.raises(Cancelled):
        asyncio.run(instant._keep(job, []))
    follows = "waiting" if paused else "running"
    assert job.migration.instant.state == (follows if state in ("running", "waiting") else state)


class Moving(Job):
    """`fails`: the call at which something breaks, once."""

    def __init__(self, state: InstantState, *, fails: str = "") -> None:
        super().__init__(RUNS)
        self.migration.instant = Instant(state=state, started_at=now())
        self.calls: list[str] = []
        self.fails = fails
        self.stop = SimpleNamespace(sleep=self.slept, check=lambda: self.noted("look for a cancel"))
        self.rooms.hypervisor.onto_volumes = lambda *_: None
        self.rooms.exports = SimpleNamespace(end=lambda _: self.noted("end the export"))

    def noted(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails:
            self.fails = ""
            raise Cancelled if call == "look for a cancel" else Internal("it broke")

    async def change(self, **named: Any) -> None:
        await super().change(**named)
        self.noted(self.migration.instant.state)

    async def in_stoppable_thread(self, call: Callable[..., Any]) -> None:
        self.noted("move")

    async def strike(self, kind: str, name: str) -> None:
        assert (kind, name) == ("export", str(self.id))
        self.noted("strike")

    def onto_volumes(self, patched: pytest.MonkeyPatch) -> None:
        async def define_on(_job: object, _volumes: object, _moved: object) -> None:
            self.noted("define")

        async def show_room(_job: object, paused: object) -> None:
            assert paused is None
            self.noted("show its room")

        patched.setattr(instant, "define_on", define_on)
        patched.setattr(instant, "_show_room", show_room)
        patched.setattr(instant, "_early_volumes", lambda _: [])
        of: Any = self
        asyncio.run(instant.onto_volumes(of, None, []))


MOVED = ["moving", "move", "define", "move", "show its room"]
LEFT = ["end the export", "done", "look for a cancel", "strike"]


@pytest.mark.parametrize("state", ["running", "waiting", "moving"])
def test_a_guest_is_on_its_volumes_before_what_it_ran_over_goes(monkeypatch: pytest.MonkeyPatch, state: InstantState) -> None:
    job = Moving(state)
    job.onto_volumes(monkeypatch)
    assert job.calls == [*MOVED, *LEFT]


def test_one_that_has_moved_does_not_move_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Moving("done")
    job.onto_volumes(monkeypatch)
    assert job.calls == LEFT


def test_a_move_that_fails_is_tried_again_and_an_export_that_does_not_end_holds_the_guests_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Moving("running", fails="define")
    job.onto_volumes(monkeypatch)
    assert job.calls == [*MOVED[:3], *MOVED[1:], *LEFT]
    job = Moving("running", fails="end the export")
    with pytest.raises(Internal):
        job.onto_volumes(monkeypatch)
    assert job.migration.instant.state == "moving", "its failure ends no job"


def test_a_cancel_is_seen_as_long_as_the_export_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Moving("running", fails="look for a cancel")
    with pytest.raises(Cancelled):
        job.onto_volumes(monkeypatch)
    assert job.calls == [*MOVED, *LEFT[:-1]]


def test_a_store_put_back_from_before_the_move_leaves_the_volumes_to_the_guest(tmp_path: Path) -> None:
    """Else the source would be copied again, over what the guest has written onto them."""
    house, old = House(tmp_path, workers=in_process), tmp_path / "old.db"
    folder = house.imports / "appliance"
    folder.mkdir()
    (folder / "disk-0.raw").write_bytes(drawn(MIB))
    job = house.intake.submit(offline_plan(folder, instant=True))

    def copied(of: Path, to: Path) -> None:
        with contextlib.closing(sqlite3.connect(of)) as store, contextlib.closing(sqlite3.connect(to)) as copy:
            store.backup(copy)

    def kept() -> None:
        instant_ = house.store.get(job.id).instant
        if not old.exists() and instant_ is not None and instant_.state == "running":
            copied(tmp_path / "store.db", old)

    house.store.on_commit = kept
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED
    (uuid,) = house.hypervisor.domains
    with house.volume(ended).open("r+b") as disk:
        disk.write(b"written on its volume")
    written = house.volume(ended).read_bytes()
    assert written != drawn(MIB)
    house.close()
    copied(old, tmp_path / "store.db")
    again = House(tmp_path, workers=in_process, hypervisor=house.hypervisor)
    ended = again.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert again.volume(ended).read_bytes() == written
    assert house.hypervisor.domains[uuid].running
    again.close()


def test_the_disks_of_an_instant_start_are_inspected_before_it(tmp_path: Path) -> None:
    """What the guest reads until its copy is complete: a guest that does not boot from that would fail only after the copy."""
    house, inspected = House(tmp_path, workers=in_process), []
    folder = house.imports / "appliance"
    folder.mkdir()
    (folder / "disk-0.raw").write_bytes(drawn(MIB))

    def look(devices: Sequence[str], *_: object) -> dict[str, str]:
        inspected.append((list(devices), dict(house.hypervisor.domains)))
        return {"mount /data": "/dev/sdb1 xfs", "drivers in /boot/initramfs-5.14.img": "none for disks here"}

    house.rooms = dataclasses.replace(house.rooms, look_inside=look)
    job = house.run(house.intake.submit(offline_plan(folder, instant=True)).id)
    assert job.state is State.COMPLETED, job.last_error
    assert house.rooms.exports is not None
    assert inspected == [([by_socket(str(house.rooms.exports.folder(str(job.id)) / "0"))], {})]
    assert [attempt.disk_bus for attempt in job.boot_attempts] == ["scsi"]
    assert house.preparer.prepared == [], "its guest runs already"
    house.close()
