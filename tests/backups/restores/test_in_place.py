"""Restores in place of a guest in memory, which is started at any moment. Kills at each moment, on libvirt: tests/kinds."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from defusedxml import ElementTree

from synvirt.backups.model import RestoreRequest, Status
from synvirt.backups.restores import in_place, present
from synvirt.backups.restores.domain import Place
from synvirt.backups.restores.in_place import OVERTAKEN, Swap, _mark, _Restored, gone_forward
from synvirt.backups.working import Copying
from synvirt.destinations.zfs_command import ZfsRefused, _refused
from synvirt.errors import BackupConflict, Cancelled, DiskWriteFailed, PersistFailed, SourceRunning, SourceUnsupported
from synvirt.jobs.ledger import Ledger
from synvirt.jobs.orders import DiskOrder
from synvirt.kvm.connection import load
from synvirt.programs import ProgramFailed
from synvirt.repository.specs import FolderSpec, PointSpec, RepositorySpec
from synvirt.store import Store
from synvirt.store.ledger import LedgerEntry
from tests.backups.restores.one_guest import NOW, THEN, Guest, OneGuest
from tests.fakes.restoring import XML
from tests.kinds.runs import rows_left
from tests.needs import need_libvirt
from tests.running.processes import until

MEANWHILE = b"meanwhile" * 1000


@pytest.fixture
def house(tmp_path: Path) -> Iterator[OneGuest]:
    need_libvirt()
    with closing(OneGuest(tmp_path)) as made:
        yield made


@pytest.mark.parametrize("looks", [1, 1000], ids=["and is off again at once", "and runs on"])
def test_a_guest_that_is_started_at_any_moment_has_its_own_disk_and_the_restore_has_failed(house: OneGuest, looks: int) -> None:
    """It has opened its file, and may have written to it: that file has its name, and nothing of the restore is left, nor of
    the definition that it was to have."""
    now = house.guest.xml.replace("64</memory>", "96</memory>")
    for moment in count(1):
        house.image("web", NOW)
        house.guest.xml = now
        before, house.guest.looks, house.guest.runs_at = house.disk.stat().st_ino, 0, range(moment, moment + looks)
        run = house.restored()
        left = [one.name for one in (house.folder / "images").iterdir()] + rows_left(house.store)
        assert left == ["web"]
        if house.guest.looks < moment:
            assert run is not None
            assert (run.status, house.disk.read_bytes() == THEN) == (Status.COMPLETED, True)
            break
        assert run is None or (run.status, run.error and run.error.code) == (Status.FAILED, "E_BAK_SOURCE_RUNNING"), moment
        assert (house.disk.stat().st_ino, house.disk.read_bytes() == NOW) == (before, True), moment
        assert house.guest.xml == now, moment
    assert moment > 5, "it is looked at more than once"


@pytest.mark.parametrize("is_gone", [False, True])
def test_the_next_service_goes_on_with_the_file_beside_the_disk_and_copies_one_that_is_gone_again(
    house: OneGuest, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    """Its watermark says that it is complete. What it needs beside the disk it has in part, so that is not asked again."""
    copy, copied, reached = Copying.copy, list[bool](), threading.Event()

    def cut_off(copying: Copying, order: DiskOrder) -> None:
        copy(copying, order)
        reached.set()
        until(copying.under_way.stop)
        raise Cancelled

    def counted(copying: Copying, order: DiskOrder) -> None:
        copied.append(not copying.have_all([order.key]))
        copy(copying, order)

    house.image("web", NOW)
    with monkeypatch.context() as patched:
        patched.setattr(Copying, "copy", cut_off)
        run = house.backups.restore(house.point, RestoreRequest(target="in_place"))
        assert reached.wait(60)
        house.backups.close()
    if is_gone:
        (house.folder / f"images/.synvirt-{run.id}-0").unlink()
    monkeypatch.setattr(Copying, "copy", counted)
    monkeypatch.setattr(present, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=0)))
    house.begin()
    ended = house.ended(run)
    assert (ended.status, ended.error, house.disk.read_bytes() == THEN) == (Status.COMPLETED, None, True)
    assert copied == [is_gone]
    assert ([one.name for one in (house.folder / "images").iterdir()], rows_left(house.store)) == (["web"], [])


class Device:
    """What a restore does to a device, in its order. `refusal`: why there is no snapshot."""

    def __init__(self, folder: Path, patched: pytest.MonkeyPatch, *, resumed: bool, refusal: str = "") -> None:
        self.calls: list[str] = []
        self.orders: list[DiskOrder] = []
        self.guest, self.asked, self.place = Guest(XML), False, Place(str(folder / "device"), "block")
        (folder / "device").touch()

        def zfs(command: str, snapshot: str) -> None:
            self.calls.append(command)
            if refusal:
                raise _refused(ProgramFailed("zfs", 1, f"cannot create snapshot '{snapshot}': {refusal}"))

        patched.setattr(in_place, "Zfs", lambda: zfs)
        under_way = SimpleNamespace(
            run=SimpleNamespace(id=UUID(int=1)), stop=lambda: self.asked, warn=lambda code, *_: self.calls.append(code)
        )
        copying: Any = SimpleNamespace(under_way=under_way, copy=self.copied, forget=lambda _: self.calls.append("forget"))
        ledger: Any = SimpleNamespace(record=lambda _, kind, __: self.calls.append(f"record {kind}"))
        nothing: Any = None
        self.restored = _Restored(nothing, ledger, copying, lambda: self.guest, resumed=resumed)

    def copied(self, order: DiskOrder, stop: Callable[[], bool]) -> None:
        self.calls.append("copy")
        self.orders.append(order)

    def write(self) -> None:
        spec = PointSpec(repository=RepositorySpec(place=FolderSpec(path="/x"), key=""), point_id="", number=0)
        self.restored._device("vda", self.place, 0, spec)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("refusal", ["", "dataset already exists", "out of space"])
def test_a_volume_is_not_written_before_there_is_a_way_back_and_that_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool, refusal: str
) -> None:
    """The snapshot of a service before is that way. All of the device is written, even if that service had written a part: it
    holds other bytes, and its guest may have written since."""
    monkeypatch.setattr(present, "zfs_volume", lambda _: "tank/volume")
    device = Device(tmp_path, monkeypatch, resumed=resumed, refusal=refusal)
    is_fine = not refusal or (resumed and "exists" in refusal)
    with nullcontext() if is_fine else pytest.raises(ZfsRefused):
        device.write()
    written = [*(["forget"] if resumed else []), "copy"] if is_fine else []
    assert device.calls == ["record snapshot", "snapshot", *written]
    assert [(order.fresh, order.zero_rest) for order in device.orders] == [(False, True)] * is_fine
    assert device.restored._snapshots == [f"tank/volume@synvirt-restore-{UUID(int=1)}"] * is_fine


def test_a_device_without_a_way_back_is_written_after_that_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(tmp_path, monkeypatch, resumed=False)
    device.write()
    assert device.calls == [in_place.NO_WAY_BACK, "copy"]


def test_files_come_first_which_can_still_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    for name in ("_file", "_device"):
        monkeypatch.setattr(_Restored, name, lambda _self, target, *_: written.append(target))
    copying: Any = SimpleNamespace(under_way=SimpleNamespace(run=SimpleNamespace(id=UUID(int=1))))
    anything: Any = SimpleNamespace()
    restored = _Restored(anything, anything, copying, lambda: Guest(XML), resumed=True)
    places = {"vda": "block", "vdb": "file", "vdc": "block", "vdd": "file"}
    restored.disks({target: (Place("/x", kind), 0, anything) for target, kind in places.items()})
    assert written == ["vdb", "vdd", "vda", "vdc"]


@pytest.mark.parametrize(("asked", "error"), [(False, SourceRunning), (True, Cancelled)])
def test_a_guest_that_ran_for_a_moment_is_why_the_copy_onto_its_device_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool, error: type[Exception]
) -> None:
    """It is off again when that is looked at: nobody has cancelled the restore."""
    device = Device(tmp_path, monkeypatch, resumed=False)

    def copied(_order: DiskOrder, stop: Callable[[], bool]) -> None:
        device.guest.runs_at = range(device.guest.looks + 1, device.guest.looks + 2)
        assert stop()
        device.asked = asked
        raise Cancelled

    monkeypatch.setattr(device.restored._copying, "copy", copied)
    with pytest.raises(error):
        device.write()


def test_nobody_else_uses_the_guest_from_the_check_to_the_end(house: OneGuest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a backup of it, which would have the restore's bytes and the guest's as those of one moment."""
    calls: list[bool] = []

    def noted(really: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(house.is_alone)
            return really(*arguments, **named)

        return call

    for place, name in ((present, "runs"), (Copying, "copy"), (in_place, "_swap"), (present, "define")):
        monkeypatch.setattr(place, name, noted(getattr(place, name)))
    house.image("web", NOW)
    run = house.restored()
    assert run is not None
    assert (run.status, house.disk.read_bytes() == THEN) == (Status.COMPLETED, True)
    # It was looked at once when the restore was asked for.
    assert (calls[0], set(calls[1:]), house.is_alone) == (False, {True}, False)


@pytest.mark.parametrize("disks", [(), ("vda",)])
def test_the_guest_stays_who_it_is_now_and_sees_that_it_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disks: tuple[str, ...]
) -> None:
    """Its name, its firmware and the place of its variables; with single disks, all of its definition. Until its disks are
    there it is as it is: somebody may start it."""
    need_libvirt()
    uefi = "<loader readonly='yes' type='pflash'>/then.fd</loader><nvram>/then_VARS.fd</nvram></os>"
    generation = f"<genid>{UUID(int=8)}</genid>"
    with closing(OneGuest(tmp_path, XML.replace("</os>", uefi).replace("<vcpu>", f"{generation}<vcpu>"))) as house:
        variables = tmp_path / "now_VARS.fd"
        variables.write_bytes(b"variables now")
        now = house.guest.xml.replace("<name>web<", "<name>renamed<").replace("64</memory>", "96</memory>")
        now = now.replace("/then.fd", "/now.fd").replace("/then_VARS.fd", str(variables))
        house.image("web", NOW)
        house.guest.xml, copy, meanwhile = now, Copying.copy, list[str]()

        def copied(copying: Copying, order: DiskOrder) -> None:
            meanwhile.append(house.guest.xml)
            copy(copying, order)

        monkeypatch.setattr(Copying, "copy", copied)
        run = house.restored(*disks)
        assert run is not None
        assert (run.status, house.disk.read_bytes() == THEN, meanwhile) == (Status.COMPLETED, True, [now])
        if disks:
            assert (house.guest.xml, variables.read_bytes()) == (now, b"variables now")
            return
        found = ElementTree.fromstring(house.guest.xml)
        of = {path: found.findtext(path) for path in ("name", "memory", "os/loader", "os/nvram", "genid")}
        assert of == {"name": "renamed", "memory": "64", "os/loader": "/now.fd", "os/nvram": str(variables), "genid": ""}
        assert variables.read_bytes() == b"nvram"


def test_a_cancel_that_comes_after_the_copy_leaves_the_guest_as_it_is(house: OneGuest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what its operator has changed of its definition meanwhile."""
    copy, changed = Copying.copy, house.guest.xml.replace("64</memory>", "96</memory>")

    def cancelled(copying: Copying, order: DiskOrder) -> None:
        copy(copying, order)
        house.guest.xml = changed
        house.backups.runs.cancel(copying.under_way.run.id)

    monkeypatch.setattr(Copying, "copy", cancelled)
    house.image("web", NOW)
    run = house.restored()
    assert run is not None
    assert (run.status, house.disk.read_bytes() == NOW, house.guest.xml) == (Status.CANCELLED, True, changed)
    assert ([one.name for one in (house.folder / "images").iterdir()], rows_left(house.store)) == (["web"], [])


def test_a_cancel_that_comes_when_the_disk_is_replaced_already_is_too_late(
    house: OneGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told that the guest is as it was."""
    swap = in_place._swap

    def cancelled(one: Swap) -> None:
        swap(one)
        (run,) = house.backups.runs.not_ended()
        house.backups.runs.cancel(run.id)

    monkeypatch.setattr(in_place, "_swap", cancelled)
    house.image("web", NOW)
    run = house.restored()
    assert run is not None
    assert (run.status, run.error, run.domain and run.domain.name) == (Status.COMPLETED, None, "web")
    assert (house.disk.read_bytes() == THEN, rows_left(house.store)) == (True, [])


@pytest.mark.parametrize("disks", [(), ("vda",)])
@pytest.mark.parametrize(("snapshots", "is_moved"), [(1, False), (1, True), (0, True)])
def test_a_snapshot_that_is_taken_during_the_copy_keeps_the_disk_that_it_needs(
    house: OneGuest, monkeypatch: pytest.MonkeyPatch, snapshots: int, is_moved: bool, disks: tuple[str, ...]
) -> None:
    """In the present file; or in a new one that lies over it, and would lie over other bytes. libvirt need not know of it."""
    copy, now, above = Copying.copy, house.guest.xml, house.folder / "above.qcow2"

    def taken(copying: Copying, order: DiskOrder) -> None:
        copy(copying, order)
        house.guest.snapshots = snapshots
        if is_moved:
            above.touch()
            house.guest.xml = now.replace(str(house.disk), str(above)).replace("'raw'", "'qcow2'")

    monkeypatch.setattr(Copying, "copy", taken)
    house.image("web", NOW)
    run = house.restored(*disks)
    assert run is not None
    assert (run.status, run.error and run.error.code) == (Status.FAILED, "E_BAK_CONFLICT")
    assert house.disk.read_bytes() == NOW
    assert ([one.name for one in (house.folder / "images").iterdir()], rows_left(house.store)) == (["web"], [])


@pytest.mark.parametrize(
    ("of_guest", "xml", "error"),
    [
        ({"snapshots": 1}, ("", ""), BackupConflict),
        ({"is_saved": True}, ("", ""), SourceRunning),
        ({}, ("type='raw'", "type='vmdk'"), SourceUnsupported),
        ({}, ("type='file'", "type='network'"), SourceUnsupported),
        ({}, ("type='file' device", "type='block' device"), SourceUnsupported),
        ({}, ("'vda'", "'vdb'"), BackupConflict),
    ],
)
def test_a_disk_that_cannot_be_replaced_as_a_whole_is_left_alone(
    house: OneGuest, of_guest: dict[str, Any], xml: tuple[str, str], error: type[Exception]
) -> None:
    """A snapshot's data, or a saved guest's, would not fit the disk any more."""
    house.image("web", NOW)
    vars(house.guest).update(of_guest)
    house.guest.xml = house.guest.xml.replace(*xml)
    with pytest.raises(error):
        house.backups.restore(house.point, RestoreRequest(target="in_place"))
    assert (house.disk.read_bytes() == NOW, rows_left(house.store)) == (True, [])


def test_a_link_to_the_disk_stays_and_the_file_keeps_its_owner_and_mode(
    house: OneGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "chown", lambda _path, *owner: owners.append(owner))
    really = house.folder / "really"
    really.write_bytes(NOW)
    really.chmod(0o604)
    house.disk.unlink()
    house.disk.symlink_to(really)
    assert house.restored() is not None
    assert (house.disk.is_symlink(), really.read_bytes() == THEN) == (True, True)
    status = really.stat()
    assert (owners, status.st_mode & 0o777) == ([(status.st_uid, status.st_gid)], 0o604)


def written(disk: Path) -> None:
    disk.write_bytes(MEANWHILE)


def replaced(disk: Path) -> None:
    """By a file of the same age."""
    status = disk.stat()
    disk.with_suffix(".new").write_bytes(MEANWHILE)
    os.utime(disk.with_suffix(".new"), ns=(status.st_atime_ns, status.st_mtime_ns))
    disk.with_suffix(".new").rename(disk)


@pytest.mark.parametrize(
    ("meanwhile", "runs", "content"),
    [(None, False, THEN), (written, False, MEANWHILE), (replaced, False, MEANWHILE), (None, True, NOW)],
)
@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("by", ["the next service", "its sweep alone"])
def test_a_file_that_its_guest_may_have_used_since_the_kill_is_kept(
    tmp_path: Path, meanwhile: Callable[[Path], None] | None, runs: bool, content: bytes, is_swapped: bool, by: str
) -> None:
    """And one that got its name before it is what the guest uses, whatever happened to it since."""
    run_id, guest = UUID(int=1), Guest(XML)
    disk, staged = tmp_path / "disk", tmp_path / f".synvirt-{UUID(int=1)}-0"
    disk.write_bytes(NOW)
    swap = LedgerEntry("swap", json.dumps([str(staged), str(disk), _mark(str(disk)), "x"]))
    staged.write_bytes(THEN)
    if is_swapped:
        staged.rename(disk)
        content = {THEN: THEN, NOW: THEN, MEANWHILE: MEANWHILE}[content]
    if meanwhile is not None:
        meanwhile(disk)
    guest.runs_at = range(1, 1000) if runs else range(0)
    host: Any = SimpleNamespace(domain=lambda *_: guest)
    entries = [swap, LedgerEntry(in_place.CHECKPOINTS, "x")]
    if by == "the next service":
        need_libvirt()
        with closing(Store(f"sqlite:///{tmp_path / 'test.db'}")) as store:
            ledger = Ledger(store.ledgers, "run", host="local", undo=in_place.undo(host, {}), order=in_place.ORDER)
            ledger.replace(run_id, entries)
            found = gone_forward(host, ledger, run_id)
            is_kept = not is_swapped and content != THEN
            assert (found is None) == is_kept
            assert (OVERTAKEN in [entry.kind for entry in ledger.of(run_id)]) == is_kept
            assert ledger.sweep(run_id)
    else:
        in_place.undo(host, {})["swap"](run_id, swap.name)
    before = Path(Swap(str(staged), str(disk)).before)
    before.unlink(missing_ok=True)  # an entry of its own
    assert disk.read_bytes() == content
    assert [one.name for one in tmp_path.iterdir() if one.suffix != ".db"] == ["disk"]


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ENOENT, errno.EPERM, errno.EOPNOTSUPP, errno.EIO, errno.ENOSPC])
def test_a_disk_is_not_replaced_where_the_old_one_cannot_be_kept_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """But for a file system that has no second names at all."""

    def link(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    swap, broken = Swap(str(tmp_path / "staged"), str(tmp_path / "disk")), code in (errno.EIO, errno.ENOSPC)
    Path(swap.staged).write_bytes(THEN)
    Path(swap.path).write_bytes(NOW)
    with pytest.raises(DiskWriteFailed) if broken else nullcontext():
        in_place._swap(swap)
    assert Path(swap.path).read_bytes() == (NOW if broken else THEN)
    assert Path(swap.staged).exists() == broken


class Failing:
    """At one moment, of steps that are counted from 1."""

    def __init__(self, moment: int) -> None:
        self.moment, self.count = moment, 0

    def step(self, really: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self.moment:
                raise error
            return really(*arguments, **named)

        return call


def test_whatever_fails_the_guest_has_all_of_the_point_or_nothing_of_it(house: OneGuest) -> None:
    """Its disk and its definition, at the latest when the next service has begun; and nothing else is left."""
    need_libvirt()
    then, now = house.guest.xml, house.guest.xml.replace("64</memory>", "96</memory>")
    steps: list[tuple[object, str, Exception]] = [
        *((os, name, OSError(errno.EIO, "Input/output error")) for name in ("link", "chown")),
        *(
            (place, name, OSError(errno.EIO, "Input/output error"))
            for place, name in ((Path, "replace"), (in_place, "sync_folder"))
        ),
        (present, "define", load().libvirtError("it is away")),
        *((Ledger, name, PersistFailed("the store is away")) for name in ("record", "replace")),
    ]
    ends: set[Status] = set()
    for moment in count(1):
        house.image("web", NOW)
        house.guest.xml, failing = now, Failing(moment)
        with pytest.MonkeyPatch.context() as patched:
            for place, name, error in steps:
                patched.setattr(place, name, failing.step(getattr(place, name), error))
            run = house.restored()
        assert run is not None
        if rows_left(house.store):
            house.backups.close()
            house.begin()
        is_then = "96</memory>" not in house.guest.xml
        assert house.disk.read_bytes() == (THEN if is_then else NOW), moment
        assert ([one.name for one in (house.folder / "images").iterdir()], rows_left(house.store)) == (["web"], []), moment
        assert is_then or run.status is Status.FAILED, moment
        ends.add(run.status)
        if failing.count < moment:
            assert run.status is Status.COMPLETED
            break
    assert (Status.FAILED in ends, moment > 10) == (True, True)
    assert house.guest.xml != then, "it is another generation"
