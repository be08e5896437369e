"""A guest that is started between the kill of its restore in place and the next start. Kills at each moment: tests/kinds."""

import errno
import json
import os
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from synvirt.backups.model import RestoreRequest, Status
from synvirt.backups.restores import in_place, present
from synvirt.backups.working import Copying
from synvirt.destinations.zfs_command import _refused
from synvirt.errors import DomainDefineFailed
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.jobs.ledger import Ledger, Sweep
from synvirt.programs import ProgramFailed
from synvirt.store.ledger import LedgerEntry
from tests.devices import loop_device
from tests.fakes.restoring import as_a_volume
from tests.house import Crash
from tests.kinds.laws import Death, Place
from tests.kinds.restores import NOW, THEN, InPlace
from tests.real.backups.restores import Room

MEANWHILE = Random(7).randbytes(len(NOW))


ON_DEVICE = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>
<disk type='block'><driver name='qemu' type='raw'/><source dev='{device}'/><target dev='vda'/></disk></devices></domain>"""


class OneDisk(InPlace):
    def submit(self) -> UUID:
        return self.room.backups.restore(self.point.id, RestoreRequest(target="in_place", disks=("vda",))).id


def killed(place: Place, monkeypatch: pytest.MonkeyPatch, kind: type[InPlace] = InPlace) -> UUID:
    """When the ledger had turned, and before any disk was taken."""
    world = kind(place)
    world.prepare()
    death = Death(world.store)
    with monkeypatch.context() as patched:
        patched.setattr(in_place, "_swap", lambda swap: death.happens())
        patched.setattr("threading.excepthook", lambda raised: None)
        job_id = world.submit()
        with pytest.raises(Crash):
            world.run(job_id)
        world.die()
    world.close()
    return job_id


def written_to(place: Place) -> None:
    """By its guest, which was started."""
    (place.folder / "images/first.raw").write_bytes(MEANWHILE)


def check(world: InPlace, job_id: UUID) -> None:
    images = world.room.folder / "images"
    assert world.ended(job_id).status is Status.FAILED, "not all of it is as it was"
    assert (images / "first.raw").read_bytes() == MEANWHILE
    assert {one.name for one in images.iterdir()} == {"first.raw", "second.qcow2"}
    assert world.store.ledgers.owned("run", host="local") == []


@pytest.fixture
def place(tmp_path: Path, host: LibvirtHost, data_dir: Path) -> Place:
    return Place(tmp_path, host=host, data_dir=data_dir)


def test_what_a_guest_wrote_between_a_kill_and_the_next_start_is_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = killed(place, monkeypatch)
    written_to(place)
    world = InPlace(place)
    check(world, job_id)
    world.close()


def test_the_restore_has_failed_though_the_next_service_is_killed_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was staged may be gone by then, as if its disk had been taken."""
    job_id = killed(place, monkeypatch)
    written_to(place)
    striking = Ledger.sweep_all

    def killed_again(self: Ledger, *, but: frozenset[UUID] = frozenset()) -> None:
        for name in ("strike", "replace"):
            patched.setattr(type(self._rows), name, crash)
        striking(self, but=but)

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "sweep_all", killed_again)
        with pytest.raises(Crash):
            InPlace(place)
    place.outside["room"].backups.close()
    world = InPlace(place)
    check(world, job_id)
    world.close()


def crash(*_: object, **__: object) -> None:
    raise Crash


def test_a_restore_of_which_a_part_cannot_be_removed_is_not_begun_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk is in its place: what would be put there again is empty, as it is known to be copied."""
    job_id = killed(place, monkeypatch, OneDisk)
    images = place.folder / "images"
    in_the_way = images / f".synvirt-{job_id}-0.before"
    in_the_way.mkdir()
    world = InPlace(place)
    assert world.ended(job_id).status is Status.FAILED
    assert (images / "first.raw").read_bytes() == THEN
    world.close()
    in_the_way.rmdir()
    world = InPlace(place)
    assert (images / "first.raw").read_bytes() == THEN
    assert {one.name for one in images.iterdir()} == {"first.raw", "second.qcow2"}
    assert world.store.ledgers.owned("run", host="local") == []
    world.close()


def test_disks_are_restored_in_place_on_a_file_system_without_hard_links(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    world = InPlace(place)
    world.prepare()
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", link)
        job_id = world.submit()
        assert world.run(job_id) == "Completed"
    world.check(job_id)
    world.close()


@pytest.mark.parametrize(("of", "moment"), [(Copying, "copy"), (Ledger, "replace")])
def test_a_volume_is_not_rolled_back_under_a_guest_that_was_started(
    place: Place, monkeypatch: pytest.MonkeyPatch, of: type[Any], moment: str
) -> None:
    """What it held before is in a snapshot, for a person to decide."""
    commands: list[str] = []
    as_a_volume(monkeypatch, lambda *arguments: commands.append(arguments[0]))
    room = Room(place.host, place.data_dir or place.folder, place.folder)
    disk = room.folder / "images/disk"
    disk.write_bytes(THEN)
    backing = room.folder / "images/backing"
    backing.write_bytes(NOW)
    with loop_device(backing) as device:
        uuid = uuid4()
        definition = ON_DEVICE.format(name=f"on-{uuid}", uuid=uuid, device=device)
        room.connection.use().defineXML(definition)
        point = room.point(definition, {"vda": disk}, vm_id=uuid)
        began: list[int] = []
        really = getattr(of, moment)

        def started(*arguments: Any) -> None:
            if commands:  # there is something to roll back
                began.append(1)
            really(*arguments)

        monkeypatch.setattr(of, moment, started)
        monkeypatch.setattr(present, "runs", lambda domain: bool(began))
        run = room.restored(point, target="in_place")
    assert (run.status, run.error and run.error.code) == ("failed", "E_BAK_SOURCE_RUNNING")
    assert commands == ["snapshot"]
    assert [f"tank/volume@synvirt-restore-{run.id} has what" in warning.message for warning in run.warnings] == [True]
    assert room.store.ledgers.owned("run", host="local") == []
    room.close()


def test_the_snapshot_of_a_volume_stays_where_the_files_of_its_restore_did_not_get_their_places(tmp_path: Path) -> None:
    """The guest was started before the next service: the volume is as in the point, and the files are as they were."""
    new, path = tmp_path / "new", tmp_path / "old"
    for one in (new, path):
        one.write_bytes(THEN)
    swap = LedgerEntry("swap", json.dumps([str(new), str(path), [], "x"]))
    dropped, turned = LedgerEntry("dropped", "tank/volume@ours"), LedgerEntry(in_place.CHECKPOINTS, "x")
    left: list[LedgerEntry] = []
    ledger: Any = SimpleNamespace(of=lambda _: [dropped, swap, turned], replace=lambda _, entries: left.extend(entries))
    host: Any = SimpleNamespace(domain=lambda *_: None)
    assert in_place.gone_forward(host, ledger, uuid4()) is None
    stays = LedgerEntry(in_place.KEPT, json.dumps(["tank/volume@ours", "x"]))
    assert left == [LedgerEntry(in_place.OVERTAKEN, "x"), stays, swap, turned]
    sweep, gone = Sweep([dropped, swap, turned], in_place.ORDER), []
    for entry in sweep:
        if entry.kind == "swap":
            sweep.stays(entry)
        else:
            gone.append(entry)
    assert gone == [], "else the guest may still be started, and what its volume held is gone"


@pytest.mark.parametrize("is_newer", [True, False])
def test_a_volume_with_newer_snapshots_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, is_newer: bool) -> None:
    """They are not ours; and once they have gone, the guest may have run for weeks."""
    commands: list[tuple[str, ...]] = []

    def zfs(*arguments: str) -> None:
        commands.append(arguments)
        if is_newer and arguments[0] == "rollback":
            raise _refused(
                ProgramFailed("zfs", 1, f"cannot rollback to '{arguments[1]}': more recent snapshots or bookmarks exist")
            )

    monkeypatch.setattr(in_place, "Zfs", lambda: zfs)
    host: Any = SimpleNamespace(domain=lambda *_: None)
    for name in ('["tank/volume@ours", "x"]', "tank/volume@ours"):  # the latter by an earlier version
        in_place.undo(host, {})["snapshot"](uuid4(), name)
    assert commands == [(word, "tank/volume@ours") for word in (("rollback",) if is_newer else ("rollback", "destroy"))] * 2


def test_a_daemon_that_is_restarted_ends_no_copy_onto_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    copying: Any = SimpleNamespace(under_way=SimpleNamespace(stop=lambda: False, run=SimpleNamespace(id=uuid4())))
    found: list[Any] = [SimpleNamespace(UUIDString=lambda: "x")]

    def look_up() -> Any:
        if found[0] is None:
            raise DomainDefineFailed("the hypervisor cannot be opened")
        return found[0]

    monkeypatch.setattr(present, "runs", lambda domain: domain == "running")
    restored = in_place._Restored(cast("Any", None), cast("Any", None), copying, look_up, resumed=False)
    for state, stops in ((found[0], False), (None, False), ("running", True)):
        found[0] = state
        assert restored._stop() is stops
