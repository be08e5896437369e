"""Instant start on a fake hypervisor: what goes wrong while the guest runs fails nothing; what cannot be is refused at once."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.disks.checking import checksum
from synvirt.disks.specs import (
    AllocatedSpec,
    BlankSpec,
    ChangedSpec,
    GzipSpec,
    ImageSpec,
    JoinedSpec,
    QemuSpec,
    RawSpec,
    ReaderSpec,
    XvaSpec,
)
from synvirt.errors import Conflict, DiskReadFailed, DiskWriteFailed, Internal, InvalidPlan
from synvirt.hypervisor import Volume
from synvirt.jobs.activity import Yielding
from synvirt.jobs.exporting import ACTIVITY
from synvirt.jobs.instant import is_started
from synvirt.migrations import instant
from synvirt.migrations.intake import check_plan
from synvirt.migrations.job import Job
from synvirt.migrations.planning.foreseen import dry_run
from synvirt.migrations.proof import receipts
from synvirt.model.job import Domain, Instant, InstantState, Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.remote import Remote
from synvirt.sizes import MIB
from tests.drawn import drawn
from tests.fakes.exports import FakeExports
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.workers import in_process
from tests.house import Crash, House, live_plan, offline_plan, states
from tests.patience import quick_tries
from tests.running.processes import until


def disk_content() -> bytes:
    return drawn(2 * MIB)


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    quick_tries(monkeypatch)
    monkeypatch.setattr(instant, "AGAIN_S", (0.05,))
    monkeypatch.setattr(instant, "LOOK_EVERY_S", 0.02)
    house = House(tmp_path / "house", workers=in_process)
    yield house
    house.close()


def _plan(house: House, **fields: Any) -> MigrationPlan:
    folder = house.imports / "appliance"
    folder.mkdir(exist_ok=True)
    (folder / "disk-0.raw").write_bytes(disk_content())
    return offline_plan(folder, **({"instant": True} | fields))


def _exports(house: House) -> FakeExports:
    assert isinstance(house.rooms.exports, FakeExports)
    return house.rooms.exports


class _Running:
    """A job in a thread of its own, while the test meddles."""

    def __init__(self, house: House, job: Migration) -> None:
        self.house, self.id = house, job.id
        self._thread = threading.Thread(target=house.run, args=(job.id,))
        self._thread.start()

    @property
    def job(self) -> Migration:
        return self.house.store.get(self.id)

    def ended(self) -> Migration:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.job


def _is_started(running: _Running) -> bool:
    return running.job.instant is not None and running.job.boot_sign is not None


def test_the_guest_runs_while_it_is_copied_and_what_it_wrote_is_on_its_volume(house: House) -> None:
    job = house.intake.submit(_plan(house, limits={"bandwidth_bps": MIB}))
    running = _Running(house, job)
    until(lambda: _is_started(running))
    assert running.job.state is State.COPYING_FULL
    (uuid,) = house.hypervisor.domains
    house.hypervisor.guest_writes(uuid, 0, 5000, b"written meanwhile")
    last = running.ended()
    assert last.state is State.COMPLETED, last.last_error
    assert states(last) == [State.QUEUED, State.COPYING_FULL, State.STARTING, State.COMPLETED]
    assert last.instant is not None
    assert last.instant.state == "done"
    assert last.domain is not None
    assert str(house.volume(last)) in last.domain.xml
    assert house.volume(last).read_bytes() == disk_content()[:5000] + b"written meanwhile" + disk_content()[5017:]
    assert house.hypervisor.domains[uuid].running
    assert not (house.folder / "instant" / str(job.id)).exists()


def test_a_guest_that_is_started_again_as_its_layers_become_its_volumes_gets_onto_them_too(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was off, and starts from its layers until they are not in its definition any more."""
    running = _Running(house, house.intake.submit(_plan(house, limits={"bandwidth_bps": MIB})))
    until(lambda: _is_started(running))
    ((uuid, guest),) = house.hypervisor.domains.items()
    define = house.hypervisor.define

    def started(domain: Domain, moved: Sequence[Volume] = ()) -> None:
        if not guest.running:
            house.hypervisor.start(uuid)
            house.hypervisor.guest_writes(uuid, 0, 5000, b"written meanwhile")
        define(domain, moved)

    monkeypatch.setattr(house.hypervisor, "define", started)
    house.hypervisor.power_off(uuid)
    last = running.ended()
    assert (last.state, last.last_error, guest.running) == (State.COMPLETED, None, True)
    assert house.volume(last).read_bytes() == disk_content()[:5000] + b"written meanwhile" + disk_content()[5017:]


def test_the_copy_yields_to_what_the_guest_reads(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the file in which its export notes the reads."""
    activities = []

    class Noted(Yielding):
        def __init__(self, activity: Path, stop: Callable[[], bool]) -> None:
            activities.append(activity)
            super().__init__(activity, stop)

    monkeypatch.setattr("synvirt.jobs.copying_disks.Yielding", Noted)
    running = _Running(house, house.intake.submit(_plan(house)))
    assert running.ended().state is State.COMPLETED
    assert activities == [_exports(house).folder(str(running.id)) / ACTIVITY]


@pytest.mark.parametrize("state", ["preparing", "running", "waiting"])
def test_an_overlay_that_is_there_is_never_laid_again(house: House, state: InstantState) -> None:
    """It has what the guest wrote, and nothing else has: also where the host went down and the guest is off."""
    laid: list[Volume] = []
    job: Any = SimpleNamespace(migration=SimpleNamespace(instant=Instant(state=state)), rooms=house.rooms, manifest=None)
    house.hypervisor.lay = lambda volume, size_bytes: laid.append(volume)  # type: ignore[method-assign]
    asyncio.run(instant._lay(job, [Volume("disk-0", "/d", "file")]))
    assert laid == []


def test_a_copy_that_fails_while_the_guest_runs_is_tried_again_until_a_cancel(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = house.intake.submit(_plan(house, limits={"bandwidth_bps": MIB}))
    source = house.imports / "appliance" / "disk-0.raw"
    (house.imports / "appliance" / "wrong").touch()  # its archive's digest is not what was copied
    check = checksum.check

    def once_the_guest_runs(*arguments: Any) -> None:
        """The digest of 2 MiB may be known before: then the job fails as any other."""
        until(lambda: is_started(house.store.get(job.id).instant))
        check(*arguments)

    monkeypatch.setattr(checksum, "check", once_the_guest_runs)
    running = _Running(house, job)
    until(lambda: running.job.last_error is not None)
    error = running.job.last_error
    assert error is not None
    assert not error.fatal
    assert "The guest is kept" in error.message
    assert running.job.state is State.COPYING_FULL
    with pytest.raises(Conflict, match="loses all that it wrote"):
        house.intake.cancel(job.id)
    assert source.read_bytes() == disk_content()
    house.intake.cancel(job.id, guest_writes="lose")
    assert running.ended().state is State.CANCELLED
    assert house.leftovers() == []


def test_a_source_that_is_changed_while_it_is_copied_is_no_copy(house: House) -> None:
    job = house.intake.submit(_plan(house, limits={"bandwidth_bps": MIB}))
    running = _Running(house, job)
    until(lambda: _is_started(running))
    os.utime(house.imports / "appliance" / "disk-0.raw", (1, 1))
    until(lambda: running.job.last_error is not None or running.job.state is not State.COPYING_FULL)
    error = running.job.last_error
    assert error is not None
    assert "disk disk-0: disk-0.raw was changed" in error.message
    house.intake.cancel(job.id, guest_writes="lose")
    assert running.ended().state is State.CANCELLED


def test_a_guest_that_is_on_its_volumes_holds_no_failure_back(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes is kept there."""
    tries: list[int] = []

    async def refuse(_: Job) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise DiskReadFailed("its receipt cannot be made")

    monkeypatch.setattr(receipts, "give", refuse)
    running = _Running(house, house.intake.submit(_plan(house)))
    assert running.ended().state is State.FAILED
    assert tries == [1]


def test_what_does_not_get_onto_its_volumes_is_tried_again(house: House) -> None:
    house.hypervisor.fail = "pivot"
    running = _Running(house, house.intake.submit(_plan(house)))
    until(lambda: running.job.state is State.STARTING and running.job.last_error is not None)
    assert running.job.instant is not None
    assert running.job.instant.state == "moving"
    house.hypervisor.fail = None
    last = running.ended()
    assert last.state is State.COMPLETED
    assert last.last_error is None, "it is not true any more"


def test_a_guest_without_room_is_said_to_be_until_it_has_some(house: House) -> None:
    running = _Running(house, house.intake.submit(_plan(house, limits={"bandwidth_bps": MIB})))
    until(lambda: _is_started(running))
    (guest,) = house.hypervisor.domains.values()
    house.hypervisor.is_full = guest.held_up = True
    until(lambda: running.job.last_error is not None)
    shown = running.job.last_error
    assert shown is not None
    assert (shown.code, shown.fatal) == ("E_MIG_DISK_WRITE_FAILED", False)
    assert shown.message.endswith("has no room in the file system at /small (0-top.qcow2)")
    assert "free space" in (shown.hint or "")
    house.hypervisor.is_full = False
    until(lambda: running.job.last_error is None)
    assert running.ended().state is State.COMPLETED


def test_the_lack_of_room_is_said_of_a_job_that_runs_cold_too(house: House) -> None:
    """Its first trouble stays as long as the job, and comes back afterwards."""
    running = _Running(house, house.intake.submit(_plan(house, mode="Warm", limits={"bandwidth_bps": MIB})))
    until(lambda: _is_started(running))
    assert running.job.last_error is not None
    assert running.job.last_error.code == "E_MIG_CBT_UNSUPPORTED"
    (guest,) = house.hypervisor.domains.values()
    house.hypervisor.is_full = guest.held_up = True
    until(lambda: running.job.last_error is not None and running.job.last_error.code == "E_MIG_DISK_WRITE_FAILED")
    house.hypervisor.is_full = False
    until(lambda: running.job.last_error is not None and running.job.last_error.code == "E_MIG_CBT_UNSUPPORTED")
    assert running.ended().state is State.COMPLETED


def test_a_paused_guest_is_resumed(house: House) -> None:
    running = _Running(house, house.intake.submit(_plan(house, limits={"bandwidth_bps": MIB})))
    until(lambda: _is_started(running))
    (guest,) = house.hypervisor.domains.values()
    house.hypervisor.source_away = guest.held_up = True
    until(lambda: running.job.instant is not None and running.job.instant.state == "waiting")
    house.hypervisor.source_away = False
    until(lambda: running.job.instant is not None and running.job.instant.state != "waiting")
    assert not guest.held_up
    assert running.ended().state is State.COMPLETED


def test_exports_that_are_gone_are_made_again(house: House) -> None:
    running = _Running(house, house.intake.submit(_plan(house, limits={"bandwidth_bps": MIB})))
    until(lambda: _is_started(running))
    exports = _exports(house)
    exports.failing = DiskReadFailed("the source is away")
    until(lambda: running.job.instant is not None and running.job.instant.state == "waiting")
    exports.failing = None
    served_before = exports.served
    until(lambda: exports.served > served_before)
    assert running.ended().state is State.COMPLETED


def test_an_error_of_an_unexpected_kind_ends_no_job_whose_guest_runs(house: House) -> None:
    running = _Running(house, house.intake.submit(_plan(house, limits={"bandwidth_bps": MIB})))
    until(lambda: _is_started(running))
    exports = _exports(house)
    exports.failing = OSError(24, "Too many open files")
    until(lambda: running.job.instant is not None and running.job.instant.state == "waiting")
    exports.failing = None
    assert running.ended().state is State.COMPLETED


def test_a_source_that_is_away_when_the_service_starts_again_ends_no_job_whose_guest_runs(house: House) -> None:
    """A file system that is mounted late, after a restart of the host: the guest's overlay has all that it wrote."""
    job_id = house.intake.submit(_plan(house, limits={"bandwidth_bps": MIB})).id

    def killed_in_the_middle() -> None:
        if any(guest.running for guest in house.hypervisor.domains.values()) and house.store.watermarks(job_id, 1):
            raise Crash

    house.store.on_commit = killed_in_the_middle
    with pytest.raises(Crash):
        house.run(job_id)
    house.store.close()
    (uuid,) = house.hypervisor.domains
    house.hypervisor.guest_writes(uuid, 0, 5000, b"written meanwhile")
    again = House(house.folder, hypervisor=house.hypervisor, workers=in_process)
    place = house.imports / "appliance" / "disk-0.raw"
    place.rename(house.folder / "elsewhere")
    running = _Running(again, again.store.get(job_id))
    until(lambda: running.job.last_error is not None)
    assert running.job.state is State.COPYING_FULL
    assert not place.exists()
    assert house.hypervisor.domains[uuid].running
    (house.folder / "elsewhere").rename(place)
    last = running.ended()
    assert (last.state, last.last_error) == (State.COMPLETED, None)
    assert again.volume(last).read_bytes() == disk_content()[:5000] + b"written meanwhile" + disk_content()[5017:]
    again.close()


def test_a_volume_that_is_away_before_the_move_ends_no_job_whose_guest_runs(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = house.intake.submit(_plan(house))
    device, failures = house.destination.device, iter(range(3))

    def away(name: str) -> str:
        if house.store.get(job.id).state is State.STARTING and next(failures, None) is not None:
            raise DiskWriteFailed("the pool is suspended")
        return device(name)

    monkeypatch.setattr(house.destination, "device", away)
    last = _Running(house, job).ended()
    assert (last.state, last.last_error) == (State.COMPLETED, None)
    assert next(failures, None) is None


def test_an_export_that_does_not_end_at_once_ends_no_guest(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source hangs, and it cannot be killed: the guest runs from its volumes by then."""
    end, failures = _exports(house).end, iter(range(3))

    def hangs(name: str) -> None:
        if next(failures, None) is not None:
            raise Internal("the process 1 that serves the guest's disks does not end")
        end(name)

    monkeypatch.setattr(_exports(house), "end", hangs)
    job = _Running(house, house.intake.submit(_plan(house))).ended()
    assert job.state is State.COMPLETED
    (guest,) = house.hypervisor.domains.values()
    assert guest.running
    assert not (house.folder / "instant" / str(job.id)).exists()


def test_before_its_guest_was_started_a_job_fails_as_any_other(house: House) -> None:
    _exports(house).failing = DiskReadFailed("no such disk")
    job = house.run(house.intake.submit(_plan(house)).id)
    assert job.state is State.FAILED
    assert job.last_error is not None
    assert job.last_error.code == "E_MIG_DISK_READ_FAILED"
    assert house.leftovers() == []


@pytest.mark.parametrize("fail", ["define", "start"])
def test_a_guest_that_cannot_be_started_leaves_nothing(tmp_path: Path, fail: str) -> None:
    house = House(tmp_path / "house", workers=in_process, hypervisor=FakeHypervisor(fail=fail))
    job = house.run(house.intake.submit(_plan(house)).id)
    assert job.state is State.FAILED
    assert house.leftovers() == []
    house.close()


def test_a_guest_that_was_shut_down_meanwhile_is_not_started_again(house: House) -> None:
    running = _Running(house, house.intake.submit(_plan(house, limits={"bandwidth_bps": MIB})))
    until(lambda: _is_started(running))
    (uuid,) = house.hypervisor.domains
    house.hypervisor.power_off(uuid)
    assert running.ended().state is State.COMPLETED
    assert not house.hypervisor.domains[uuid].running


@pytest.mark.parametrize("is_instant", [True, False])
def test_whatever_a_job_makes_is_in_its_ledger_before_it_is_made(
    house: House, monkeypatch: pytest.MonkeyPatch, is_instant: bool
) -> None:
    """A service that dies in between leaves a thing that nobody knows."""
    job = house.intake.submit(_plan(house, instant=is_instant))
    made: list[str] = []
    makers = (
        (house.destination, "create", "volume"),
        (house.hypervisor, "define", "domain"),
        (_exports(house), "serve", "export"),
    )

    def noted(really: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def make(*arguments: Any, **named: Any) -> Any:
            assert kind in {entry.kind for entry in house.store.ledger(job.id)}, kind
            made.append(kind)
            return really(*arguments, **named)

        return make

    for of, name, kind in makers:
        monkeypatch.setattr(of, name, noted(getattr(of, name), kind))
    ended = house.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert {"volume", "domain"} | ({"export"} if is_instant else set()) == set(made)


@pytest.mark.parametrize(("asked", "retry_of", "applies"), [(True, None, True), (False, None, False), (True, "a job", False)])
def test_a_retry_starts_its_guest_from_the_copy_that_it_took_over(asked: bool, retry_of: str | None, applies: bool) -> None:
    """What its guest wrote over the source would else be all that is kept of it."""
    job: Any = SimpleNamespace(plan=SimpleNamespace(instant=asked), retry_of=retry_of)
    assert instant.applies(job) is applies


# ── refused ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": {"start": False}}, "starts nothing"),
        ({"conversion": "always"}, "drivers"),
        ({"on_host_lost": "restart_elsewhere"}, "would lose"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_at_the_field(house: House, fields: dict[str, Any], message: str) -> None:
    plan = _plan(house, **fields)
    with pytest.raises(InvalidPlan, match=message):
        check_plan(house.rooms, plan)
    assert [problem.field for problem in dry_run(house.rooms, plan).problems] == ["instant"]


def test_a_windows_guest_without_drivers_is_refused(tmp_path: Path) -> None:
    house = House(tmp_path / "house", family="windows")
    assert [problem.field for problem in dry_run(house.rooms, _plan(house)).problems] == ["instant"]
    assert dry_run(house.rooms, _plan(house, conversion="never")).problems == ()
    house.close()


def test_what_can_be_is_not_refused(house: House) -> None:
    assert dry_run(house.rooms, _plan(house)).problems == ()


def test_live_plans_are_refused(house: House) -> None:
    with pytest.raises(InvalidPlan, match="offline imports"):
        instant.refuse_plan(house.rooms, live_plan("Cold", instant=True), converts=False)


RAW = RawSpec(path="/imports/x")


def _elsewhere(url: str) -> RawSpec:
    return RawSpec(path="x", remote=Remote(url=url))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RAW, None),
        (ImageSpec(format="vmdk", over=RAW, parent=ImageSpec(format="vmdk", over=RAW)), None),
        (XvaSpec(over=RAW, folder="Ref:1", size_bytes=MIB), None),
        (BlankSpec(size_bytes=MIB), None),
        (_elsewhere("https://files.example/x.ova"), None),
        (_elsewhere("smb://files.example/share/x.ova"), "another program"),
        (AllocatedSpec(over=_elsewhere("smb://files.example/share/x"), areas=()), "another program"),
        (ChangedSpec(over=_elsewhere("smb://files.example/share/x"), areas=()), "another program"),
        (JoinedSpec(parts=(RAW, _elsewhere("smb://files.example/share/x"))), "another program"),
        (ImageSpec(format="vhd", over=RAW, parent=_elsewhere("smb://files.example/share/x")), "another program"),
        (ImageSpec(format="vmdk", over=GzipSpec(over=RAW, size_max_bytes=MIB)), "compressed"),
        (XvaSpec(over=RAW, folder="Ref:1", size_bytes=MIB, packing="gzip"), "compressed"),
        (QemuSpec(driver="luks", path="/imports/x"), "another program"),
    ],
)
def test_a_disk_that_comes_as_a_stream_is_refused(spec: ReaderSpec, message: str | None) -> None:
    if message is None:
        instant.refuse_readers([spec])
        return
    with pytest.raises(InvalidPlan, match=message):
        instant.refuse_readers([spec])
