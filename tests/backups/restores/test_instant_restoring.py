"""Restores whose guest starts at once, on a hypervisor in memory: what goes wrong while it runs loses nothing.

Kills and cancels at each moment are in tests/kinds; a real guest in tests/real/backups/test_instant_restore.py."""

import tempfile
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from synvirt.backups import runs, trouble, working
from synvirt.backups.model import BackupRun, RestoreRequest, Status
from synvirt.backups.restores import new_domain
from synvirt.backups.working import Copying
from synvirt.destinations.directory import DirectoryDestination
from synvirt.disks.nbd.reader import NbdReader
from synvirt.disks.specs import WriterSpec
from synvirt.errors import BackupBadRequest, BackupConflict, Cancelled, DiskReadFailed, PersistFailed
from synvirt.hypervisor import Volume
from synvirt.jobs.exports import ProcessExports, holder
from synvirt.model.job import Domain
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.repository import Repository
from synvirt.sizes import KIB, MIB
from synvirt.store import Store
from tests.backups.restores.place import Place, disk_content
from tests.contracts.readers import read_all
from tests.fakes.backups import backups_of, ended
from tests.fakes.restoring import restore_host_of
from tests.running.processes import until

# Slow enough that there is a middle, and so slow that it does not end.
SLOWLY, FOR_SECONDS, FOR_LONG = MIB, 256 * KIB, 64 * KIB


@pytest.mark.parametrize("instant_", [False, True])
def test_a_restore_waits_for_a_destination_that_is_away(
    place: Place, monkeypatch: pytest.MonkeyPatch, *, instant_: bool
) -> None:
    monkeypatch.setattr(trouble, "AWAY_PAUSES_S", (0.05,))
    (destination,) = place.restore_host.destinations.values()
    assert isinstance(destination, DirectoryDestination)
    away = [True]
    monkeypatch.setattr(destination, "why_away", lambda: "nothing is mounted" if away[0] else None)
    restored = place.restore(instant=instant_)
    until(lambda: restored.run.error is not None)
    assert restored.run.error is not None
    assert restored.run.error.code == "E_BAK_DISK_WRITE_FAILED"
    assert "nothing is mounted" in restored.run.error.message
    assert restored.run.finished_at is None
    assert not list((place.folder / "volumes").rglob("*"))
    away.clear()
    away.append(False)
    run = ended(place.backups, restored.id)
    assert (run.status, run.error) == (Status.COMPLETED, None)
    (volume,) = (place.folder / "volumes").rglob("*.raw")
    assert volume.read_bytes() == disk_content()


# One that cannot start at once is copied first.
@pytest.mark.parametrize(("moment", "instant_"), [("define", False), ("define", True), ("start", False)])
def test_a_restore_waits_for_a_libvirtd_that_restarts(
    place: Place, monkeypatch: pytest.MonkeyPatch, moment: str, *, instant_: bool
) -> None:
    monkeypatch.setattr(trouble, "AWAY_PAUSES_S", (0.05,))
    step = getattr(place.hypervisor, moment)

    def goes(*arguments: Any) -> None:
        monkeypatch.setattr(place.hypervisor, moment, step)
        place.hypervisor.away = 3
        step(*arguments)

    monkeypatch.setattr(place.hypervisor, moment, goes)
    restored = place.restore(instant=instant_)
    run = ended(place.backups, restored.id)
    assert (run.status, run.error, run.warnings) == (Status.COMPLETED, None, ())
    assert place.hypervisor.away == 0
    assert restored.guest.running
    (volume,) = (place.folder / "volumes").rglob("*.raw")
    assert volume.read_bytes() == disk_content()


@pytest.mark.parametrize("instant_", [False, True])
def test_a_restore_waits_for_a_destination_that_goes_while_it_is_written(
    place: Place, monkeypatch: pytest.MonkeyPatch, *, instant_: bool
) -> None:
    """Its worker only sees that the volume is not there, or an input/output error."""
    monkeypatch.setattr(trouble, "AWAY_PAUSES_S", (0.05,))
    monkeypatch.setattr(trouble, "AGAIN_S", (0.05,))
    (destination,) = place.restore_host.destinations.values()
    assert isinstance(destination, DirectoryDestination)
    volumes, elsewhere, opens, opened = place.folder / "volumes", place.folder / "elsewhere", destination.open, []
    monkeypatch.setattr(destination, "why_away", lambda: None if volumes.exists() else "nothing is mounted")

    def goes(name: str, size_bytes: int) -> WriterSpec:
        opened.append(opens(name, size_bytes))
        if len(opened) == 1:
            volumes.rename(elsewhere)
        return opened[-1]

    monkeypatch.setattr(destination, "open", goes)
    restored = place.restore(instant=instant_)
    until(lambda: restored.run.error is not None)
    assert restored.run.error is not None
    assert "nothing is mounted" in restored.run.error.message
    assert restored.run.finished_at is None
    elsewhere.rename(volumes)
    run = ended(place.backups, restored.id)
    assert (run.status, run.error) == (Status.COMPLETED, None)
    (volume,) = volumes.rglob("*.raw")
    assert volume.read_bytes() == disk_content()


def test_a_restore_that_waits_for_its_destination_can_be_cancelled(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (destination,) = place.restore_host.destinations.values()
    monkeypatch.setattr(destination, "why_away", lambda: "nothing is mounted")
    restored = place.restore(instant=False)
    until(lambda: restored.run.error is not None)
    place.backups.runs.cancel(restored.id)
    assert ended(place.backups, restored.id).status is Status.CANCELLED
    assert place.left() == []


def test_the_guest_runs_while_it_is_copied_and_what_it_wrote_is_on_its_volume(place: Place) -> None:
    restored = place.restore(SLOWLY)
    restored.runs()
    assert "top.qcow2" in restored.guest.domain.xml
    assert restored.run.domain is not None
    run = restored.completed(restored.writes())
    assert restored.guest.running
    assert run.progress.bytes_done == run.progress.bytes_total == len(disk_content())


def test_a_guest_that_is_started_again_as_its_layers_become_its_volumes_gets_onto_them_too(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was off, and starts from its layers until they are not in its definition any more."""
    restored, define, expected = place.restore(SLOWLY), place.hypervisor.define, list[bytes]()
    restored.runs()

    def started(domain: Domain, moved: Sequence[Volume] = ()) -> None:
        if "top.qcow2" not in domain.xml and not expected:
            place.hypervisor.start(restored.id)
            expected.append(restored.writes())
        define(domain, moved)

    monkeypatch.setattr(place.hypervisor, "define", started)
    place.hypervisor.power_off(restored.id)
    until(lambda: expected)
    restored.completed(expected[0])
    assert restored.guest.running


@pytest.mark.parametrize(
    "fields", [{}, {"start": False, "instant": False}, {"target": "export", "start": False, "instant": False}]
)
def test_only_the_worker_reads_lists_of_chunks(place: Place, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    read, readers = Repository.read_page, set[str]()

    def noted(self: Repository, name: bytes) -> bytes:
        readers.add(threading.current_thread().name.partition("_")[0])
        return read(self, name)

    monkeypatch.setattr(Repository, "read_page", noted)
    assert ended(place.backups, place.restore(**fields).id).status is Status.COMPLETED
    assert readers == {"worker"}


@pytest.mark.parametrize("instantly", [False, True])
def test_a_restore_needs_room_for_what_is_not_zero_and_for_no_more(
    place: Place, monkeypatch: pytest.MonkeyPatch, instantly: bool
) -> None:
    place.guests.image("web", disk_content() + bytes(4 * CHUNK_BYTES))
    (place.point,) = ended(place.backups, place.backups.run_job(place.job).id).restore_point_ids
    destination = place.restore_host.destinations["here"]
    for free, status in ((len(disk_content()) - 1, Status.FAILED), (len(disk_content()), Status.COMPLETED)):
        monkeypatch.setattr(destination, "free_bytes", partial(int, free))
        run = ended(place.backups, place.restore(instant=instantly, start=instantly, name=f"again-{free}").id)
        assert run.status is status
        if run.error is not None:
            assert f"have {len(disk_content())} bytes that are not zeros" in run.error.message
            assert place.left() == []


def test_a_point_is_served_and_copied_by_processes_that_see_no_more_than_they_need(place: Place) -> None:
    with tempfile.TemporaryDirectory(prefix="sv-") as root:
        place.processes = ProcessExports(lambda: Path(root) / "instant")
        place.restart()
        restored = place.restore(512 * KIB)
        restored.runs()
        expected = restored.writes()
        socket = place.processes.folder(str(restored.id)) / "0"
        with closing(NbdReader(f"nbd+unix:///?socket={socket}")) as reader:
            assert read_all(reader) == disk_content()
        process = holder(socket.parent)
        place.restart()
        assert holder(socket.parent) == process, "it outlives the service"
        restored.completed(expected)
        assert not socket.parent.exists()


def test_a_copy_that_fails_is_said_and_ends_nothing(place: Place) -> None:
    place.damage()
    restored = place.restore()
    until(lambda: restored.run.error is not None)
    error = restored.run.error
    assert error is not None
    assert error.code == "E_BAK_DAMAGED"
    assert "The guest is kept" in error.message
    assert restored.run.finished_at is None
    restored.cancelled()


def test_what_does_not_get_onto_its_volumes_is_tried_again(place: Place) -> None:
    place.hypervisor.fail = "pivot"
    restored = place.restore()
    until(lambda: restored.run.error is not None)
    assert restored.state == "moving"
    expected = restored.writes()
    place.hypervisor.fail = None
    restored.completed(expected)


def test_a_store_that_is_away_for_a_moment_loses_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    restored = place.restore(SLOWLY)
    restored.runs()
    expected = restored.writes()
    with monkeypatch.context() as patched:
        calls = []

        def away(*_: object, **__: object) -> None:
            calls.append(1)
            raise PersistFailed("the disk is full")

        patched.setattr(type(place.store.backups), "put_all", away)
        patched.setattr(type(place.store.backups), "put", away)
        until(lambda: len(calls) > 5)
    restored.completed(expected)


def test_a_worker_that_somebody_else_stops_is_no_cancel(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        tried = []

        def stopped(*_: object, **__: object) -> None:
            tried.append(1)
            raise Cancelled

        patched.setattr(Copying, "copy", stopped)
        restored = place.restore()
        until(lambda: len(tried) > 2)
        expected = restored.writes()
    restored.completed(expected)


def test_a_guest_without_room_is_said_to_be_until_it_has_some(place: Place) -> None:
    restored = place.restore(SLOWLY)
    restored.runs()
    place.hypervisor.is_full = restored.guest.held_up = True
    until(lambda: restored.run.error is not None)
    shown = restored.run.error
    assert shown is not None
    assert (shown.code, "has no room" in shown.message) == ("E_BAK_DISK_WRITE_FAILED", True)
    place.hypervisor.is_full = False
    until(lambda: restored.run.error is None)
    restored.completed(disk_content())


def test_a_paused_guest_is_resumed(place: Place) -> None:
    restored = place.restore(SLOWLY)
    restored.runs()
    place.hypervisor.source_away = restored.guest.held_up = True
    until(lambda: restored.state == "waiting")
    place.hypervisor.source_away = False
    until(lambda: restored.state != "waiting")
    assert not restored.guest.held_up
    restored.completed(disk_content())


def test_exports_that_are_gone_are_made_again(place: Place) -> None:
    restored = place.restore(SLOWLY)
    restored.runs()
    place.exports.failing = DiskReadFailed("the repository is away")
    until(lambda: restored.state == "waiting")
    place.exports.failing, served_before = None, place.exports.served
    until(lambda: place.exports.served > served_before)
    restored.completed(disk_content())


def test_before_its_guest_was_started_a_run_fails_as_any_other(place: Place) -> None:
    place.exports.failing = DiskReadFailed("no such disk")
    run = ended(place.backups, place.restore().id)
    assert (run.status, run.instant) == (Status.FAILED, None)
    assert place.left() == []


def test_a_domain_that_is_refused_leaves_nothing(place: Place) -> None:
    place.hypervisor.fail = "define"
    run = ended(place.backups, place.restore().id)
    assert run.error is not None
    assert (run.status, run.error.code) == (Status.FAILED, "E_BAK_HOST_LACKS")
    assert place.left() == []


def test_a_guest_that_does_not_start_is_copied_first(place: Place) -> None:
    place.hypervisor.fail = "start"
    restored = place.restore(SLOWLY)
    until(lambda: restored.run.progress.bytes_done > 0)
    assert restored.run.instant is not None
    assert restored.run.instant.started_at is None, "nothing can be lost"
    place.hypervisor.fail = None
    run = restored.completed(disk_content())
    assert [one.code for one in run.warnings if "start" in one.message] == ["E_BAK_START_FAILED"]
    assert restored.guest.running


def test_a_guest_that_was_shut_down_meanwhile_is_not_started_again(place: Place) -> None:
    restored = place.restore(SLOWLY)
    restored.runs()
    expected = restored.writes()
    place.hypervisor.power_off(restored.id)
    restored.completed(expected)
    assert not restored.guest.running


# ── the next service ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_next_service_goes_on_however_often_it_ends(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RESUMED_MAX", 1)
    restored = place.restore(512 * KIB)
    restored.runs()
    expected = restored.writes()
    for _ in range(3):
        place.restart()
        assert restored.guest.running
    assert restored.run.resumed_count == 3
    restored.completed(expected)


def test_a_run_that_cannot_go_on_waits_and_a_cancel_that_is_meant_ends_it(place: Place) -> None:
    restored = place.restore(FOR_LONG)
    restored.runs()
    place.backups.points.forget(place.point)  # as if somebody had removed it elsewhere
    place.restart()
    until(lambda: restored.run.error is not None)
    assert (restored.guest.running, restored.run.finished_at) == (True, None)
    restored.cancelled()


def test_a_repository_that_is_away_is_waited_for(place: Place) -> None:
    restored = place.restore(FOR_SECONDS)
    restored.runs()
    expected = restored.writes()
    place.close()
    (place.folder / "repository").rename(place.folder / "away")
    place.begin()
    until(lambda: restored.run.error is not None)
    assert restored.guest.running
    (place.folder / "away").rename(place.folder / "repository")
    restored.completed(expected)


def test_a_guest_that_runs_waits_for_no_turn(place: Place) -> None:
    """Else nobody looked after it until others have ended."""
    all_ = [place.restore(FOR_LONG, name=f"again-{number}") for number in range(2)]
    for restored in all_:
        restored.runs()
    waiting = place.backups.restore(place.point, RestoreRequest(target="export", bandwidth_bps=FOR_LONG))
    place.restart()
    for restored in all_:
        until(lambda: restored.run.status is Status.TRANSFERRING)  # noqa: B023
    place.backups.runs.cancel(waiting.id)
    for restored in all_:
        place.backups.runs.cancel(restored.id, guest_writes="lose")
        ended(place.backups, restored.id)
    assert [one for one in place.left() if "exports" not in one] == []


def test_a_run_that_is_half_undone_does_not_go_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    restored = place.restore(FOR_LONG)
    restored.runs()
    with monkeypatch.context() as patched:
        patched.setattr(DirectoryDestination, "destroy", lambda *_: (_ for _ in ()).throw(OSError("the kill")))
        saved = runs.Runs._save

        def killed(self: runs.Runs, run: BackupRun, **more: Any) -> None:
            if run.finished_at is not None:
                raise PersistFailed("the kill")
            saved(self, run, **more)

        patched.setattr(runs.Runs, "_save", killed)
        place.backups.runs.cancel(restored.id, guest_writes="lose")
        until(lambda: restored.id not in place.hypervisor.domains)
        place.close()
    place.begin()
    assert ended(place.backups, restored.id).status is Status.CANCELLED
    assert place.left() == []


def test_its_volumes_stay_where_they_are_though_the_default_is_another_now(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored = place.restore(FOR_SECONDS)
    restored.runs()
    expected = restored.writes()
    place.close()
    place.store = Store(f"sqlite:///{place.folder / 'test.db'}")
    restore_host = restore_host_of(place.folder, place.hypervisor, exports=place.exports)
    (place.folder / "elsewhere").mkdir()
    destinations = {"other": DirectoryDestination(place.folder / "elsewhere"), **restore_host.destinations}
    place.backups = backups_of(
        place.store, place.guests, place.folder, restore_host=replace(restore_host, destinations=destinations)
    )
    place.backups.start()
    restored.completed(expected)
    assert not list((place.folder / "elsewhere").rglob("*"))


# ── what stays, and what is refused ──────────────────────────────────────────────────────────────────────────────────


def test_a_point_that_is_restored_stays(place: Place) -> None:
    restored = place.restore(FOR_LONG)
    restored.runs()
    with pytest.raises(BackupConflict, match="is being restored"):
        place.backups.remove_point(place.point)
    with pytest.raises(BackupConflict, match="uses this repository"):
        place.backups.change_key(place.repository)
    (fate,) = place.backups.retiring.planned(place.backups.job(place.job))
    assert fate.kept_by == ("all", "protected")
    restored.cancelled()
    place.backups.remove_point(place.point)


class OnCeph(DirectoryDestination):
    device_type = "rbd"


@pytest.mark.parametrize("fields", [{"start": False}, {"target": "export", "start": False}, {"target": "in_place"}])
def test_what_cannot_be_is_refused_at_the_field(place: Place, fields: dict[str, Any]) -> None:
    request = {"target": "new_domain", "start": True, "instant": True} | fields
    with pytest.raises(BackupBadRequest, match=r"^instant"):
        place.backups.restore(place.point, RestoreRequest.model_validate(request))


def test_no_guest_gets_onto_ceph_while_it_runs(place: Place) -> None:
    on_ceph = restore_host_of(place.folder, place.hypervisor, destination=OnCeph(place.folder / "volumes"))
    place.backups._restoring.restore_host = on_ceph
    with pytest.raises(BackupBadRequest, match=r"^instant: .* kind rbd") as refused:
        place.restore()
    assert "zfs or directory" in str(refused.value.hint)


@pytest.mark.parametrize("instantly", [False, True])
def test_a_volume_that_is_removed_while_the_service_is_down_is_copied_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, instantly: bool
) -> None:
    """A new one is empty: what was copied before the watermark would be zeros."""
    monkeypatch.setattr(working, "FLUSH_EVERY_S", 0.1)
    restored = place.restore(SLOWLY, instant=instantly, start=instantly)
    marks = working.Watermarks(place.backups.runs._memory)
    until(lambda: any(mark.offset_bytes for mark in marks.of(restored.id).values()))
    place.close()
    (volume,) = (place.folder / "volumes").rglob("*.raw")
    volume.unlink()
    place.begin()
    run = ended(place.backups, restored.id)
    assert run.status == "completed"
    assert volume.read_bytes() == disk_content()


def test_a_definition_that_was_accepted_is_not_tried_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the service killed while it tries one, the next would take that for the restored guest, which has no TPM yet."""
    copied, put_tpm = threading.Event(), new_domain.put_tpm

    def ends(*_: object) -> None:
        copied.set()
        until(lambda: place.backups.runs._closing)
        raise Cancelled

    monkeypatch.setattr(new_domain, "put_tpm", ends)
    restored = place.restore(instant=False)
    assert copied.wait(60)
    place.close()
    monkeypatch.setattr(new_domain, "put_tpm", put_tpm)
    monkeypatch.setattr(place.hypervisor, "undefine", pytest.fail)
    place.begin()
    assert ended(place.backups, restored.id).status is Status.COMPLETED
    assert restored.guest.running
